"""Figure 5b: the rate over the threshold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.figure import save_lines
from benchmarks.prfaas.report import row
from benchmarks.prfaas.setting import PAPERS, THRESHOLD, prfaas
from hydrainfer.planner.clusters import Arrangement, Service, throughput

TITLE = "Figure 5b: the threshold, with 3 P and 5 D at home"
HAS_FIGURE = True
THRESHOLDS = [float(k) for k in range(10, 41, 2)]
_CROSSING = 0.0207  # 19.4K to 19.8K
_FINEST = 1.0  # token
TEXT = """\
Left of the crossing the far cluster limits, as it gets many short prompts; right of it home does. A threshold that is
too high by a factor of 1.5 costs 39 % of the rate, one that is too low by as much 10 %: in doubt, the lower."""


def stages(threshold: float, service: Service) -> tuple[float, float]:
    """Requests per second, of all, that the far cluster and home prefill allow (terms of Eq. 6)."""
    split = Arrangement(threshold=threshold, n_prefill=PAPERS.n_prefill, n_decode=PAPERS.n_decode)
    found = throughput(prfaas(), split, service)
    assert found.far_per_s is not None and found.home_per_s is not None
    return found.far_per_s / found.far_share, found.home_per_s / (1.0 - found.far_share)


def crossing(service: Service) -> float:
    """The threshold in tokens at which both stages allow the same (Eq. 7), by bisection."""
    low, high = 1000.0 * THRESHOLDS[0], 1000.0 * THRESHOLDS[-1]
    while high - low > _FINEST:
        middle = (low + high) / 2
        far, home = stages(middle, service)
        if far < home:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def curves(service: Service) -> dict[str, list[float]]:
    """Rates that the far cluster and home prefill allow, over `THRESHOLDS`."""
    pairs = [stages(1000.0 * t, service) for t in THRESHOLDS]
    return {"far prefill": [far for far, _ in pairs], "home prefill": [home for _, home in pairs]}


def compute() -> dict[str, Any]:
    """The curves, and where they cross."""
    cell = row("crossing, tokens", THRESHOLD, crossing("mean_length"), crossing("mean_time"), tolerance=_CROSSING)
    return {
        "rows": [cell],
        "thresholds_k": THRESHOLDS,
        "equations": curves("mean_length"),
        "queue": curves("mean_time"),
        "decode": throughput(prfaas(), PAPERS).decode_per_s,
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """The equations' curves."""
    far, home = results["equations"]["far prefill"], results["equations"]["home prefill"]
    decode = [results["decode"]] * len(far)
    rate = [min(stage) for stage in zip(far, home, decode, strict=True)]
    series = {"far prefill": far, "home prefill": home, "decode": decode, "all": rate}
    save_lines(path, TITLE, "threshold, 1,000 tokens", "requests/s", results["thresholds_k"], series, log=False)
