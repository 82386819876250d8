"""The reader of tool calls as the text arrives: names, pieces of arguments, and the text outside of calls.

TEXT ──trigger──> CALLS ──{──> one object ──}──> CALLS ──closing, or anything else──> TEXT
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection
from typing import Any

from hydrainfer.processor.text.piece import CallDelta, PieceList
from hydrainfer.processor.text.tool_format import ToolFormat

_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


_BEGUN = re.compile(r"""[\s;,\[]*(\{\s*"(name|type|function|arguments|parameters)"|[A-Za-z_][\w.]*(\(|\[ARGS\]))""")


class ToolCallStream:
    """The reader of the calls of one choice. Only calls of functions in `names` count; whatever else looks like a call
    stays text, unless the answer was cut off there. `forced`: the answer was constrained by a grammar; `required`: to
    calls, so that it has no text. `parallel=False`: calls after the first are left out."""

    def __init__(
        self,
        how: ToolFormat,
        names: Collection[str],
        *,
        forced: bool = False,
        required: bool = False,
        parallel: bool = True,
    ) -> None:
        self._how = how
        self._required = required
        self._names = names
        self._bare = how.bare if forced or not how.bare_if_forced else ""
        self._most = None if parallel else 1
        self.n_calls = 0
        self._held = ""  # may be text or a call; not known yet
        self._raw = ""  # the text since the trigger, until the first call
        self._space = ""  # white space at the end of the text; dropped if a call follows
        self._began = False  # whether some text was sent
        self._in_calls = False
        self._object: _Object | None = None
        self._out = PieceList()

    def push(self, text: str, *, last: bool = False, cut: bool = False) -> PieceList:
        """Read the next piece of text and return its parts. `last`: no more text will come. `cut`: because the answer
        has reached its length."""
        self._out = PieceList()
        self._held += text
        while self._held and (self._read_call() if self._in_calls else self._read_text()):
            pass
        if last:
            self._finish(cut)
        return self._out

    # ---- inside: each returns whether it consumed text

    def _read_text(self) -> bool:
        trigger, text = self._how.trigger, self._held
        if self._bare and not self._began:
            head = text.lstrip()
            if not head:
                return False
            if head.startswith(self._bare):
                return self._enter("", head)
        at = text.find(trigger)
        if at >= 0:
            self._say(text[:at])
            return self._enter(trigger, text[at + len(trigger) :])
        n_held = overlap(text, trigger)
        self._say(text[: len(text) - n_held])
        self._held = text[len(text) - n_held :]
        return False

    def _enter(self, trigger: str, rest: str) -> bool:
        self._in_calls, self._raw, self._held = True, trigger, rest
        return True

    def _read_call(self) -> bool:
        if self._object is None:
            return self._read_glue()
        n = self._object.read(self._held)
        self._raw += self._held[:n]
        self._held = self._held[n:]
        self._tell(self._object)
        if self._object.over:
            self._close(self._object)
            self._object = None
        return True

    def _read_glue(self) -> bool:
        """Skip the separators around calls."""
        how, text = self._how, self._held
        if text[0] == "{":
            self._object = _Object()
            return True
        for one in (*how.glue, how.closing, how.trigger):
            if one and text.startswith(one):
                self._raw += one
                self._held = text[len(one) :]
                self._in_calls = one != how.closing
                return True
        if any(one.startswith(text) for one in (how.closing, how.trigger)):
            return False  # may become a mark
        self._leave()
        return True

    def _leave(self) -> None:
        """Return to text. If there was a trigger but no call, what was read since is text."""
        self._in_calls = False
        raw, self._raw = self._raw, ""
        if raw.strip() and ("{" in raw or not self.n_calls):
            self._say(raw)

    def _tell(self, call: _Object) -> None:
        """Send the new arguments of a call whose name is known."""
        if call.name not in self._names or (new := call.take()) is None:
            return
        if call.index is None:
            call.index = self._next()
            self._send(CallDelta(call.index, new, self._new_id(), call.name))
        elif new:
            self._send(CallDelta(call.index, new))

    def _close(self, call: _Object) -> None:
        if call.index is None:
            found = call.whole()
            name = found.get("name") if isinstance(found, dict) else None
            if not isinstance(name, str) or name not in self._names:
                self._leave()
                return
            arguments = found.get("arguments", found.get("parameters", {}))
            try:
                text = arguments if isinstance(arguments, str) and _encodes(arguments) else dumped(arguments)
            except ValueError:
                self._leave()
                return
            self._send(CallDelta(self._next(), text, self._new_id(), name))
        self._raw = ""

    def _next(self) -> int:
        self.n_calls += 1
        self._space = ""
        return self.n_calls - 1

    def _send(self, delta: CallDelta) -> None:
        if self._most is None or delta.index < self._most:
            self._out.call(delta)

    def _new_id(self) -> str:
        return new_call_id(self._how.id_chars)

    def _say(self, text: str) -> None:
        if not text or self._required:
            return
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._began = True
            self._out.say(kept)

    def _finish(self, cut: bool) -> None:
        if self._object is not None and self._object.index is not None:
            return  # the answer was cut off within a call
        if cut and self._is_begun(self._raw + self._held if self._in_calls else self._held):
            return
        if self._in_calls:
            rest, self._held = self._held, ""
            self._leave()
            self._say(rest if not self.n_calls else "")
        else:
            self._say(self._held)
        if self._space and not self.n_calls:
            self._out.say(self._space)

    def _is_begun(self, text: str) -> bool:
        """Whether the text at which an answer was cut off is the beginning of a call."""
        mark = self._how.trigger
        if not text or (not self._in_calls and mark.startswith(text)):
            return len(text) > 1 or (bool(text) and self.n_calls > 0)  # one character may be anything
        return text.lstrip().startswith(mark) or _BEGUN.match(text) is not None or self.n_calls > 0


class _Object:
    """One JSON object, read as it arrives. `name` is set once the beginning of the object has arrived in the usual
    form; then `take` gives the arguments piece by piece. `index`: the number of the call, once the object is one."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.index: int | None = None
        self.over = False
        self._text = ""
        self._depth = 0
        self._quoted = self._escaped = False
        self._sent = 0  # the position up to which `take` has returned arguments
        self._ends: list[int] = []  # the ends of the object's values
        self._arguments_end: int | None = None

    def read(self, text: str) -> int:
        """Read the next text. Returns how many of its characters belong to the object."""
        begin = len(self._text)
        for i, c in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or c != '"'
                self._escaped = c == "\\" and not self._escaped
            elif c == '"':
                self._quoted = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth == 1:
                    self._ends.append(begin + i + 1)
                if self._depth == 0:
                    self.over = True
                    self._add(text[: i + 1])
                    return i + 1
        self._add(text)
        return len(text)

    def _add(self, text: str) -> None:
        self._text += text
        if self.name is None and (head := _HEAD.match(self._text)):
            self.name, self._sent = head[1], head.end()
        if self.name is not None and self._arguments_end is None:
            self._arguments_end = next((end for end in self._ends if end > self._sent), None)

    def take(self) -> str | None:
        """The arguments that have arrived since the last call; None while the name is not known."""
        if self.name is None:
            return None
        end = len(self._text) if self._arguments_end is None else self._arguments_end
        new, self._sent = self._text[self._sent : end], max(self._sent, end)
        return new

    def whole(self) -> Any:
        """The parsed object; None if it is not valid JSON."""
        try:
            return json.loads(self._text)
        except (ValueError, RecursionError):
            return None


def new_call_id(n_chars: int = 0) -> str:
    """A new id for a call: `n_chars` letters and digits, or OpenAI's form if 0."""
    if n_chars:  # Mistral's templates accept no other ids
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(n_chars))
    return f"call_{secrets.token_hex(12)}"


def dumped(arguments: Any) -> str:
    """The arguments as JSON. Raises `ValueError` if JSON cannot express them: infinity, for example."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or _encodes(text) else json.dumps(arguments, allow_nan=False)


def _encodes(text: str) -> bool:
    """Whether the text can be encoded in UTF-8: it has no half of a surrogate pair, which JSON can only escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def overlap(text: str, trigger: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `trigger`."""
    longest = min(len(text), len(trigger) - 1)
    return next((n for n in range(longest, 0, -1) if trigger.startswith(text[-n:])), 0)
