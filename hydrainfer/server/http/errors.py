"""Error responses: their headers, and OpenAI's format, `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import math

import orjson

from hydrainfer.core import HydraError, InternalError, Overloaded

logger = logging.getLogger("hydrainfer.server.errors")

JSON = "application/json"
_INTERNAL = "the server failed to run this request; its log says more"


def error_body(error: HydraError) -> bytes:
    """The body of an error response in OpenAI's format."""
    return orjson.dumps(
        {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
    )


def error_headers(error: HydraError) -> dict[str, str]:
    """The headers of an error response, without the body's type and length. Where retrying makes sense, `Retry-After`
    (whole seconds, at least 1) and `retry-after-ms` (milliseconds, preferred by the `openai` client)."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after_s * 1e3)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.code == "body_compressed":
        headers["accept-encoding"] = "identity"
    return headers


def as_hydra_error(error: Exception) -> HydraError:
    """`error` as a `HydraError`. Typed errors are returned as they are; a `MemoryError` becomes `Overloaded`. Any other
    is logged and becomes a 500 without details."""
    if isinstance(error, HydraError):
        return error
    if isinstance(error, MemoryError):
        logger.error("no memory for a request")
        return Overloaded("the server has no memory for this request now; retry later", retry_after_s=1.0)
    logger.error("request failed", exc_info=error)
    return InternalError(_INTERNAL)
