"""Typed errors. Each has the fields of an OpenAI-style error body: HTTP status, type, code, offending parameter."""

from __future__ import annotations


class HydraError(Exception):
    """The base of all errors that a user, a client or the network can cause. A broken invariant is an `assert`
    instead."""

    status = 500
    type = "internal_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code


class InvalidRequest(HydraError):
    """400: a value is wrong; the message says which and what is accepted."""

    status, type = 400, "invalid_request_error"


class Unauthorized(HydraError):
    """401: the API key is missing or wrong."""

    status, type, code = 401, "authentication_error", "invalid_api_key"


class ModelNotFound(HydraError):
    """404: the request names a model this server does not serve."""

    status, type, code = 404, "not_found_error", "model_not_found"


class RequestTooLarge(HydraError):
    """413: the body or a medium exceeds a byte limit."""

    status, type, code = 413, "invalid_request_error", "request_too_large"


class MediaError(HydraError):
    """422: a picture cannot be decoded or is of an unsupported kind. Never echoes a decoder's own message."""

    status, type, code = 422, "invalid_request_error", "invalid_media"


class Overloaded(HydraError):
    """429: a bounded queue or byte budget is full; the client should retry after `retry_after_s`."""

    status, type, code = 429, "rate_limit_error", "overloaded"


class Unavailable(HydraError):
    """503: no instance can run a stage of this request, or the server is shutting down."""

    status, type, code = 503, "service_unavailable", "unavailable"


def shutting_down(retry_after_s: float = 5.0) -> Unavailable:
    """The error for requests that arrive, or are still running, while the server shuts down."""
    return Unavailable("the server is shutting down", retry_after_s=retry_after_s)


class DeadlineExceeded(HydraError):
    """504: the request's deadline passed before its last token."""

    status, type, code = 504, "timeout_error", "deadline_exceeded"


class InternalError(HydraError):
    """500: the step that ran this request failed; the server goes on."""


DEVICE_LOST = "device_lost"
"""The code of an `InternalError` after which this process can compute nothing more."""


class ConfigError(HydraError):
    """A configuration value, key or combination is wrong; raised at start."""

    status, type = 400, "config_error"


class CheckpointError(HydraError):
    """A checkpoint is missing, truncated or of an unsupported architecture; raised at start, with a message of one
    line."""

    status, type = 400, "checkpoint_error"


KINDS: tuple[type[HydraError], ...] = (
    InvalidRequest,
    Unauthorized,
    ModelNotFound,
    RequestTooLarge,
    MediaError,
    Overloaded,
    Unavailable,
    DeadlineExceeded,
    InternalError,
    ConfigError,
    CheckpointError,
)
