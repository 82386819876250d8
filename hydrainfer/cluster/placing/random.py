"""Any instance. A picture goes to the encoder that consistent hashing names, which may have its embedding."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

from hydrainfer.cluster.placing.rule import Choice
from hydrainfer.cluster.roster import Roster
from hydrainfer.core import Request, Stage


class RandomChoice:
    """Draws an instance with `rng`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(
        self,
        request: Request,
        stage: Stage,
        exclude: Collection[str],
        facts: Roster,
        located: Mapping[str, int],  # noqa: ARG002 - caches do not matter
    ) -> Choice | None:
        names = facts.able(request, stage, exclude)
        if not names:
            return None
        name = facts.encoder_of(request, names) if stage is Stage.ENCODE else self._rng.choice(names)
        return Choice(name, stage, name)
