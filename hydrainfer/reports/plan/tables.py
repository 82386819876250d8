"""A plan in words and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table

from hydrainfer.planner.search import TOLERANCE, Attempt, LayoutPlan, Live, Row
from hydrainfer.reports.drawing import ms, percent
from hydrainfer.reports.plan.prices import bill, thousand

_FAR = 30.0  # ratio beyond which the other layout's goodput is not given as a number
_SEARCHED = "goodput"  # the one objective whose rows have a goodput with an interval


def ranked(plan: LayoutPlan, n: int) -> Table:
    """The `n` best layouts, of those that were measured to the end."""
    at = "at the goodput"
    if plan.rate is not None:
        at = f"at {plan.rate:g} requests/s"
    table = Table(title=f"{plan.hardware}, {plan.model}: latencies {at}", title_justify="left")
    table.add_column("layout", no_wrap=True)
    table.add_column("method")
    carried = ["goodput, /s", "95 %"] if plan.objective == _SEARCHED else ["met"]
    for name in (*carried, "TTFT p90, ms", "TPOT p90, ms", "interval"):
        table.add_column(name, justify="right")
    if plan.price is not None:
        table.add_column("per 1,000 requests", justify="right")
    table.add_column("why it carries no more")
    for row in _measured(plan)[:n]:
        met = "–"
        if row.attainment is not None:
            met = percent(row.attainment)
        carries = [said(row.goodput), interval(row)] if plan.objective == _SEARCHED else [met]
        cells = [
            row.layout,
            row.method,
            *carries,
            ms(row.ttft_p90),
            ms(row.tpot_p90),
            ms(row.interval_p90),
            *([thousand(row)] if plan.price is not None else []),
            row.limited_by,
        ]
        table.add_row(*map(escape, cells))
    return table


def said(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.3g}"


def interval(row: Row) -> str:
    """The interval of the goodput, without its lower end if no rate that was tried is certainly carried."""
    if not row.goodput:
        return "–"
    high = "?"
    if row.goodput_high is not None:
        high = f"{row.goodput_high:.3g}"
    if row.goodput_low:
        return f"{row.goodput_low:.3g} to {high}"
    return f"below {high}"


def regret(row: Row, best: Row) -> str:
    """The share by which a row's goodput is below the best."""
    if row.goodput and best.goodput:
        return f"−{(1 - row.goodput / best.goodput) * 100:.0f} %"
    return ""


def conclusions(plan: LayoutPlan, n: int | None = None) -> list[str]:
    """The answer first, then what host memory and the store contribute, costs, the model error, what is known of
    layouts beyond the first `n` in `ranked` (None: beyond those measured to the end), validation runs, and notes."""
    rest = others(plan, n)
    return [
        *answer(plan),
        *costs(plan),
        *_model_error(plan),
        *([rest] if rest else []),
        *validations(plan),
        *plan.notes,
    ]


def costs(plan: LayoutPlan) -> list[str]:
    """Sentences on what host memory and the store contribute, and on what requests cost."""
    return [*_tiers(plan), *bill(plan)]


def uncertainties(plan: LayoutPlan) -> list[str]:
    """Sentences on the error of the model, and the notes."""
    return [*_model_error(plan), *plan.notes]


def validations(plan: LayoutPlan) -> list[str]:
    """A sentence on each layout that was run for real."""
    return [_live(run, plan.model_error) for run in plan.live]


def _tiers(plan: LayoutPlan) -> Iterator[str]:
    """A sentence on the share of the prompts that each tier adds, and on TTFT with and without it."""
    best = plan.choice
    if best is None or not plan.tiers:
        return
    parts = []
    for gain in plan.tiers:
        where = "in the caches of its devices alone"
        if gain.store:
            where = "with the store as well" if gain.host_memory else "with the store"
        elif gain.host_memory:
            where = f"with {plan.host_cache_gib:g} GiB of host memory each"
        ttft = f"TTFT p50 {ms(gain.ttft_p50)} ms, p90 {ms(gain.ttft_p90)} ms"
        parts.append(f"{percent(gain.found)} {where} ({ttft})")
    rate = said(plan.tiers[0].rate)
    yield f"At {rate} requests/s, {best.layout} finds of the prompts' tokens {', '.join(parts)}."


