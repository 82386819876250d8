"""The `Placement` of the server and of every instance: a rule, applied to what the roster knows."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

from hydrainfer.cluster.placing.least_load import LeastLoad
from hydrainfer.cluster.placing.random import RandomChoice
from hydrainfer.cluster.placing.round_robin import RoundRobin
from hydrainfer.cluster.placing.rule import Rule
from hydrainfer.cluster.roster import Roster
from hydrainfer.core import Request, Stage

RULES: dict[str, Callable[[random.Random], Rule]] = {
    "least_load": lambda _: LeastLoad(),
    "round_robin": lambda _: RoundRobin(),
    "random": RandomChoice,
}
"""The rules by the values of `--balancing`. Each is made with a generator of random numbers."""


class Placer:
    """Places requests by the rule named `balancing`. `roster`: counts what is placed."""

    def __init__(self, roster: Roster, balancing: str = "least_load", rng: random.Random | None = None) -> None:
        self.roster = roster
        self._rule = RULES[balancing](rng or random.Random())

    def choose(self, request: Request, stage: Stage, exclude: Collection[str]) -> str | None:
        located = self.roster.locator.locate(request)
        choice = self._rule.choose(request, stage, exclude, self.roster, located)
        if choice is None:
            return None
        self.roster.place(choice.worker, request, choice.stage, located.get(choice.worker, 0))
        return choice.name
