"""Why a layout carries no higher rate, in a sentence with the figures that show it.

A resource is named only if its own figure explains the misses: a lane that works nearly all the time, a cache that is
nearly full, no place free, a link that copies all the time. If none does, the sentence says so, and has the figures of
all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hydrainfer.core import Lane, Layout, Stage
from hydrainfer.metrics import INTERVALS
from hydrainfer.planner.search.evidence import Evidence, Latency, evidence_of
from hydrainfer.planner.search.layouts import role_of
from hydrainfer.planner.search.study import Study
from hydrainfer.planner.search.usage import RoleUse

FULL = 0.9
"""The share of a lane's time, of a cache or of the places from which on it counts as what is short."""
_AT_BOUND = 0.97  # of the bound
_OWN = 0.7  # of a lane's time: with less as its least possible work, small batches of decode fill it
_WAITS = {
    "encode_queue": "waiting for an encoder",
    "ep_migration": "waiting for their embeddings to reach prefill",
    "prefill_queue": "waiting for prefill",
    "pd_migration": "waiting for their KV to reach decode",
    "decode_queue": "waiting to decode",
}
_STAGE = {
    "encode_queue": Stage.ENCODE, "encode": Stage.ENCODE, "ep_migration": Stage.PREFILL, "prefill_queue": Stage.PREFILL,
    "prefill": Stage.PREFILL, "pd_migration": Stage.DECODE, "decode_queue": Stage.DECODE, "decode": Stage.DECODE,
}  # fmt: skip
_AFTER = {Stage.ENCODE: (Stage.PREFILL, Stage.DECODE), Stage.PREFILL: (Stage.DECODE,), Stage.DECODE: ()}
_LANE = {Stage.ENCODE: Lane.VISION, Stage.PREFILL: Lane.LANGUAGE, Stage.DECODE: Lane.LANGUAGE}
_BEFORE = {"TTFT": INTERVALS[:5], "TPOT": INTERVALS[5:], "E2E": INTERVALS}


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a layout does not carry `evidence.rate`. `stage`: the stage that is short, "" for the server. `words`: what
    is short, with its figure; `details`: what that does to the requests. `kind`:

    - "alone": the SLO is missed without any load
    - "lane", "memory", "places", "link", "server": what is short
    - "gate": pictures and what is in prefill take turns
    - "shared": a lane is busy, but mostly with small batches of decode
    - "steps": decode steps are too long; "slow": batches of encode or prefill are
    - "bursts": nothing is short on average
    - "growth", "near": few requests missed, but waits become longer, or a lane is nearly full
    - "bound": the search ended at its upper bound
    - "open": no figure explains it
    """

    kind: str
    stage: str
    words: str
    details: str
    evidence: Evidence

    def __str__(self) -> str:
        return f"{self.words}; {self.details}"


def reason(study: Study, layout: Layout, rate: float, run: int = 0) -> Reason:
    """Why the layout does not carry `rate`, from the run number `run` at this rate."""
    return explained(evidence_of(study.run(run), layout, rate))


def explained(e: Evidence) -> Reason:
    """The reason that these figures show."""
    for name, latency in e.latencies.items():
        if latency.alone_missed > 1.0 - e.target + 1e-9:
            return _alone(e, name, latency)
    if e.missed <= 1.0 - e.target + 1e-9:
        return _few_missed(e)
    if e.interval == "decode":
        return _steps(e)
    if e.interval in ("encode", "prefill"):
        return _slowed(e)
    return _waited(e)


def _alone(e: Evidence, name: str, latency: Latency) -> Reason:
    part = max(_BEFORE[name], key=lambda interval: e.intervals[interval].alone_s)
    words = f"{name} ≤ {_ms(latency.limit_s)} cannot be met: without any other request it is {_ms(latency.alone_s)}"
    details = f"{e.target:.0%} of the requests attain that alone, and most of it is {part.replace('_', ' ')}"
    return Reason(kind="alone", stage=_STAGE[part].value, words=words, details=details, evidence=e)


def _few_missed(e: Evidence) -> Reason:
    """The reason if enough requests of this run met the SLO."""
    share = f"all {e.n} requests of a run meet the SLO"
    if e.missed:
        share = f"{_percent(e.missed)} of the {e.n} requests of a run miss the SLO"
    stages = e.bound_stages
    lanes = _lanes(e.use, list(Lane))
    if e.growth > 1.0:
        grown = max(_WAITS, key=lambda name: e.intervals[name].last_s - e.intervals[name].first_s)
        first_s, last_s = e.intervals[grown].first_s, e.intervals[grown].last_s
        stages = (_STAGE[grown].value,)
        kind = "growth"
        words = (
            f"{stages[0]}: at {_rate(e)} a queue grows: {_WAITS[grown]} takes {_ms(first_s)} in the first quarter of a "
            f"run, {_ms(last_s)} in the last"
        )
        details = f"{share}, later ones would not; {lanes}"
    elif e.rate >= _AT_BOUND * e.bound:
        kind = "bound"
        words = f"{' and '.join(stages) or 'the server'}: the least possible work allows {e.bound:.3g}/s"
        details = f"the search ends there; at {_rate(e)} {lanes}"
    elif full := [(u, lane) for u in e.use for lane in Lane if _is_filled(u, lane)]:
        kind = "near"
        u, lane = max(full, key=lambda one: one[0].least(one[1]))
        words = f"{' and '.join(stages) or u.role}: at {_rate(e)} {_lanes([u], [lane])}"
        details = f"{share}, but runs this short cannot tell whether a queue grows; more --requests would"
    elif e.link >= FULL:
        kind = "near"
        words = f"a link: at {_rate(e)} its busiest end copies {_percent(e.link)} of the time"
        details = f"{share}, but runs this short cannot tell whether a queue grows; more --requests would"
    else:
        kind = "open"
        words = f"not clear: at {_rate(e)} {share}, but runs this short cannot tell"
        details = f"{lanes}; more --requests would tell"
    return Reason(kind=kind, stage="".join(stages[:1]), words=words, details=details, evidence=e)


def _is_filled(u: RoleUse, lane: Lane) -> bool:
    """Whether a lane works nearly all the time, and not only with small batches."""
    return (u.lane(lane) or 0.0) >= FULL and u.least(lane) >= _OWN


def _steps(e: Evidence) -> Reason:
    """The reason if requests lost their time between tokens."""
    decoding = [u for u in e.use if role_of(u.role).runs(Stage.DECODE)]
    busiest = max(decoding, key=lambda u: u.decoding)
    beside = [stage.value for stage in (Stage.ENCODE, Stage.PREFILL) if role_of(busiest.role).runs(stage)]
    among = ""
    if beside:
        among = f" beside {' and '.join(beside)}"
    seconds, alone_s = e.intervals["decode"].p90_s, e.intervals["decode"].alone_s
    if e.limit == "TPOT":
        seconds, alone_s = e.latencies["TPOT"].seconds, e.latencies["TPOT"].alone_s
    words = f"decode steps are long: at {_rate(e)} the token interval is {_ms(seconds)} (alone {_ms(alone_s)})"
    details = (
        f"{_missed(e)}; {busiest.role} decodes {busiest.decoding:.3g} requests at once{among}; "
        f"{_lanes(decoding, [Lane.LANGUAGE])}"
    )
    return Reason(kind="steps", stage=Stage.DECODE.value, words=words, details=details, evidence=e)


def _slowed(e: Evidence) -> Reason:
    """The reason if requests lost their time in a batch of encode or prefill."""
    stage = _STAGE[e.interval]
    spent = e.intervals[e.interval]
    roles = [u for u in e.use if role_of(u.role).runs(stage)]
    words = f"{stage.value} is slow under load: at {_rate(e)} it takes {_ms(spent.mean_s)} (alone {_ms(spent.alone_s)})"
    details = f"{_missed(e)}; {_lanes(roles, list(Lane))}"
    return Reason(kind="slow", stage=stage.value, words=words, details=details, evidence=e)


def _waited(e: Evidence) -> Reason:
    """The reason if requests lost their time in a queue or on their way."""
    stage = _STAGE[e.interval]
    spent = e.intervals[e.interval]
    if e.server_s > spent.mean_s / 2:
        words = f"the server is short of time: at {_rate(e)} requests wait {_ms(e.server_s)} in it on average"
        return Reason(kind="server", stage="", words=words, details=_missed(e), evidence=e)
    kind, words = _short_of(e, stage)
    details = f"{_missed(e)}, mostly {_WAITS[e.interval]} (mean {_ms(spent.mean_s)}, p90 {_ms(spent.p90_s)})"
    if kind in ("bursts", "growth"):
        details += f"; {_idle(e, stage)}"
    return Reason(kind=kind, stage=stage.value, words=words, details=details, evidence=e)


def _short_of(e: Evidence, stage: Stage) -> tuple[str, str]:
    """What is short where requests wait for `stage`: the kind, and the words. A lane that the least possible work fills
    comes first, then a link: caches and places fill up behind both. Otherwise a lane is last, as one that decodes is
    always busy. A later stage that has no room holds up this one."""
    lane = _LANE[stage]
    roles = [u for u in e.use if role_of(u.role).runs(stage)]
    works = max(u.lane(lane) or 0.0 for u in roles) >= FULL
    busy = f"{stage.value} is busy: at {_rate(e)} {_lanes(roles, [lane])}"
    if any(_is_filled(u, lane) for u in roles):
        return "lane", busy
    if stage is Stage.ENCODE and (gated := _gated(e, roles)):
        return "gate", gated
    if e.interval.endswith("_migration") and e.link >= FULL:
        return "link", f"a link is busy: at {_rate(e)} its busiest end copies {_percent(e.link)} of the time"
    if (filled := _filled(e, roles)) is not None:
        return filled
    if works and any(role_of(u.role).runs(Stage.DECODE) for u in roles):
        return "shared", f"{stage.value} shares a lane with decode: at {_rate(e)} {_lanes(roles, [lane])}"
    if works:
        return "lane", busy
    later = [u for u in e.use if any(role_of(u.role).runs(other) for other in _AFTER[stage])]
    if (filled := _filled(e, later)) is not None:
        kind, words = filled
        return kind, f"{words}, and {stage.value} waits for that"
    waiting = f"on average {e.rate * e.intervals[e.interval].mean_s:.2g} requests are {_WAITS[e.interval]}"
    spent = e.intervals[e.interval]
    if e.growth > 1.0:
        grows = f"{_WAITS[e.interval]} takes {_ms(spent.first_s)} in the first quarter of a run, {_ms(spent.last_s)} in"
        return "growth", f"{stage.value}: at {_rate(e)} a queue grows: {grows} the last"
    p90 = _ms(spent.p90_s)
    return "bursts", f"bursts: at {_rate(e)} {waiting}, but 10 % wait over {p90}"


def _gated(e: Evidence, roles: Sequence[RoleUse]) -> str:
    """The words if the vision lane works nearly all the time that the encode gate lets it; "" if it does not."""
    u = max(roles, key=lambda one: one.gated)
    if (u.vision or 0.0) + u.gated < FULL or not u.gated:
        return ""
    return (
        f"encode waits for prefill: at {_rate(e)} the vision lane of {u.role} works {_percent(u.vision or 0.0)} of the "
        f"time, and for {_percent(u.gated)} of it pictures wait until nothing is in prefill (encode gate)"
    )


def _filled(e: Evidence, roles: Sequence[RoleUse]) -> tuple[str, str] | None:
    """The cache or the places of these roles that are full; None if there is room."""
    if full := [(cache.mean, u.role, name) for u in roles for name, cache in u.caches.items() if cache.mean >= FULL]:
        share, role, name = max(full)
        gib = next(u for u in roles if u.role == role).caches[name].n_bytes / (1 << 30)
        held = f"requests hold {_percent(share)} of the {gib:.3g} GiB for {name}"
        return "memory", f"the memory of {role} is full: at {_rate(e)} {held}"
    crowded = max(roles, key=lambda u: u.running / max(u.places, 1), default=None)
    if crowded is not None and crowded.running >= FULL * max(crowded.places, 1):
        places = f"{crowded.running:.3g} of the {crowded.places} requests that it may run at once"
        return "places", f"{crowded.role} has no place free: at {_rate(e)} it runs {places}"
    return None


def _idle(e: Evidence, stage: Stage) -> str:
    """The figures of all that could be short where requests wait for `stage`, and is not."""
    roles = [u for u in e.use if role_of(u.role).runs(stage)]
    parts = [_lanes(roles, [_LANE[stage]])]
    caches = [(cache.mean, name, u.role) for u in roles for name, cache in u.caches.items()]
    if caches:
        share, name, role = max(caches)
        parts.append(f"the fullest cache, {name} of {role}, {_percent(share)}")
    if e.link > 0.005:
        parts.append(f"the busiest link copies {_percent(e.link)} of the time")
    return f"nothing is full: {', '.join(parts)}"


def _missed(e: Evidence) -> str:
    latency = e.latencies[e.limit]
    alone = ""
    if e.limit != "TPOT":
        alone = f" (alone {_ms(latency.alone_s)})"
    return f"{_percent(latency.missed)} of the requests miss {e.limit} ≤ {_ms(latency.limit_s)}{alone}"


def _lanes(use: Sequence[RoleUse], lanes: Sequence[Lane]) -> str:
    """How busy these lanes of each role are; of lanes that decode, also the least possible work."""
    parts = []
    for u in use:
        for lane in lanes:
            share = u.lane(lane)
            if share is None:
                continue
            least = ""
            if lane is Lane.LANGUAGE and role_of(u.role).runs(Stage.DECODE):
                least = f" (least possible: {_percent(u.least(lane))})"
            parts.append(f"the {lane.value} lane of {u.role} works {_percent(share)} of the time{least}")
    return ", ".join(parts)


def _rate(e: Evidence) -> str:
    return f"{e.rate:.3g}/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"


def _percent(share: float) -> str:
    if 0.0 < share < 0.01:
        return f"{share * 100:.1f} %"
    return f"{share * 100:.0f} %"