def _model_error(plan: LayoutPlan) -> Iterator[str]:
    """A sentence on the error of the simulation itself, which is not part of the intervals."""
    best = plan.choice
    error = plan.model_error
    if best is None or not best.goodput or plan.objective != _SEARCHED:
        return
    if error is None:
        yield (
            f"Model error: not known for {plan.engine} on a described device. Plans of vLLM were 1.5 to 6 times too "
            "good before it was fitted to measurements (docs/planning.md); benchmarks/b24_predictions.py does that "
            "with yours."
        )
        return
    low = best.goodput / (1 + error)
    high = best.goodput * (1 + error)
    yield (
        f"Model error: real deployments were within a factor of {1 + error:.3g} of such plans, which is {said(low)} to "
        f"{said(high)} requests/s here (docs/planning.md)."
    )


def answer(plan: LayoutPlan) -> list[str]:
    """The answer to the question, in a few sentences."""
    if plan.best is None:
        return [_nothing(plan)]
    return list({"goodput": _most, "devices": _fewest}.get(plan.objective, _quickest)(plan, plan.best))


def others(plan: LayoutPlan, n: int | None = None) -> str:
    """A sentence on the layouts that are not in the table; "" if all are."""
    measured = _measured(plan)
    below = [row for row in plan.layouts if row not in measured]
    parts = []
    if hidden := measured[n:] if n is not None else []:
        rates = [row.goodput or 0.0 for row in hidden]
        span = ""
        if plan.objective == _SEARCHED:
            span = f" ({min(rates):.3g} to {max(rates):.3g} requests/s)"
        parts.append(f"{len(hidden)} more {_were(hidden)} measured{span}")
    if plan.objective == _SEARCHED:
        parts += _limits(plan, below)
    else:
        n_open = len(_undecided(plan))
        if n := len(below) - n_open:
            parts.append(f"{n} others do not carry {said(plan.rate)} requests/s within the SLO")
        if n_open:
            parts.append(f"{n_open} undecided at {said(plan.rate)} requests/s: repeat it with more --requests")
    return "; ".join(parts) + "." if parts else ""


def most(row: Row) -> float:
    """The upper limit of what a layout carries, in requests per second."""
    return row.goodput_high or row.bound


def may_carry_more(plan: LayoutPlan) -> list[Row]:
    """The layouts without a goodput whose upper limit exceeds what the layout to deploy carries."""
    best = plan.choice
    if best is None or not best.goodput or plan.objective != _SEARCHED:
        return []
    return [row for row in plan.layouts if not row.goodput and most(row) > best.goodput]


def _limits(plan: LayoutPlan, below: Sequence[Row]) -> Iterator[str]:
    """What is known of layouts without a goodput: which of them may carry more than the choice, and the upper limit of
    the others, which is certain if the least possible work sets it, and not if one short run failed."""
    able = may_carry_more(plan)
    if able:
        layouts = "1 layout" if len(able) == 1 else f"{len(able)} layouts"
        limit = max(map(most, able))
        yield f"{layouts} {_were(able)} not measured to the end and may carry up to {limit:.3g} requests/s"
    rest = [row for row in below if row not in able]
    if rest:
        n_failed = sum(row.limit == "failed" for row in rest)
        how = " for certain"
        if n_failed:
            how = f", {n_failed} of them by one short run each"
        yield f"{len(rest)} others: less than {max(map(most, rest)):.3g} requests/s{how}"


def _live(run: Live, error: float | None) -> str:
    """A sentence on a validation run: measured and predicted values."""

    def told(name: str, pair: tuple[float, float]) -> str:
        return f"{name} {ms(pair[1])} ms (predicted {ms(pair[0])})"

    met = f"{percent(run.attainment[1])} met the SLO (predicted {percent(run.attainment[0])})"
    latencies = (told("TTFT p50", run.ttft_p50), told("p90", run.ttft_p90))
    tokens = (told("TPOT p50", run.tpot_p50), told("p90", run.tpot_p90))
    return f"{carried(run, error)} At {said(run.rate)} requests/s {met}; {', '.join((*latencies, *tokens))}."


def carried(run: Live, error: float | None) -> str:
    """The measured and the predicted goodput, in a sentence or two. `error`: the model error that the plan states."""
    predicted, measured = run.goodput
    low = run.goodput_low
    high = run.goodput_high
    span = f"{said(low)} to {said(high)}" if low and high else f"at least {said(low)}" if low else f"below {said(high)}"
    between = ""
    if low or high:
        between = f" ({span} for certain)"
    beside = ""
    if said(predicted) != said(run.planned):
        beside = f" with this client on the same cores ({said(run.planned)} without)"
    text = (
        f"Run for real, {run.layout} carries {said(measured)} requests/s{between}, predicted {said(predicted)}{beside}."
    )
    if error is None:
        return text
    least = predicted / (1 + error) / 1.001
    most = predicted * (1 + error) * 1.001
    if not measured and (high is None or high > least):
        return f"{text} The runs were too short to tell whether that is within the stated model error."
    return f"{text} That is {'within' if least <= measured <= most else 'NOT within'} the stated model error."


