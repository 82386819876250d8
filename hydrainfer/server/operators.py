"""What operators ask of a running server, with their own key."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from hydrainfer.core import InvalidRequest, Unavailable, log_event
from hydrainfer.server.door import Tenants, authorization_of
from hydrainfer.server.http import json_response
from hydrainfer.server.live import Sessions

_log = logging.getLogger("hydrainfer.server.operators")
_ANSWER_S = 10.0  # for instances to answer
_UNSUPPORTED = Query(description="vLLM's; only false is supported.", examples=[False])
_RESET = "Needs the key of an operator. Blocks in use stay, and so does a shared store. The answer counts the blocks."


def operator_routes(tenants: Tenants, sessions: Sessions) -> APIRouter:
    """The routes that need the key of an operator."""
    router = APIRouter()

    @router.post("/reset_prefix_cache", summary="Forget all KV and embeddings that could be reused", description=_RESET)
    async def reset(
        request: Request,
        reset_running_requests: Annotated[bool, _UNSUPPORTED] = False,
        reset_external: Annotated[bool, _UNSUPPORTED] = False,
    ) -> Response:
        tenants.check_admin(authorization_of(request))
        if reset_running_requests:
            raise InvalidRequest("running requests keep their blocks", param="reset_running_requests")
        if reset_external:
            raise InvalidRequest(
                "a shared store is emptied by `hydrainfer store PLACE --clear`", param="reset_external"
            )
        answer = asyncio.wrap_future(sessions.handle.forget_cached())
        try:
            blocks = await asyncio.wait_for(answer, _ANSWER_S)
        except TimeoutError:
            raise Unavailable("an instance does not answer; see /v1/instances", retry_after_s=5.0) from None
        n = sum(sum(of_instance.values()) for of_instance in blocks.values())
        log_event(_log, "prefix_cache_reset", f"the prefix cache was reset: {n} blocks", n_blocks=n)
        return json_response({"n_blocks": n, "instances": blocks})

    return router
