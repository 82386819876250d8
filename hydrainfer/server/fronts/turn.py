"""An answer as the parts that the other protocols know: texts and calls, one after the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from hydrainfer.metrics import Timeline
from hydrainfer.processor import ReasoningStream, ToolDelta, ToolFormat, Tools
from hydrainfer.server.answers import Shape
from hydrainfer.server.replies import Reply
from hydrainfer.server.stream import Completion, Delta
from hydrainfer.server.tool_reply import call_stream


class ReplyPart(msgspec.Struct):
    """A text, or a call with its `id` and `name`; then `text` is that of its arguments."""

    kind: Literal["text", "call"]
    text: str = ""
    id: str = ""
    name: str = ""


class ReplyTurn(Reply):
    """The one choice of an answer. A part is begun, grows and ends; what these say is sent as it comes, and thrown away
    where the answer is wanted whole. What the model thinks first is left out: no request here can ask for it."""

    def __init__(
        self,
        *args: Any,
        asked: Mapping[str, Any],
        tools: Tools | None = None,
        how: ToolFormat | None = None,
    ) -> None:
        """`asked`: the request's body as the client wrote it."""
        super().__init__(*args)
        self.asked, self.include_usage = asked, True
        self.parts: list[ReplyPart] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._open = False
        self._thoughts = ReasoningStream(self.prepared.thinking) if self.prepared.thinking else None
        self._calls = call_stream(self.prepared, tools, how) if tools is not None and how is not None else None

    @abstractmethod
    def begin(self, part: ReplyPart) -> bytes:
        """The last of `parts` is new, and empty."""

    @abstractmethod
    def add(self, part: ReplyPart, new: str) -> bytes:
        """`new` was added to the last of `parts`."""

    @abstractmethod
    def end(self, part: ReplyPart) -> bytes:
        """The last of `parts` is whole."""

    @abstractmethod
    def last(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> bytes:
        """What is sent after all parts."""

    @abstractmethod
    def whole(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> bytes:
        """The answer of all parts."""

    @property
    def called(self) -> bool:
        """The answer ended by itself, and in calls."""
        return self.finish_reason == "stop" and any(part.kind == "call" for part in self.parts)

    def events(self, deltas: Sequence[Delta], n_tokens: Sequence[int]) -> bytes:  # noqa: ARG002
        return b"".join(self._say(d.text, d.finish_reason, d.stop_reason) for d in deltas)

    def closing(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> bytes:
        return self._close() + self.last(n_tokens, timelines)

    def body(self, done: Sequence[Completion], timelines: Sequence[Timeline | None]) -> bytes:
        (one,) = done
        self._say(one.text, one.finish_reason, one.stop_reason)
        self._close()
        return self.whole([len(one.token_ids)], timelines)

    def _say(self, text: str, finish_reason: str | None, stop_reason: int | str | None) -> bytes:
        last = finish_reason is not None
        if self._thoughts is not None:
            text = self._thoughts.push(text, last=last).content
        said = self._calls.push(text, last=last) if self._calls else ToolDelta(text)
        out = self._grow(ReplyPart("text"), said.content) if said.content else b""
        for call in said.calls:
            new = ReplyPart("call", "", call.id, call.name or "") if call.id is not None else None
            out += self._grow(new, call.arguments)
        if finish_reason is not None:
            self.finish_reason, self.stop_reason = finish_reason, stop_reason
        return out

    def _grow(self, new: ReplyPart | None, text: str) -> bytes:
        """Add to the open part or, if that is another than `new` would be, to `new`."""
        out = b""
        if new is not None and not (new.kind == "text" and self._open and self.parts[-1].kind == "text"):
            out = self._close()
            self.parts.append(new)
            self._open = True
            out += self.begin(new)
        part = self.parts[-1]
        part.text += text
        return out + (self.add(part, text) if text else b"")

    def _close(self) -> bytes:
        was_open, self._open = self._open, False
        return self.end(self.parts[-1]) if was_open else b""


def shape_of(prefix: str, turn: Callable[..., ReplyTurn], asked: Mapping[str, Any]) -> Shape:
    """The words of a protocol that says everything by one kind of turn."""
    return Shape(prefix, partial(turn, asked=asked), partial(turn, asked=asked))
