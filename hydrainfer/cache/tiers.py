"""The tiers of an instance: the memories in which it keeps blocks of its caches.

A cache has the same spec, the same keys and equal blocks in every tier; block numbers are a tier's own. Sequences
compute on the device tier. The host tier keeps those that have no room there. A `Tier` keeps what the device evicts:

    device ─evicted─> tier ─found by a later request: copied back─> device
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from hydrainfer.cache.sizing import usual_parts
from hydrainfer.cache.spec import CacheSpec, Wishes
from hydrainfer.core import Stage

DEVICE, HOST = "device", "host"


class Pulls(NamedTuple):
    """The copies of blocks into one `tier` of this instance. `blocks`: by cache spec, the source's blocks and, in the
    same order, the tier's blocks that they are copied to. False if there is nothing to copy."""

    tier: str
    blocks: dict[str, tuple[list[int], list[int]]]

    def __bool__(self) -> bool:
        return bool(self.blocks)


class Tier(Protocol):
    """A memory that keeps blocks which the caches of the device have evicted. It knows them by key; who copies them
    back is told by `Copies`. `version`: changes whenever the result of `find` may change."""

    name: str

    @property
    def version(self) -> int: ...

    def evicted(self, spec: str, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """The device gives up these blocks, which have these keys. They are overwritten once this returns, so whoever
        wants to keep them copies them now."""

    def find(self, spec: str, keys: Sequence[bytes]) -> list[int | None]:
        """The tier's blocks with these keys, None where there is none."""

    def load_s(self, n_bytes: int) -> float:
        """How long it takes to copy so much back."""

    def loaded(self, n_bytes: int, seconds: float) -> None:
        """Note how long it took to copy so much back."""

    def hold(self, spec: str, blocks: Sequence[int]) -> None:
        """Keep these blocks of the tier until they are dropped: they are being read."""

    def drop(self, spec: str, blocks: Sequence[int]) -> None:
        """They are not read any more."""


class Fetch(NamedTuple):
    """Blocks of a request that one tier has: `blocks[i]` of the tier is the request's block `numbers[i]`."""

    tier: str
    spec: str
    numbers: list[int]
    blocks: list[int]


def host_sizes(specs: Iterable[CacheSpec], wishes: Wishes, n_bytes: int) -> dict[CacheSpec, int]:
    """The number of blocks in host memory of each cache of tokens, for `n_bytes` together; empty if not every cache
    gets one."""
    parts = usual_parts([spec for spec in specs if Stage.DECODE in spec.stages], wishes)
    total = sum(spec.block_bytes * n for spec, n in parts.items())
    sizes = {spec: n_bytes * n // total for spec, n in parts.items()}
    return sizes if all(sizes.values()) else {}
