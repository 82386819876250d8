"""Ollama's answers, whole and as JSON lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from hydrainfer.core import HydraError
from hydrainfer.metrics import Timeline
from hydrainfer.processor import read_arguments
from hydrainfer.server.live import Completion, Delta
from hydrainfer.server.openai import chat_logprobs
from hydrainfer.server.protocols.turn import ReplyPart, ReplyTurn


def error_body(error: HydraError) -> bytes:
    """The body of an error response in Ollama's format."""
    return orjson.dumps({"error": error.message})


class GenerateTurn(ReplyTurn):
    """The answer of /api/generate, whose field `response` has the text."""

    media_type = "application/x-ndjson"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._logprobs: list[dict[str, Any]] = []
        self._n_told = 0  # of them, in earlier lines

    @staticmethod
    def shows_thoughts(asked: Mapping[str, Any]) -> bool:
        return asked.get("think") is not False

    def begin(self, part: ReplyPart) -> bytes:  # noqa: ARG002
        return b""

    def add(self, part: ReplyPart, new: str) -> bytes:
        return b"" if part.kind == "call" else self._line(self._said([ReplyPart(part.kind, new)]))

    def end(self, part: ReplyPart) -> bytes:
        return self._line(self._said([part])) if part.kind == "call" else b""

    def last(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> bytes:
        return self._line(self._said([]), **self._figures(n_tokens, timelines))

    def whole(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> bytes:
        self._n_told = 0  # the lines of parts were dropped
        return self._line(self._said(self.parts), **self._figures(n_tokens, timelines))

    def error(self, error: HydraError) -> bytes:
        return error_body(error) + b"\n"

    def _said(self, parts: Sequence[ReplyPart]) -> dict[str, Any]:
        return {"response": _text(parts, "text"), **_thinking(parts)}

    def _say(self, new: Delta | Completion) -> bytes:
        if self.n_logprobs is not None:
            self._logprobs += chat_logprobs(self.vocabulary, new.token_ids, new.logprobs)["content"]
        return super()._say(new)

    def _line(self, fields: dict[str, Any], **end: Any) -> bytes:
        new, self._n_told = self._logprobs[self._n_told :], len(self._logprobs)
        likely = {"logprobs": new} if new else {}
        line = {**head(self.model, self.created), **fields, "done": bool(end), **likely, **end}
        return orjson.dumps(line) + b"\n"

    def _figures(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> dict[str, Any]:
        """The statistics of the last line. Durations in nanoseconds; 0 if the engine has not reported them in time."""
        n_prompt, _, n_answer = self._counts(n_tokens)
        timeline = timelines[0]
        total_ns = int(((timeline.e2e_s if timeline else None) or 0.0) * 1e9)
        first_ns = int(((timeline.ttft_s if timeline else None) or 0.0) * 1e9)
        return {
            "done_reason": "length" if self.finish_reason == "length" else "stop",
            "total_duration": total_ns,
            "load_duration": 0,
            "prompt_eval_count": n_prompt,
            "prompt_eval_duration": first_ns,
            "eval_count": n_answer,
            "eval_duration": total_ns - first_ns,
        }


class ChatTurn(GenerateTurn):
    """The answer of /api/chat, whose field `message` has the text, and each call once it is whole."""

    def _said(self, parts: Sequence[ReplyPart]) -> dict[str, Any]:
        calls = [part for part in parts if part.kind == "call"]
        made = [
            {"function": {"name": call.name, "arguments": read_arguments(call.text, orjson.loads)}} for call in calls
        ]
        message = {"role": "assistant", "content": _text(parts, "text"), **_thinking(parts)}
        return {"message": {**message, **({"tool_calls": made} if made else {})}}


def _text(parts: Sequence[ReplyPart], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def _thinking(parts: Sequence[ReplyPart]) -> dict[str, str]:
    thought = _text(parts, "thought")
    return {"thinking": thought} if thought else {}


def head(model: str, created: int) -> dict[str, Any]:
    """The fields with which every line begins. `created`: seconds since 1970."""
    return {"model": model, "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")}
