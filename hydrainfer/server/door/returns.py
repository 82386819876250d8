"""Refused requests that were told to come back, recognized by a mark when they do.

A retry is the same request once more, so its path, key and body identify it, whatever client sends it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

_MARKED_BYTES = 65536  # the part of a body that the mark covers: as much as a connection buffers
_LATE_S = 30  # how late after its turn a request may come
_MOST = 1 << 15  # turns that are remembered
_WHOSE = (b"authorization", b"x-api-key", b"content-length")


class Mark:
    """The mark that identifies a request: a checksum of its path, its key and the beginning of its body. `returns`: the
    request has been found to be a returning one."""

    __slots__ = ("_left", "returns", "value")

    def __init__(self, path: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.value = zlib.crc32(path)
        for name, value in headers:
            if name in _WHOSE:
                self.value = zlib.crc32(value, self.value)
        self._left = _MARKED_BYTES
        self.returns = False

    def whole(self, body: bytes) -> Mark:
        """The mark of a request with this head and the given body. Later calls of `add` do not change it."""
        mark = Mark.__new__(Mark)
        mark.value, mark._left, mark.returns = zlib.crc32(body[:_MARKED_BYTES], self.value), 0, False
        return mark

    @property
    def done(self) -> bool:
        """Whether the rest of the body is ignored."""
        return not self._left

    def add(self, body: bytes) -> None:
        """Add the next piece of the body."""
        if self._left:
            self.value = zlib.crc32(body[: self._left], self.value)
            self._left -= min(len(body), self._left)


class Returns:
    """The promised turns, by their second and the marks of the refused requests. Times are seconds of one clock. Beyond
    `_MOST` turns, the latest are forgotten. The dicts hold plain numbers, which the garbage collector skips."""

    def __init__(self) -> None:
        self.n = 0
        self._turns: dict[int, dict[int, int]] = {}  # second -> mark -> number of turns
        self._oldest = self._latest = 0

    def expect(self, mark: Mark, turn_s: float, now: float) -> None:
        """Note that the request with this mark was told to come back at `turn_s`."""
        late = int(now) - _LATE_S
        if not self.n:
            self._oldest = late
        while self._oldest < late:
            self.n -= sum(self._turns.pop(self._oldest, {}).values())
            self._oldest += 1
        second = int(turn_s)
        if self.n >= _MOST:
            while self._latest not in self._turns:
                self._latest -= 1
            if second >= self._latest:
                return
            self._forget_latest()
        marks = self._turns.setdefault(second, {})
        marks[mark.value] = marks.get(mark.value, 0) + 1
        self.n += 1
        self._latest = max(self._latest, second)

    def _forget_latest(self) -> None:
        """Forget one turn of the latest second."""
        marks = self._turns[self._latest]
        value, n = marks.popitem()
        if n > 1:
            marks[value] = n - 1
        elif not marks:
            del self._turns[self._latest]
        self.n -= 1

    def comes(self, mark: Mark, now: float) -> bool:
        """Whether the request was told to come back about now, or up to `_LATE_S` ago. Uses the turn up. Sets
        `mark.returns`."""
        if mark.returns or not self.n:
            return mark.returns
        value, turns = mark.value, self._turns
        for second in range(int(now), int(now) - _LATE_S, -1):
            if second in turns and value in (marks := turns[second]):
                self.n -= 1
                marks[value] -= 1
                if not marks[value]:
                    del marks[value]
                if not marks:
                    del turns[second]
                mark.returns = True
                break
        return mark.returns
