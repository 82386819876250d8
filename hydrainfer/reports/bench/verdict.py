"""The conclusion of a benchmark in two sentences: the verdict, and what speaks against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hydrainfer.judging import Goodput
from hydrainfer.workload.results import NOISY_CORES, BenchResult, Run

Ranked = Sequence[tuple[str, Goodput]]


def answer(result: BenchResult) -> list[str]:
    """Which deployment carries most, by how much, within which SLO, and whether that is decided; of a single server,
    what it carries. Then, if there is any, a sentence with the reasons to doubt it."""
    doubts = list(_doubts(result))
    against = [f"Against it: {'; '.join(doubts)}."] if doubts else []
    return [_verdict(result), *against]


def surely_less(goodput: Goodput, leaders: Sequence[Goodput]) -> bool:
    """Whether the 95 % interval ends where those of all `leaders` begin, or before."""
    high = goodput.high
    return high is not None and all(leader.low is not None and leader.low >= high for leader in leaders)


def _verdict(result: BenchResult) -> str:
    ranked = sorted(result.goodput.items(), key=lambda item: -item[1].rate_per_s)
    if not ranked:
        return _without_goodput(result)
    asked = f"{ranked[0][1].target * 100:g} % of the requests within {result.slo}"
    if len(ranked) == 1:
        name, goodput = ranked[0]
        return f"{name} has a goodput of {_per_s(goodput)} (95 %: {interval(goodput)}), with {asked}."
    if not ranked[0][1].rate_per_s:
        names = _names([name for name, _ in ranked])
        return f"Not decided: none of {names} carries a rate that was run with {asked}."
    return _ranking(ranked, asked)


def _ranking(ranked: Ranked, asked: str) -> str:
    """The verdict on several deployments, the best first."""
    top = ranked[0][1].rate_per_s
    first = [(name, goodput) for name, goodput in ranked if goodput.rate_per_s == top]
    rest = ranked[len(first) :]
    less = [name for name, goodput in rest if surely_less(goodput, [g for _, g in first])]
    verb = "carries most" if len(first) == 1 else "carry most"
    lead = f"{_names([name for name, _ in first])} {verb}: {_per_s(first[0][1])} with {asked}"
    if not rest:
        return f"Not decided: {lead}, all the same on the rates that were run."
    lead += f", {_gain(top, rest)}"
    if len(less) < len(rest):
        sure = f"; only {_names(less)} surely less" if less else ""
        return f"Not decided: {lead}, but the 95 % intervals overlap ({_intervals(ranked)}){sure}."
    among = f" Among {_names([name for name, _ in first])} nothing is." if len(first) > 1 else ""
    return f"{lead}. That is decided: the 95 % intervals do not overlap ({_intervals(ranked)}).{among}"


def _gain(top: float, rest: Ranked) -> str:
    """How much more the best carries than those that come next."""
    rate = rest[0][1].rate_per_s
    names = _names([name for name, goodput in rest if goodput.rate_per_s == rate])
    if not rate:
        return f"where {names} carried none of the rates that were run"
    return f"{(top / rate - 1) * 100:.0f} % more than {names} ({rate:.4g})"


def _intervals(ranked: Ranked) -> str:
    return "; ".join(f"{name} {interval(goodput)}" for name, goodput in ranked)


def interval(goodput: Goodput) -> str:
    """The 95 % interval of a goodput, in requests per second."""
    low = "0" if goodput.low is None else f"{goodput.low:.4g}"
    if goodput.high is not None:
        return f"{low} to {goodput.high:.4g}"
    unsure = unsure_rate(goodput)
    if unsure is None:
        return f"{low} to beyond what was tried"
    return f"{low} to an end that is not certain, as the runs at {unsure:.4g}/s were too short to tell"


def unsure_rate(goodput: Goodput) -> float | None:
    """The lowest rate of which too many requests missed the SLO, in runs too short to be certain that it is not carried
    in the long run; None if there is none, or a rate is certainly not carried."""
    if goodput.high is not None:
        return None
    missed = [rate for rate, met in goodput.curve if met.share < goodput.target and rate > (goodput.low or 0.0)]
    return min(missed, default=None)


def is_too_short(run: Run) -> bool:
    """Whether a run is too short for its attainment to be that of the long run, and no queue certainly grew in it."""
    a = run.attainment
    return a is not None and run.rate_per_s is not None and not a.grows and a.n_wanted > a.met.n


def _without_goodput(result: BenchResult) -> str:
    """The verdict where no goodput was asked for or found: what the last run of each server had."""
    last = {run.server: run for run in result.runs}
    if not last:
        return "Nothing was measured."
    return "; ".join(_run(run) for run in last.values()) + "."


def _run(run: Run) -> str:
    carried = f"{run.server} at {run.arrivals}: {run.report.output_tokens_per_s:.4g} tokens/s"
    if run.attainment is None:
        return carried
    met = run.attainment.met
    return (
        f"{carried}, {met.share * 100:.0f} % of the requests met the SLO ({met.low * 100:.0f} to {met.high * 100:.0f})"
    )


def _doubts(result: BenchResult) -> Iterator[str]:
    """What speaks against the verdict, in a few words each; `conclusions` has whole sentences."""
    n = len(result.runs)
    failed = [server.name for server in result.servers if server.failed]
    late = sum(run.client_late for run in result.runs)
    noisy = sum((run.others_cores or 0.0) > NOISY_CORES for run in result.runs)
    if failed:
        yield f"{_names(failed)} could not be measured"
    if result.stopped:
        yield f"it was stopped before the end ({result.stopped})"
    if late:
        yield f"the client was late in {late} of {n} runs"
    if noisy:
        yield f"other processes used more than {NOISY_CORES:g} cores in {noisy} of {n} runs"
    if any(run.report.n_wrong_length for run in result.runs):
        yield "some answers were not as long as asked for"


def _per_s(goodput: Goodput) -> str:
    return f"{goodput.rate_per_s:.4g} requests/s"


def _names(names: Sequence[str]) -> str:
    """The names with commas and, before the last one, `and`."""
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"
