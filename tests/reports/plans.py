"""Plans as a search would leave them."""

import msgspec

from hydrainfer.config import Slo
from hydrainfer.planner.search import Attempt, CacheUse, Cell, LayoutPlan, Live, Ratio, RoleUse, Row, layouts, method_of

SLO = Slo(ttft_s=0.25, tpot_s=0.04)
LIMIT = "prefill is busy: at 95/s the language lane of P works 97 % of the time"
WHY = (
    f"{LIMIT}; 40 % of the requests miss TTFT ≤ 250 ms (alone 60 ms), mostly waiting for prefill (mean 0.2 s, p90 1 s)"
)


def row(layout, method, goodput, low, high, **more):
    return Row(
        layout=layout,
        method=method,
        goodput=goodput,
        goodput_low=low,
        goodput_high=high,
        ttft_p90=0.2,
        tpot_p90=0.03,
        attainment=0.93,
        stage="prefill",
        limited_by=LIMIT,
        limit="lane",
        why=WHY,
        bound=high * 1.2,
        **more,
    )


def below(layout, method, high, **more):
    words = f"prefill: the least possible work allows {high:.3g}/s"
    return Row(
        layout=layout,
        method=method,
        goodput_high=high,
        bound=high,
        search="pruned",
        stage="prefill",
        limited_by=words,
        **more,
    )


EPD = row("8EPD", "EPD", 50.0, 48.0, 52.0)
SPLIT = row("1E7PD", "E+PD", 90.0, 88.0, 95.0)


def plan(*rows, **more):
    given = {
        "model": "llava-next-7b",
        "devices": 8,
        "device": "h800",
        "measured": False,
        "workload": {"dataset": "textcaps", "output_mean": 31.04, "output_p90": 48.0},
        "slo": SLO,
        "target": 0.9,
        "objective": "goodput",
        "rate": None,
        "requests": 500,
        "seed": 7,
        "budgets": {"EPD": {"tokens": 530, "images": 3}, "P": {"tokens": 2048, "images": 4}},
        "command": "hydrainfer profile llava-next-7b --devices 8",
        "version": "0.1.0",
    }
    return LayoutPlan(layouts=rows, **given | more)


def whole():
    """Everything that a page can show."""
    rest = [below(str(x), method_of(x), 40.0) for x in layouts(8) if str(x) not in ("8EPD", "1E7PD")]
    tried = tuple(Attempt(rate=r, n=100, n_met=n) for r, n in ((70.0, 99), (88.0, 92), (95.0, 60)))
    kv = CacheUse(mean=0.5, most=0.75, n_bytes=float(40 << 30))
    embed = CacheUse(mean=0.112, most=0.25, n_bytes=float(1 << 29))
    return plan(
        msgspec.structs.replace(SPLIT, attempts=tried),
        EPD,
        *rest,
        use=(
            RoleUse(role="E", n=1, vision=0.8, language=None, caches={}, weight_bytes=6e8),
            RoleUse(role="PD", n=7, vision=None, language=0.9, caches={"embed": embed, "kv": kv}, weight_bytes=14e9),
        ),
        ratios=(
            Ratio(method="EPD", layout="8EPD", rate=50.0, ttft_p90=0.2, tpot_p90=0.015, attainment=0.9),
            *(
                Ratio(method="E+PD", layout=f"{n}E{8 - n}PD", rate=50.0, ttft_p90=n, tpot_p90=0.02, attainment=0.1)
                for n in range(1, 8)
            ),
        ),
        grid=(
            Cell(ttft_s=0.1, tpot_s=0.04, layout="1E7PD", method="E+PD", goodput=30.0, goodput_epd=20.0),
            Cell(ttft_s=8.0, tpot_s=0.04, layout="8EPD", method="EPD", goodput=60.0, goodput_epd=60.0),
            Cell(ttft_s=0.1, tpot_s=0.01, layout="", method="", goodput=0.0, goodput_epd=0.0),
        ),
        live=(
            Live(
                layout="1E7PD",
                rate=70.0,
                planned=90.0,
                goodput=(90.0, 81.0),
                goodput_low=70.0,
                goodput_high=90.0,
                attainment=(0.97, 0.91),
                ttft_p50=(0.1, 0.1),
                ttft_p90=(0.2, 0.25),
                tpot_p50=(0.02, 0.02),
                tpot_p90=(0.03, 0.03),
            ),
        ),
        notes=("The device is described, not measured.",),
    )


def failed(rate, n_met, n=100, stopped=False):
    p90 = {} if stopped else {"ttft_p90": 0.4, "tpot_p90": 0.02}
    return Attempt(rate=rate, n=n, n_met=n_met, stopped=stopped, **p90)
