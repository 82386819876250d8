"""What the scheduler tells the engine of a batch that was applied."""

from __future__ import annotations

from typing import NamedTuple

from hydrainfer.core import HydraError, Sequence, Stage, TokenLogprobs


class Outcome(NamedTuple):
    """What a step did to one sequence: a new token, the end of a stage, or its end (`finish` or `error`)."""

    seq: Sequence
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    ended: Stage | None = None
    finish: str | None = None
    error: HydraError | None = None
