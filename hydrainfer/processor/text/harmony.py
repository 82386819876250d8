"""The reader of gpt-oss's answers (the "harmony" format): messages in channels, separated as the text arrives.

HEAD ──<|message|>──> BODY ──<|end|>, <|call|>, <|return|>, or the next head──> HEAD

A head names the channel (analysis: reasoning; commentary and final: text for the user) and, for a call, the function:
`<|start|>assistant to=functions.NAME<|channel|>commentary json`, or `to=…` after the channel. The first message's
`<|start|>assistant` is part of the prompt. https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Literal

from hydrainfer.processor.text.piece import AnswerStream, CallDelta, PieceList
from hydrainfer.processor.text.tool_calls import new_call_id, overlap

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_BEGINNINGS = ("<|start|>", "<|channel|>", " to=", "to=")
_MOST_HEAD = 1024
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([\w.:-]+)")
_Body = Literal["reasoning", "content", "call"]


class HarmonyStream(AnswerStream):
    """The reader of one choice. Only calls of functions in `names` count; a message to any other recipient stays text
    with its marks, as does text outside messages. `parallel=False`: calls after the first are left out. Messages of the
    same kind are joined by a newline."""

    def __init__(self, names: Collection[str] = (), *, parallel: bool = True) -> None:
        self._calls = _Calls(parallel=parallel)
        self._names = names
        self._held = ""
        self._body: _Body | None = None  # the kind of the open message; None within a head
        self._begun = {"reasoning": False, "content": False}  # whether some text of that kind was emitted
        self._apart = False  # the next piece of text is the first of a message
        self._as_it_is = False  # the open message stays text, with its marks

    @property
    def n_calls(self) -> int:
        return self._calls.n_calls

    def push(self, text: str, *, last: bool = False, cut: bool = False) -> PieceList:  # noqa: ARG002  # incomplete
        # heads are never text
        self._out = PieceList()
        self._held += text
        while self._held and (self._read_head(last) if self._body is None else self._read_body(last)):
            pass
        if last and self._body is not None:
            self._close()
        return self._out

    def _read_head(self, last: bool) -> bool:
        text = self._held
        at = text.find(_MESSAGE)
        if not text.startswith(_BEGINNINGS):
            if not last and any(one.startswith(text) for one in _BEGINNINGS):
                return False
            self._open("content")
        elif at >= 0:
            head, self._held = text[: at + len(_MESSAGE)], text[at + len(_MESSAGE) :]
            self._read_message(head)
        elif len(text) > _MOST_HEAD:
            self._open("content")
            self._tell(text[0])
            self._held = text[1:]  # without its first character it is no mark
        else:
            return False  # if the answer is cut off here, the message has no text yet
        return True

    def _read_message(self, head: str) -> None:
        recipient, channels = _RECIPIENT.search(head), _CHANNEL.findall(head)
        if recipient is None:
            self._open("reasoning" if channels[-1:] == ["analysis"] else "content", apart=True)
        elif recipient[1] in self._names:
            self._open("call")
            self._call(self._calls.begin(recipient[1]))
        else:
            self._open("content")
            self._as_it_is = True
            self._tell(head)

    def _open(self, body: _Body, *, apart: bool = False) -> None:
        self._body, self._apart, self._as_it_is = body, apart, False

    def _read_body(self, last: bool) -> bool:
        found = _END.search(self._held)
        if found is None:
            n_held = 0 if last else max(overlap(self._held, end) for end in _ENDS)
            self._tell(self._held[: len(self._held) - n_held])
            self._held = self._held[len(self._held) - n_held :]
            return False
        end = found.start() if found[0] in ("<|start|>", "<|channel|>") else found.end()
        self._tell(self._held[: end if self._as_it_is else found.start()])
        self._held = self._held[end:]
        self._close()
        return True

    def _tell(self, text: str) -> None:
        body = self._body
        assert body is not None
        if body == "call":
            self._call(self._calls.add(text))
        elif text:
            between = "\n" if self._apart and self._begun[body] else ""
            tell = self._out.think if body == "reasoning" else self._out.say
            tell(between + text)
            self._begun[body], self._apart = True, False

    def _call(self, deltas: Iterable[CallDelta]) -> None:
        for delta in deltas:
            self._out.call(delta)

    def _close(self) -> None:
        if self._body == "call":
            self._call(self._calls.end())
        self._body = None


class _Calls:
    """The calls of an answer, whose arguments are sent piece by piece."""

    def __init__(self, *, parallel: bool) -> None:
        self.n_calls = 0
        self._most = None if parallel else 1
        self._empty = True

    def begin(self, name: str) -> list[CallDelta]:
        self.n_calls += 1
        self._empty = True
        return self._send(CallDelta(self.n_calls - 1, "", new_call_id(), name))

    def add(self, arguments: str) -> list[CallDelta]:
        self._empty = self._empty and not arguments.strip()
        return self._send(CallDelta(self.n_calls - 1, arguments)) if arguments else []

    def end(self) -> list[CallDelta]:
        """End the call. Without arguments it gets an empty object."""
        return self._send(CallDelta(self.n_calls - 1, "{}")) if self._empty else []

    def _send(self, delta: CallDelta) -> list[CallDelta]:
        return [delta] if self._most is None or delta.index < self._most else []