def _were(rows: Sequence[Row]) -> str:
    return "was" if len(rows) == 1 else "were"


def _measured(plan: LayoutPlan) -> list[Row]:
    return [row for row in plan.layouts if row.goodput]


def _undecided(plan: LayoutPlan) -> list[Row]:
    """The layouts of which the runs could not tell whether they carry the rate that was asked for."""
    if plan.rate is None or plan.objective == _SEARCHED:
        return []
    return [row for row in plan.layouts if not row.goodput and (row.goodput_high or 0.0) > plan.rate]


def _not_carried(plan: LayoutPlan, row: Row) -> str:
    """What is known of a layout that does not certainly carry the rate that was asked for."""
    if row in _undecided(plan):
        return f"whether {row.layout} carries that rate is undecided, repeat it with more --requests"
    return f"{row.layout} does not carry that rate within the SLO"


def only_epd(plan: LayoutPlan) -> Row | None:
    """The EPD-only layout, which splits nothing."""
    return next((row for row in plan.layouts if row.method == "EPD"), None)


def _carries(row: Row) -> str:
    return f"{said(row.goodput)} requests/s (95 %: {interval(row)})"


def _most(plan: LayoutPlan, best: Row) -> Iterator[str]:
    epd = only_epd(plan)
    split = next((row for row in _measured(plan) if row.method != "EPD"), None)
    if epd is None or (epd is best and split is None):
        yield f"{best.layout} carries most within the SLO: {_carries(best)}."
        if epd is best and (high := [row.goodput_high or row.bound for row in plan.layouts if row is not best]):
            yield f"Do not split: no other layout carries {max(high):.3g} requests/s."
    elif epd is best:
        assert split is not None
        yield f"Do not split: {best.layout} carries most within the SLO, {_carries(best)}."
        yield f"The best split layout is {split.layout}: {_carries(split)}; {_judged(best, split)}."
    elif plan.choice is epd:
        within = "less than a search resolves"
        if best.goodput_low:
            within = "within the interval"
        yield (
            f"Do not split: {best.layout} carries {_carries(best)} within the SLO, but {epd.layout} carries "
            f"{said(epd.goodput)} without splitting, and the difference is {within}."
        )
        best = epd
    else:
        yield f"{best.layout} carries most within the SLO: {_carries(best)}, {_gain(plan, best, epd)}."
    second = next((row for row in _measured(plan) if row not in (best, epd)), None)
    if second is not None and best is not epd:
        yield f"Next comes {second.layout}: {_carries(second)}; {_judged(best, second)}."
    yield f"Why {best.layout} carries no more: {best.why or best.limited_by}."


def _judged(best: Row, other: Row) -> str:
    """Whether the runs tell which of two layouts carries more."""
    low, high = best.goodput_low, other.goodput_high
    if low and high and low >= high:
        return "that it carries less is decided"
    return "which carries more is not decided, so try both, or repeat it with more --requests"


def _gain(plan: LayoutPlan, best: Row, epd: Row) -> str:
    assert best.goodput
    if not epd.goodput:
        high = epd.goodput_high or 0.0
        if best.goodput > _FAR * high:
            return f"where {epd.layout} carries next to nothing"
        return f"at least {_times(best.goodput / high)} {epd.layout}, which carries less than {high:.3g}"
    more = f"{_times(best.goodput / epd.goodput)} {epd.layout}, which carries {said(epd.goodput)} ({interval(epd)})"
    if epd.goodput_high and best.goodput_low and best.goodput_low >= epd.goodput_high:
        return f"{more}; that is beyond both intervals"
    return (
        f"{more}; but the intervals overlap, so {plan.requests} requests do not prove it: repeat it with more "
        "(--requests)"
    )


def _times(ratio: float) -> str:
    if ratio < 3:
        return f"{(ratio - 1) * 100:.0f} % more than"
    return f"{ratio:.1f} times as much as"


