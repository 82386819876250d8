"""Who was refused and told to come back: known again by sending the same request.

A retry is the same request once more, so its path, key and body say who it is, whatever client sends it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

_MARKED_BYTES = 65536  # of a body: as much as a connection takes before anybody reads it
_LATE_S = 30
_MOST = 1 << 15
_WHOSE = (b"authorization", b"x-api-key", b"content-length")


class Mark:
    """What tells one request from others: a checksum of its path, its key and the beginning of its body. `returns`: it
    has been found to come back when it was told to."""

    __slots__ = ("_left", "returns", "value")

    def __init__(self, path: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.value = zlib.crc32(path)
        for name, value in headers:
            if name in _WHOSE:
                self.value = zlib.crc32(value, self.value)
        self._left = _MARKED_BYTES
        self.returns = False

    def whole(self, body: bytes) -> Mark:
        """The mark of a request that begins like this one, with such a body; what is added to that changes nothing."""
        mark = Mark.__new__(Mark)
        mark.value, mark._left, mark.returns = zlib.crc32(body[:_MARKED_BYTES], self.value), 0, False
        return mark

    @property
    def done(self) -> bool:
        """Whether the rest of the body counts no more."""
        return not self._left

    def add(self, body: bytes) -> None:
        """The next piece of the body."""
        if self._left:
            self.value = zlib.crc32(body[: self._left], self.value)
            self._left -= min(len(body), self._left)


class Returns:
    """The turns that were promised, by their second and the marks of those who were refused. Times are seconds of one
    clock. Bounded: of more than `_MOST` turns the latest are forgotten. (Dicts of plain numbers, which the garbage
    collector does not look into.)"""

    def __init__(self) -> None:
        self.n = 0
        self._turns: dict[int, dict[int, int]] = {}  # second -> mark -> how many
        self._oldest = self._latest = 0

    def expect(self, mark: Mark, turn_s: float, now: float) -> None:
        """It was told to come back at `turn_s`."""
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
        """Whether it was told to come back about now, or a while ago; then once. Sets `mark.returns`."""
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
