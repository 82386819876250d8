"""The nouns every room shares: requests, stages, live sequences, batches, outputs, events, errors.

Called by all rooms. No I/O, no torch, no clock: time is an argument.
"""

from hydrainfer.core.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    HydraError,
    InternalError,
    InvalidRequest,
    MediaError,
    ModelNotFound,
    Overloaded,
    RequestTooLarge,
    Unauthorized,
    Unavailable,
)
from hydrainfer.core.events import ErrorInfo, EventKind, InstanceStats, LifecycleEvent, Output
from hydrainfer.core.request import MAX_LOGPROBS, MediaSpan, PixelSource, Request, SamplingParams
from hydrainfer.core.sequence import EncodeWork, Sequence, StepBatch, StepResult, TokenLogprobs, TokenWork
from hydrainfer.core.stage import LANE_OF, Lane, Layout, Role, Stage

__all__ = [
    "LANE_OF",
    "MAX_LOGPROBS",
    "CheckpointError",
    "ConfigError",
    "DeadlineExceeded",
    "EncodeWork",
    "ErrorInfo",
    "EventKind",
    "HydraError",
    "InstanceStats",
    "InternalError",
    "InvalidRequest",
    "Lane",
    "Layout",
    "LifecycleEvent",
    "MediaError",
    "MediaSpan",
    "ModelNotFound",
    "Output",
    "Overloaded",
    "PixelSource",
    "Request",
    "RequestTooLarge",
    "Role",
    "SamplingParams",
    "Sequence",
    "Stage",
    "StepBatch",
    "StepResult",
    "TokenLogprobs",
    "TokenWork",
    "Unauthorized",
    "Unavailable",
]
