"""Answers that may call tools: their sampling parameters, and their bodies, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from hydrainfer.core import InvalidRequest, SamplingParams
from hydrainfer.processor import (
    AnswerPiece,
    AnswerStream,
    CallDelta,
    ModelDescription,
    Prepared,
    ToolFormat,
    Tools,
    answer_stream,
    calls_grammar,
)
from hydrainfer.server.live import Completion, Delta
from hydrainfer.server.openai.replies import ChatReply


def tool_format(model: ModelDescription) -> ToolFormat:
    """The format in which the model writes tool calls. Raises `InvalidRequest` if the chat template takes no tools, or
    if the format is unknown."""
    template = model.template
    if template is None or not template.takes_tools:
        why = "this model's chat template has no tools; leave tools out"
    elif template.tools is None:
        why = "how this model writes tool calls is unknown; the server's option --tool-call-parser says it"
    else:
        return template.tools
    raise InvalidRequest(why, param="tools", code="unsupported_parameter")


def sampling_for(sampling: SamplingParams, tools: Tools, how: ToolFormat) -> SamplingParams:
    """The sampling parameters with a grammar for the calls, if calls are required or the answer has a grammar. Special
    tokens are kept in the text, since one may begin a call. Raises `InvalidRequest`."""
    grammar = sampling.grammar
    if tools.required or grammar is not None:
        grammar = calls_grammar(tools, how, grammar)
    return msgspec.structs.replace(sampling, grammar=grammar, skip_special_tokens=False)


def reader(prepared: Prepared, tools: Tools | None, how: ToolFormat | None) -> AnswerStream:
    """A reader of the text of one choice, which may call tools."""
    return answer_stream(prepared.thinking, tools, how, forced=prepared.sampling.grammar is not None)


class ToolReply(ChatReply):
    """A `ChatReply` that finds tool calls in the text."""

    def __init__(self, *args: Any, tools: Tools, how: ToolFormat) -> None:
        self._tools, self._how = tools, how
        self._arguments: dict[int, str] = {}
        """The arguments of each choice's last call, kept if there are stop strings."""
        super().__init__(*args)

    def _reader(self) -> AnswerStream:
        return reader(self.prepared, self._tools, self._how)

    def _read(self, index: int, text: str, finish_reason: str | None) -> AnswerPiece:
        piece = super()._read(index, text, finish_reason)
        if not self.prepared.sampling.stop:
            return piece
        for call in piece.calls:
            before = "" if call.id is not None else self._arguments[index]
            self._arguments[index] = before + call.arguments
        return piece

    def _delta(self, said: AnswerPiece, *, last: bool) -> dict[str, Any]:
        delta = super()._delta(said, last=last or bool(said.calls))
        return delta | ({"tool_calls": [_call(c) for c in said.calls]} if said.calls else {})

    def _message(self, said: AnswerPiece) -> dict[str, Any]:
        message = super()._message(said)
        if said.calls:
            message |= {"content": said.content or None, "tool_calls": merged(said.calls)}
        return message

    def _finish(self, index: int, part: Delta | Completion) -> str | None:
        if part.finish_reason != "stop" or not self._streams[index].n_calls:
            return part.finish_reason
        if isinstance(part.stop_reason, str) and not is_json(self._arguments.get(index, "")):
            return "stop"  # the stop string cut a call
        return "tool_calls"


def _call(delta: CallDelta) -> dict[str, Any]:
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}


def is_json(arguments: str) -> bool:
    """Whether a call's arguments are whole."""
    try:
        orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return False
    return True


def merged(deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
    """The whole calls, in OpenAI's format."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.id is not None:
            function = {"name": delta.name, "arguments": delta.arguments}
            calls.append({"id": delta.id, "type": "function", "function": function})
        else:
            calls[-1]["function"]["arguments"] += delta.arguments
    return calls
