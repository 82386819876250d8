"""What the front knows of each live request and each live instance."""

from __future__ import annotations

from dataclasses import dataclass, field

from hydrainfer.cluster.messages import Hello
from hydrainfer.core import InstanceStats, Output, Request, Stage

Incarnation = tuple[str, int]  # of an instance: its name and number


@dataclass(slots=True)
class LiveRequest:
    """A request that has not ended. `name`: the name of its present life. `owner`: the instance that has it; None while
    no instance can take it. `giver`: the instance that handed it to `owner` at `given_s`, until `owner` has confirmed
    that it arrived. `heard`: whether `owner` has reported it. `hops`: its moves in this life."""

    request: Request
    name: str
    n_lives: int = 1
    n_deaths: float = 0.0  # weighted deaths of its instances in a row, without progress between them
    n_detours: int = 0  # the same of lives begun because of cut pairs
    n_before: int = 0  # tokens it had when its present life began
    produced: list[int] = field(default_factory=list)
    owner: Incarnation | None = None
    giver: Incarnation | None = None
    given_s: float = 0.0
    heard: bool = False
    hops: int = 0
    early: list[Output] = field(default_factory=list)  # outputs that came before one that precedes them
    since: float = 0.0  # when it lost its owner, or when the first `early` came
    cancelled: bool = False


@dataclass(slots=True)
class Member:
    """One live incarnation. `killed`: the hub has been asked to kill it. `n_reports`: reports received from it."""

    hello: Hello
    heard_s: float
    stats: InstanceStats | None = None
    killed: bool = False
    n_reports: int = 0


def has_work(stats: InstanceStats) -> bool:
    return bool(stats.n_waiting or stats.n_running or stats.n_migrating or stats.n_arriving or stats.n_parked)


def needs(live: LiveRequest, stage: Stage) -> bool:
    """Whether a request cannot finish unless some instance runs `stage`. A request that is at an instance without that
    stage is past encode; once it has produced a token, it is past prefill."""
    if stage not in live.request.plan():
        return False
    return live.owner is None or stage is Stage.DECODE or (stage is Stage.PREFILL and not live.produced)
