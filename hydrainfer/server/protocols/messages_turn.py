"""Anthropic's Messages: answers, whole and as events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from hydrainfer.core import HydraError
from hydrainfer.metrics import Timeline
from hydrainfer.processor import read_arguments
from hydrainfer.server.live import event
from hydrainfer.server.protocols.messages_chat import thinks
from hydrainfer.server.protocols.turn import ReplyPart, ReplyTurn

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""The types of errors, by status."""
_DELTAS = {
    "call": ("input_json_delta", "partial_json"),
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
}


def error_body(error: HydraError) -> bytes:
    """The body of an error response in Anthropic's format."""
    kind = _KINDS.get(error.status, "api_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}})


class MessageTurn(ReplyTurn):
    """`message_start`, then each part as a content block, then `message_delta` and `message_stop`."""

    @staticmethod
    def shows_thoughts(asked: Mapping[str, Any]) -> bool:
        return thinks(asked) is True

    def opening(self) -> bytes:
        usage = {**self._usage([0]), "output_tokens": 0}
        message = {**self._message([], usage), "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=message)

    def begin(self, part: ReplyPart) -> bytes:
        return _event("content_block_start", index=len(self.parts) - 1, content_block=_block(part, {}))

    def add(self, part: ReplyPart, new: str) -> bytes:
        kind, field = _DELTAS[part.kind]
        return _event("content_block_delta", index=len(self.parts) - 1, delta={"type": kind, field: new})

    def end(self, part: ReplyPart) -> bytes:  # noqa: ARG002
        return _event("content_block_stop", index=len(self.parts) - 1)

    def last(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> bytes:
        usage = self._timed(self._usage(n_tokens), timelines)
        return _event("message_delta", delta=self._reasons(), usage=usage) + _event("message_stop")

    def whole(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> bytes:
        content = [_block(part, _input(part.text) if part.kind == "call" else {}) for part in self.parts]
        return orjson.dumps(self._message(content, self._timed(self._usage(n_tokens), timelines)) | self._reasons())

    def error(self, error: HydraError) -> bytes:
        return event(error_body(error), "error")

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self.prepared.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, "usage": usage}

    def _reasons(self) -> dict[str, Any]:
        if self.called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if self.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(self.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self, n_tokens: Sequence[int]) -> dict[str, Any]:
        """The usage in Anthropic's format, in which `input_tokens` does not include cached tokens."""
        n_prompt, n_cached, n_answer = self._counts(n_tokens)
        return {
            "input_tokens": n_prompt - n_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": n_cached,
            "output_tokens": n_answer,
        }


def _event(name: str, /, **fields: Any) -> bytes:
    return event(orjson.dumps({"type": name, **fields}), name)


def _block(part: ReplyPart, arguments: Any) -> dict[str, Any]:
    """The content block of a part. The signature of a thought is empty, since this server does not check any."""
    if part.kind == "call":
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": arguments}
    if part.kind == "thought":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


def _input(text: str) -> dict[str, Any]:
    return read_arguments(text, orjson.loads)
