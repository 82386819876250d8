"""Answers that may call tools: what their sampling needs, and their bodies, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from hydrainfer.core import InvalidRequest, SamplingParams
from hydrainfer.processor import (
    CallDelta,
    ModelDescription,
    Prepared,
    ToolCallStream,
    ToolDelta,
    ToolFormat,
    Tools,
    calls_grammar,
)
from hydrainfer.server.replies import ChatReply
from hydrainfer.server.stream import Completion, Delta


def tool_format(model: ModelDescription) -> ToolFormat:
    """How the model writes calls. Raises `InvalidRequest` if it is shown no tools or that is unknown."""
    template = model.template
    if template is None or not template.takes_tools:
        why = "this model's chat template has no tools; leave tools out"
    elif template.tools is None:
        why = "how this model writes tool calls is unknown; the server's option --tool-call-parser says it"
    else:
        return template.tools
    raise InvalidRequest(why, param="tools", code="unsupported_parameter")


def sampling_for(sampling: SamplingParams, tools: Tools, how: ToolFormat) -> SamplingParams:
    """Calls that are required, and calls or an answer of some form, are held to a grammar. What begins a call may be a
    special token, so these must be seen. Raises `InvalidRequest`."""
    grammar = sampling.grammar
    if tools.required or grammar is not None:
        grammar = calls_grammar(tools, how, grammar)
    return msgspec.structs.replace(sampling, grammar=grammar, skip_special_tokens=False)


def call_stream(prepared: Prepared, tools: Tools, how: ToolFormat) -> ToolCallStream:
    """The reader of the calls of one choice."""
    forced = prepared.sampling.grammar is not None
    return ToolCallStream(how, tools.schemas, forced=forced, parallel=tools.parallel)


class ToolReply(ChatReply):
    """A `ChatReply` whose text is looked through for calls."""

    def __init__(self, *args: Any, tools: Tools, how: ToolFormat) -> None:
        super().__init__(*args)
        self._streams = [call_stream(self.prepared, tools, how) for _ in self.prepared.requests]

    def events(self, deltas: Sequence[Delta], n_tokens: Sequence[int]) -> bytes:
        """A chunk per delta that says something, calls told from text."""
        usage = self._usage(n_tokens) if self.continuous_usage else None
        return b"".join(self._event([chunk], usage) for d in deltas if (chunk := self._chunk(d)) is not None)

    def choice(self, index: int, done: Completion) -> dict[str, Any]:
        said = self._streams[index].push(done.text, last=True)
        choice = super().choice(index, done)
        calls = merged(said.calls)
        if calls:
            choice["message"]["content"] = said.content or None
            choice["message"]["tool_calls"] = calls
        else:
            choice["message"]["content"] = said.content
        choice["finish_reason"] = self._finish(index, done.finish_reason)
        return choice

    def _chunk(self, delta: Delta) -> dict[str, Any] | None:
        said = self._streams[delta.choice].push(delta.text, last=delta.finish_reason is not None)
        if not (said.content or said.calls or delta.finish_reason or self.return_ids or self.n_logprobs is not None):
            return None
        chunk = super().chunk(delta)
        chunk["delta"] = _delta(said)
        chunk["finish_reason"] = self._finish(delta.choice, delta.finish_reason)
        return chunk

    def _finish(self, index: int, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._streams[index].n_calls else reason


def _delta(said: ToolDelta) -> dict[str, Any]:
    content = {"content": said.content} if said.content else {}
    return content | ({"tool_calls": [_call(c) for c in said.calls]} if said.calls else {})


def _call(delta: CallDelta) -> dict[str, Any]:
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}


def merged(deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
    """The calls whole, in OpenAI's shape."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.id is not None:
            function = {"name": delta.name, "arguments": delta.arguments}
            calls.append({"id": delta.id, "type": "function", "function": function})
        else:
            calls[-1]["function"]["arguments"] += delta.arguments
    return calls
