"""Each instance in turn. A picture goes to the encoder that consistent hashing names, which may have its embedding."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hydrainfer.cluster.placing.rule import Choice
from hydrainfer.cluster.roster import Roster
from hydrainfer.core import Request, Stage


class RoundRobin:
    """Chooses the instance that was chosen longest ago."""

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
        if stage is Stage.ENCODE:
            name = facts.encoder_of(request, names)
        else:
            name = min(names, key=facts.turns.__getitem__)
        return Choice(name, stage, name)
