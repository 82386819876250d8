"""What a rule of placement is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

from hydrainfer.cluster.roster import Roster
from hydrainfer.core import Request, Stage


class Choice(NamedTuple):
    """A request goes to the instance `name`. The work begins with `stage` at the instance `worker`, which is another
    one only if it fetches from `name` what that has computed."""

    name: str
    stage: Stage
    worker: str


class Rule(Protocol):
    """Chooses the instance for the next stage of a request."""

    def choose(
        self, request: Request, stage: Stage, exclude: Collection[str], facts: Roster, located: Mapping[str, int]
    ) -> Choice | None:
        """An instance that is not in `exclude`; None if there is none. `located`: the tokens of the prompt that are
        cached, by instance."""
