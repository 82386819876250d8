"""The outcome of an applied batch, as the engine hears it."""

from __future__ import annotations

from typing import NamedTuple

from hydrainfer.core import HydraError, Sequence, Stage, TokenLogprobs


class Outcome(NamedTuple):
    """The effect of a step on one sequence: a new token, the end of a stage, or its end (`finish` or `error`)."""

    seq: Sequence
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    ended: Stage | None = None
    finish: str | None = None
    error: HydraError | None = None
