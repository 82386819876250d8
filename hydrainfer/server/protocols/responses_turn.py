"""OpenAI's Responses: answers, whole and as events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from hydrainfer.core import HydraError
from hydrainfer.metrics import Timeline
from hydrainfer.server.live import event
from hydrainfer.server.protocols.turn import ReplyPart, ReplyTurn

ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": None,
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "text": {"format": {"type": "text"}},
    "reasoning": None,
    "user": None,
}
"""Fields of a request that are repeated in its answer, and their values if they are not set."""
_PREFIXES = {"call": "fc", "thought": "rs", "text": "msg"}


class ResponseTurn(ReplyTurn):
    """`response.created`, then each part as an item of `output`, then `response.completed` or `response.incomplete`."""

    _n_events = 0

    @staticmethod
    def shows_thoughts(asked: Mapping[str, Any]) -> bool:  # noqa: ARG004
        return True

    def opening(self) -> bytes:
        response = self._response("in_progress", None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def begin(self, part: ReplyPart) -> bytes:
        added = self._event("response.output_item.added", item=self._begun_item(part), **self._at())
        if part.kind == "call":
            return added
        return added + self._event("response.content_part.added", part=_content(part, ""), **self._inside())

    def add(self, part: ReplyPart, new: str) -> bytes:
        if part.kind == "call":
            return self._event("response.function_call_arguments.delta", delta=new, **self._at(), **self._id())
        if part.kind == "thought":
            return self._event("response.reasoning_text.delta", delta=new, **self._inside())
        return self._event("response.output_text.delta", delta=new, logprobs=[], **self._inside())

    def end(self, part: ReplyPart) -> bytes:
        if part.kind == "call":
            fields = {"name": part.name, "arguments": part.text, **self._at(), **self._id()}
            events = self._event("response.function_call_arguments.done", **fields)
        else:
            if part.kind == "thought":
                events = self._event("response.reasoning_text.done", text=part.text, **self._inside())
            else:
                events = self._event("response.output_text.done", text=part.text, logprobs=[], **self._inside())
            events += self._event("response.content_part.done", part=_content(part, part.text), **self._inside())
        item = self._ended_item(len(self.parts) - 1)
        return events + self._event("response.output_item.done", item=item, **self._at())

    def last(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> bytes:
        response = self._ended(n_tokens, timelines)
        return self._event(f"response.{response['status']}", response=response)

    def whole(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> bytes:
        return orjson.dumps(self._ended(n_tokens, timelines))

    def error(self, error: HydraError) -> bytes:
        fields = {"message": error.message, "code": error.code or error.type, "param": error.param}
        nested = {**fields, "type": error.type}  # the client raises if it finds `error`
        return self._event("error", **fields, error=nested)

    def _ended(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> dict[str, Any]:
        status = "incomplete" if self.finish_reason == "length" else "completed"
        return self._response(status, self._timed(self._usage(n_tokens), timelines))

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        echoed = {name: self.asked[name] if self.asked.get(name) is not None else d for name, d in ECHOED.items()}
        return {
            "id": self.prepared.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": [self._ended_item(i) for i in range(len(self.parts))],
            "usage": usage,
            "error": None,
            "incomplete_details": cut,
            **echoed,
            "truncation": "disabled",
            "background": False,
            "store": False,
            "previous_response_id": None,
        }

    def _begun_item(self, part: ReplyPart) -> dict[str, Any]:
        """The item of a new part, the last of `parts`, which is still empty."""
        item = self._item(part, len(self.parts) - 1, "in_progress")
        if part.kind == "call":
            return {**item, "arguments": ""}
        return {**item, "content": []}

    def _ended_item(self, index: int) -> dict[str, Any]:
        """The item of a part that has ended. Its status is `incomplete` if the end of the answer cut it."""
        cut = self.cut and index == len(self.parts) - 1
        return self._item(self.parts[index], index, "incomplete" if cut else "completed")

    def _item(self, part: ReplyPart, index: int, status: str) -> dict[str, Any]:
        id = self._item_id(part, index)
        if part.kind == "call":
            head = {"type": "function_call", "id": id, "call_id": part.id, "name": part.name}
            return {**head, "arguments": part.text, "status": status}
        content = [_content(part, part.text)]
        if part.kind == "thought":
            return {"type": "reasoning", "id": id, "summary": [], "status": status, "content": content}
        return {"type": "message", "id": id, "role": "assistant", "status": status, "content": content}

    def _item_id(self, part: ReplyPart, index: int) -> str:
        return f"{_PREFIXES[part.kind]}_{self.prepared.id.partition('-')[2]}_{index}"

    def _id(self) -> dict[str, Any]:
        return {"item_id": self._item_id(self.parts[-1], len(self.parts) - 1)}

    def _at(self) -> dict[str, Any]:
        return {"output_index": len(self.parts) - 1}

    def _inside(self) -> dict[str, Any]:
        return {**self._at(), **self._id(), "content_index": 0}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number, self._n_events = self._n_events, self._n_events + 1
        return event(orjson.dumps({"type": name, "sequence_number": number, **fields}), name)

    def _usage(self, n_tokens: Sequence[int]) -> dict[str, Any]:
        n_prompt, n_cached, n_answer = self._counts(n_tokens)
        return {
            "input_tokens": n_prompt,
            "input_tokens_details": {"cached_tokens": n_cached, "cache_write_tokens": 0},
            "output_tokens": n_answer,
            "output_tokens_details": {"reasoning_tokens": self.n_reasoning},
            "total_tokens": n_prompt + n_answer,
        }


def _content(part: ReplyPart, text: str) -> dict[str, Any]:
    if part.kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
