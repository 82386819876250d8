"""An answer as a sequence of parts, which the other protocols need: thoughts, texts and calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from hydrainfer.metrics import Timeline
from hydrainfer.processor import ToolFormat, Tools
from hydrainfer.server.live import Completion, Delta
from hydrainfer.server.openai import Reply, Shape, is_json, reader


class ReplyPart(msgspec.Struct):
    """A thought, a text, or a call. `id`, `name`: of a call, whose `text` is its arguments."""

    kind: Literal["thought", "text", "call"]
    text: str = ""
    id: str = ""
    name: str = ""


class ReplyTurn(Reply):
    """An answer with one choice, as parts. `begin`, `add` and `end` return the bytes to stream for a part; they are
    dropped if the answer is wanted whole. `thoughts`: whether the model's thoughts are parts or left out."""

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
        """Whether a request body asks for the model's thoughts."""

    @abstractmethod
    def begin(self, part: ReplyPart) -> bytes:
        """The bytes for a new part, the last of `parts`, which is still empty."""

    @abstractmethod
    def add(self, part: ReplyPart, new: str) -> bytes:
        """The bytes for text `new`, which was added to the last of `parts`."""

    @abstractmethod
    def end(self, part: ReplyPart) -> bytes:
        """The bytes for the end of the last of `parts`."""

    @abstractmethod
    def last(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> bytes:
        """The bytes to send after all parts."""

    @abstractmethod
    def whole(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> bytes:
        """The body of the whole answer."""

    @property
    def called(self) -> bool:
        """Whether the answer has calls and ended by itself, or at a stop string that cut none of them."""
        if self.finish_reason != "stop" or not any(part.kind == "call" for part in self.parts):
            return False
        return self.parts[-1].kind != "call" or not self.cut

    @property
    def cut(self) -> bool:
        """Whether the answer ended before the last of `parts` was whole: at its greatest length or, inside a call, at a
        stop string."""
        stopped = self.finish_reason == "length" or isinstance(self.stop_reason, str)
        if not stopped or not self.parts:
            return False
        last = self.parts[-1]
        if last.kind == "call":
            return not is_json(last.text)
        return self.finish_reason == "length"

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
        last, cut = new.finish_reason is not None, new.finish_reason == "length"
        for said in self._reader.push(new.text, last=last, cut=cut):
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
        """Add `text` to the open part, or to `new` if that begins another part. `new` None: the open part goes on."""
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
    """The `Shape` of a protocol that formats every answer by one class of turns."""
    return Shape(prefix, partial(turn, asked=asked), partial(turn, asked=asked))
