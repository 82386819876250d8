"""What of a request the caches have: how many tokens, which pictures, and which blocks only other tiers have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hydrainfer.cache import CacheSpec, Fetch, Found, Tier
from hydrainfer.core import Request

_AWAY = -1  # in the place of a block that another tier has


def find_away(
    tiers: Iterable[Tier], spec: CacheSpec, keys: Sequence[bytes], found: list[int | None]
) -> dict[int, tuple[str, int]]:
    """The tier and block, by number, of the blocks that only other tiers have. They count as `found`, which is
    changed."""
    away: dict[int, tuple[str, int]] = {}
    for tier in tiers:
        lacking = [*range(len(found), len(keys))]
        if not spec.chained:
            lacking = [i for i, block in enumerate(found) if block is None]
        blocks = tier.find(spec.name, [keys[i] for i in lacking])
        for i, block in zip(lacking, blocks, strict=True):
            if block is not None:
                away[i] = tier.name, block
                found[i:] = [_AWAY, *found[i + 1 :]]
            elif spec.chained:
                break
    return away


def fetches_of(blocks: dict[str, Found], away: Mapping[str, Mapping[int, tuple[str, int]]]) -> list[Fetch]:
    """The copies that bring found blocks from other tiers. Only those on the device are left in `blocks`."""
    fetches: dict[tuple[str, str], Fetch] = {}
    for spec, there in away.items():
        for i, block in enumerate(blocks[spec]):
            if block == _AWAY:
                tier, source = there[i]
                fetch = fetches.setdefault((tier, spec), Fetch(tier, spec, [], []))
                fetch.numbers.append(i)
                fetch.blocks.append(source)
        blocks[spec] = [None if block == _AWAY else block for block in blocks[spec]]
    return list(fetches.values())


def safe_tokens(specs: list[CacheSpec], found: Mapping[str, Found], n_most: int) -> int:
    """The largest number of tokens, at most `n_most`, that no kind of cache has to compute again."""
    n_tokens: int | None = None
    while True:
        before = n_tokens
        for spec in specs:
            n_safe = spec.safe(found[spec.name], n_most if n_tokens is None else n_tokens)
            n_tokens = n_tokens if n_safe is None else n_safe
        if not n_tokens or n_tokens == before:
            return n_tokens or 0


def missing_pictures(request: Request, specs: list[CacheSpec], there: Mapping[str, Found], n_tokens: int) -> list[int]:
    """The pictures to encode: not computed, not in the cache, and not equal to an earlier one of this request."""
    seen, missing = set(), []
    for spec in specs:
        found = there[spec.name]
        for i, blocks in enumerate(spec.pictures(request)):
            span = request.media[i]
            if span.end <= n_tokens:
                continue
            if span.key not in seen and any(found[b] is None for b in blocks):
                missing.append(i)
            seen.add(span.key)
    return missing
