"""The choice of the reader for an answer, by the format in which the model writes."""

from __future__ import annotations

from collections.abc import Sequence

from hydrainfer.processor.messages import Tools
from hydrainfer.processor.text.harmony import HarmonyStream
from hydrainfer.processor.text.piece import AnswerPiece, AnswerStream
from hydrainfer.processor.text.reasoning import ReasoningStream, Thinking
from hydrainfer.processor.text.tool_blocks import call_stream
from hydrainfer.processor.text.tool_calls import ToolCallStream
from hydrainfer.processor.text.tool_format import HARMONY, ToolFormat


class MarkedStream(AnswerStream):
    """The reader of an answer with marks around its reasoning, and tool calls after that."""

    def __init__(
        self, thinking: Thinking | None, tools: Tools | None, how: ToolFormat | None, *, forced: bool = False
    ) -> None:
        self._thoughts = ReasoningStream(thinking) if thinking is not None else None
        self._calls: ToolCallStream | None = None
        if tools is not None and how is not None:
            self._calls = call_stream(
                how, tools.schemas, forced=forced, required=forced and tools.required, parallel=tools.parallel
            )

    @property
    def n_calls(self) -> int:
        return self._calls.n_calls if self._calls is not None else 0

    def push(self, text: str, *, last: bool = False, cut: bool = False) -> Sequence[AnswerPiece]:
        reasoning = ""
        if self._thoughts is not None:
            reasoning, text = self._thoughts.push(text, last=last)
        if self._calls is None:
            return [AnswerPiece(reasoning, text)]
        pieces = self._calls.push(text, last=last, cut=cut)
        return [AnswerPiece(reasoning), *pieces] if reasoning else pieces


def answer_stream(
    thinking: Thinking | None, tools: Tools | None = None, how: ToolFormat | None = None, *, forced: bool = False
) -> AnswerStream:
    """The reader of one choice. `how`: the format in which the model writes calls of `tools`. `forced`: the answer was
    constrained by a grammar."""
    if (thinking is not None and thinking.how.name == HARMONY) or (how is not None and how.name == HARMONY):
        return HarmonyStream(tools.schemas, parallel=tools.parallel) if tools is not None else HarmonyStream()
    return MarkedStream(thinking, tools, how, forced=forced)
