"""The tool calls in the answers of Python callers, found as the server finds them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import msgspec

from hydrainfer.core import InvalidRequest, SamplingParams
from hydrainfer.offline.outputs import ToolCall
from hydrainfer.processor import (
    ModelDescription,
    Prepared,
    TextStream,
    ToolFormat,
    Tools,
    Vocabulary,
    answer_stream,
    calls_grammar,
    together,
)
from hydrainfer.server import Completion


class CallReader(NamedTuple):
    """Finds the calls of `tools` in the answers of a model that writes them in the format `how`."""

    tools: Tools
    how: ToolFormat
    vocabulary: Vocabulary

    def constrained(self, sampling: SamplingParams) -> SamplingParams:
        """The sampling parameters, with a grammar if the answer has to call, or has a grammar already. Raises
        `InvalidRequest`."""
        if not self.tools.required and sampling.grammar is None:
            return sampling
        return msgspec.structs.replace(sampling, grammar=calls_grammar(self.tools, self.how, sampling.grammar))

    def calls(self, prepared: Prepared, done: Completion) -> tuple[ToolCall, ...]:
        """The calls in a choice that has ended. They are read with the special tokens, one of which may begin them."""
        sampling = msgspec.structs.replace(prepared.sampling, skip_special_tokens=False)
        by_token = done.finish_reason == "stop" and not isinstance(done.stop_reason, str)
        stream = TextStream(self.vocabulary, sampling, continues=prepared.continues)
        text = stream.push(done.token_ids, ended_by_token=by_token, last=True).text
        reader = answer_stream(prepared.thinking, self.tools, self.how, forced=sampling.grammar is not None)
        calls: list[ToolCall] = []
        for part in together(reader.push(text, last=True, cut=done.finish_reason != "stop")).calls:
            if part.id is not None:
                calls.append(ToolCall(part.id, part.name or "", part.arguments))
            else:
                calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + part.arguments)
        return tuple(calls)


def call_reader(model: ModelDescription, tools: Tools | None) -> CallReader | None:
    """The reader for these tools; None if there are none, or if their calls stay text because it is not known how the
    model writes them. Raises `InvalidRequest` if they are required all the same."""
    how = model.template.tools if model.template is not None else None
    if tools is None or (how is None and not tools.required):
        return None
    if how is None:
        why = "how this model writes tool calls is unknown; the argument tool_call_parser of LLM(...) says it"
        raise InvalidRequest(why, param="tool_choice")
    return CallReader(tools, how, model.vocabulary)
