"""What an instance needs of a store of blocks that other instances share and that outlives all of them.

A block has one name, made of what its bytes depend on (`cache.shared`), so that two blocks with one name are equal. A
store may lose any block at any time: whoever reads takes a block that is absent, or broken in any way, for a miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from hydrainfer.cache import BlockName


class Root(NamedTuple):
    """What the names of all blocks of one model on one kind of server lie below. `digest`: 16 bytes. `about`: for
    people, such as the model's name and dtype."""

    digest: bytes
    about: dict[str, str]


class Contents(NamedTuple):
    """What a store holds, of all models together. `limit_bytes`: None if the store itself sets the limit."""

    n_blocks: int
    n_bytes: int
    limit_bytes: int | None


class KindRow(NamedTuple):
    """The blocks of one kind below one root. `about`: the root's; empty if the store has lost it. `oldest_s` and
    `newest_s`: how long ago the block longest unused and the last one were used; None if the store does not say it."""

    about: dict[str, str]
    kind: str
    n_blocks: int
    n_bytes: int
    oldest_s: float | None
    newest_s: float | None


class StoreError(Exception):
    """The store cannot be used now, as a whole; one line for people. Blocks that are absent or broken are no errors."""


class StoreFull(StoreError):
    """Nothing can be written now, but blocks can be read."""


class SharedStore(Protocol):
    """The methods block, and are called by several threads at a time. All but `close` raise `StoreError`."""

    place: str
    """As people wrote it, without a password."""
    counts: Counter[str]
    """`corrupt`: blocks that were found broken, and removed; `evicted`: blocks removed to make room."""

    def has(self, names: Sequence[BlockName]) -> list[bool]: ...

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> list[bool]:
        """Read each block into its buffer, which has exactly its size. Returns which blocks arrived whole; the other
        buffers may have been written to. A block that is broken, or of another size, is removed and counted."""

    def write(
        self, names: Sequence[BlockName], blocks: Sequence[memoryview], wanted: Callable[[], bool] = lambda: True
    ) -> int:
        """Write blocks in this order, those that are there already excepted. `wanted` is asked before each block can be
        found: from then on its bytes must be right. Once it says no, nothing more is written. Returns how many of the
        first blocks are in the store."""

    def touch(self, names: Sequence[BlockName]) -> list[bool]:
        """Make blocks count as used now. Returns which are there."""

    def contents(self) -> Contents: ...

    def close(self) -> None: ...