def _fewest(plan: LayoutPlan, best: Row) -> Iterator[str]:
    n = plan.devices
    rate = said(plan.rate)
    single = plan.devices == plan.per_instance
    enough = f"{n} device{'' if n == 1 else 's'} carr{'ies' if n == 1 else 'y'} {rate} requests/s within the SLO"
    fewer = ", no fewer do for certain"
    if single:
        fewer = ""
    met = ""
    if best.attainment is not None:
        met = f" ({percent(best.attainment)} of the requests meet it)"
    yield f"{enough}{fewer}: as {best.layout}{met}."
    epd = only_epd(plan)
    if single or epd is None:
        return
    if epd is best:
        yield f"Do not split: {epd.layout} is the layout that meets it most often."
    elif epd.goodput:
        share = ""
        if epd.attainment is not None:
            share = f", for {percent(epd.attainment)} of the requests"
        yield f"You need not split: {epd.layout} carries it as well{share}."
    else:
        yield f"Without splitting, they do not for certain: {_not_carried(plan, epd)}."


def _quickest(plan: LayoutPlan, best: Row) -> Iterator[str]:
    name = plan.objective.upper()
    rate = said(plan.rate)
    seconds = _p90(plan, best)
    epd = only_epd(plan)
    theirs = None
    if epd is not None and epd.goodput:
        theirs = _p90(plan, epd)
    least = f"{best.layout} has the least {name} p90 at {rate} requests/s: {ms(seconds)} ms"
    if epd is best:
        split = next((row for row in _measured(plan) if row.method != "EPD"), None)
        yield f"Do not split: {least}" + (
            f"; the best split layout, {split.layout}, has {ms(_p90(plan, split))} ms." if split is not None else "."
        )
    elif epd is None:
        yield f"{least}."
    elif seconds is None or theirs is None:
        yield f"{least}; {_not_carried(plan, epd)}."
    elif seconds >= theirs * (1 - TOLERANCE):
        yield f"Do not split: {epd.layout} has a {name} p90 of {ms(theirs)} ms there; {least}, hardly less."
    else:
        yield f"{least}, {(1 - seconds / theirs) * 100:.0f} % less than {epd.layout} ({ms(theirs)} ms)."
    met = ""
    if best.attainment is not None:
        met = f" for {percent(best.attainment)} of the requests"
    yield f"It meets the SLO there{met}."


def _p90(plan: LayoutPlan, row: Row) -> float | None:
    if plan.objective == "ttft":
        return row.ttft_p90
    return row.tpot_p90


def _nothing(plan: LayoutPlan) -> str:
    tried = [(a, row) for row in plan.layouts for a in row.attempts]
    slo = str(plan.slo)
    share = f"{plan.target * 100:g} % of the requests"
    if plan.impossible:
        return f"Nothing meets the SLO ({slo}, for {share}): {plan.impossible}."
    where = ""
    if plan.rate is not None:
        where = f" at {said(plan.rate)} requests/s"
    if unsure := _undecided(plan):
        n = max(a.n for row in unsure for a in row.attempts)
        return (
            f"No layout certainly meets the SLO ({slo}, for {share}){where}: runs of up to {n} requests are too short "
            f"to tell for {unsure[0].layout}."
        )
    best = max(tried, key=lambda t: (not t[0].stopped, t[0].n_met / max(t[0].n, 1), t[0].rate), default=None)
    if best is None:
        most = max((row.bound for row in plan.layouts), default=0.0)
        stage = next((row.stage for row in plan.layouts if row.bound == most), "")
        by = ""
        if stage:
            by = f": {stage} does not allow for it"
        return f"No layout meets the SLO ({slo}, for {share}){where}{by}; at most {said(most)} requests/s can last."
    row = best[1]
    explained = [r for r in (row, *plan.layouts) if r.search == "final" and r.stage]
    stage = explained[0].stage if explained else ""  # other rows only have a bound, which says nothing about the SLO
    by = ""
    if stage:
        by = f": {stage} makes it impossible"
    return f"Nothing meets the SLO ({slo}, for {share}){where}{by}; {_attainable(best[0], row)}."


def _attainable(a: Attempt, row: Row) -> str:
    if a.stopped or not a.n:
        return f"{row.layout} was the last to be given up, at {said(a.rate)} requests/s"
    latencies = [f"{name} p90 {ms(s)} ms" for name, s in (("TTFT", a.ttft_p90), ("TPOT", a.tpot_p90)) if s is not None]
    told = ""
    if latencies:
        told = f" ({', '.join(latencies)})"
    met = f"{percent(a.n_met / a.n)} meet it{told}"
    return f"the best attainable is {row.layout} at {said(a.rate)} requests/s, where {met}"
