"""What leaves an instance: token outputs for the client, lifecycle events for the metrics, load for the router."""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from hydrainfer.core.errors import BY_STATUS, HydraError, InternalError
from hydrainfer.core.sequence import TokenLogprobs


class ErrorInfo(msgspec.Struct, frozen=True):
    """A `HydraError` as it travels in a message."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, e: HydraError) -> ErrorInfo:
        return cls(e.status, e.message, e.code, e.param, e.retry_after_s)

    def exception(self) -> HydraError:
        kind = BY_STATUS.get(self.status, InternalError)
        return kind(self.message, param=self.param, code=self.code, retry_after_s=self.retry_after_s)


class Output(msgspec.Struct, frozen=True):
    """New tokens of one request, or its end. Exactly one output per request has a `finish_reason`
    ("stop", "length", "abort" or "error"), and it is the last."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_token: int | None = None
    error: ErrorInfo | None = None


class EventKind(enum.StrEnum):
    """`QUEUED`, `STARTED`, `ENDED` and `MIGRATING` (to an instance of it) name a stage in `LifecycleEvent.stage`; the
    others stand alone."""

    ARRIVED = "arrived"
    QUEUED = "queued"
    STARTED = "started"
    ENDED = "ended"
    TOKEN = "token"
    MIGRATING = "migrating"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class LifecycleEvent(NamedTuple):
    """One arrow of a request's life (DESIGN 5). `at_s` is the engine's clock; `detail` a finish reason; `n` the prompt
    tokens of an arrival."""

    request_id: str
    kind: EventKind
    at_s: float
    stage: str = ""
    detail: str = ""
    n: int = 0


class InstanceStats(msgspec.Struct, frozen=True):
    """Load of one instance, for `/health`, `/metrics` and the router. `stalled_s`: how long work has been there
    without progress."""

    role: str
    n_waiting: int
    n_running: int
    n_encoding: int
    n_prefilling: int
    n_decoding: int
    cache_blocks: dict[str, tuple[int, int, int]]  # spec -> (total, leased, cached)
    embed_hits: int
    embed_queries: int
    n_preemptions: int
    n_steps: int
    stalled_s: float
    n_migrating: int = 0  # wait for another instance to pull them
    n_arriving: int = 0  # offered by other instances, and not here yet
    blocks_pulled: dict[str, int] = {}  # spec -> blocks copied from other instances so far
    n_landed: int = 0
