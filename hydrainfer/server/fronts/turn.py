"""An answer as the parts that the other protocols know: thoughts, texts and calls, one after the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from hydrainfer.metrics import Timeline
from hydrainfer.processor import ToolFormat, Tools
from hydrainfer.server.answers import Shape
from hydrainfer.server.replies import Reply
from hydrainfer.server.stream import Completion, Delta
from hydrainfer.server.tool_reply import reader


class ReplyPart(msgspec.Struct):
    """A thought, a text, or a call with its `id` and `name`; then `text` is that of its arguments."""

    kind: Literal["thought", "text", "call"]
    text: str = ""
    id: str = ""
    name: str = ""


class ReplyTurn(Reply):
    """The one choice of an answer. A part is begun, grows and ends; what these say is sent as it comes, and thrown away
    where the answer is wanted whole. `thoughts`: what the model thinks is a part, else it is left out."""

    def __init__(
        self,
        *args: Any,
        asked: Mapping[str, Any],
        tools: Tools | None = None,
        how: ToolFormat | None = None,
    ) -> None:
        """`asked`: the request's body as the client wrote it."""
        super().__init__(*args)
        self.thoughts = self.shows_thoughts(asked)
        self.n_reasoning = 0  # tokens
        self.asked, self.include_usage = asked, True
        self.parts: list[ReplyPart] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._open = False
        self._ids: list[int] = []
        self._reader = reader(self.prepared, tools, how)

    @staticmethod
    @abstractmethod
    def shows_thoughts(asked: Mapping[str, Any]) -> bool:
        """Whether this body asks to see what the model thinks."""

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
        """The bytes to send after all parts."""

    @abstractmethod
    def whole(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> bytes:
        """The answer of all parts."""

    @property
    def called(self) -> bool:
        """The answer ended by itself, and in calls."""
        return self.finish_reason == "stop" and any(part.kind == "call" for part in self.parts)

    def events(self, deltas: Sequence[Delta], n_tokens: Sequence[int]) -> bytes:  # noqa: ARG002
        return b"".join(map(self._say, deltas))

    def closing(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> bytes:
        self._count()
        return self._close() + self.last(n_tokens, timelines)

    def body(self, done: Sequence[Completion], timelines: Sequence[Timeline | None]) -> bytes:
        (one,) = done
        self._say(one)
        self._close()
        self._count()
        return self.whole([len(one.token_ids)], timelines)

    def _say(self, new: Delta | Completion) -> bytes:
        if self.prepared.thinking is not None:
            self._ids += new.token_ids
        out = b""
        for said in self._reader.push(new.text, last=new.finish_reason is not None):
            out += self._grow(ReplyPart("thought"), said.reasoning) if said.reasoning and self.thoughts else b""
            out += self._grow(ReplyPart("text"), said.content) if said.content else b""
            for call in said.calls:
                begun = ReplyPart("call", "", call.id, call.name or "") if call.id is not None else None
                out += self._grow(begun, call.arguments)
        if new.finish_reason is not None:
            self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason
        return out

    def _count(self) -> None:
        if self.prepared.thinking is not None:
            self.n_reasoning = self.prepared.thinking.n_tokens(self._ids, self.vocabulary)

    def _grow(self, new: ReplyPart | None, text: str) -> bytes:
        """Add to the open part or, if that is another than `new` would be, to `new`."""
        out = b""
        goes_on = new is None or (new.kind != "call" and self._open and self.parts[-1].kind == new.kind)
        if new is not None and not goes_on:
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
