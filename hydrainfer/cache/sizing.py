"""The number of blocks of each cache of an instance; the same rule for serving and for planning."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from hydrainfer.cache.spec import CacheSpec, Wishes

_USUAL_TOKENS = 8192  # tokens of a usual request; with such requests all kinds of caches fill up at the same time


def size_caches(
    specs: Iterable[CacheSpec], wishes: Wishes, free_bytes: float, given: Mapping[str, int] | None = None
) -> dict[CacheSpec, int]:
    """The number of blocks per cache. `given`: bytes that are fixed, by the option that fixes them. Caches of a known
    size come next. The others get what they want from the memory that is left, which may be nothing (see
    `too_small`)."""
    specs, given = list(specs), given or {}
    sizes: dict[CacheSpec, int] = {}
    for option, n_bytes in given.items():
        shares = _shared_out([s for s in specs if s.size_option == option], wishes, n_bytes)
        sizes |= {spec: max(1, n) for spec, n in shares.items()}
    for spec in specs:
        if spec not in sizes and not spec.takes_the_rest:
            wanted = spec.wanted(wishes)
            assert wanted is not None, f"{spec.name} neither knows its size nor takes the rest"
            sizes[spec] = wanted
    left = max(0, math.floor(free_bytes - sum(spec.block_bytes * n for spec, n in sizes.items())))
    for spec, fits in _shared_out([s for s in specs if s not in sizes], wishes, left).items():
        wanted = spec.wanted(wishes)
        sizes[spec] = fits if wanted is None else min(wanted, fits)
    return {spec: sizes[spec] for spec in specs}


def _shared_out(specs: list[CacheSpec], wishes: Wishes, n_bytes: int) -> dict[CacheSpec, int]:
    """The blocks of caches that have `n_bytes` together: the least that each needs and, of the rest, as many as hold
    the same number of usual requests. If there is too little, they get less than the least."""
    least = {spec: spec.least(wishes) for spec in specs}
    spare = n_bytes - sum(spec.block_bytes * n for spec, n in least.items())
    parts = least if spare < 0 else usual_parts(specs, wishes)
    total = sum(spec.block_bytes * n for spec, n in parts.items())
    if spare < 0:
        return {spec: n_bytes * n // total for spec, n in parts.items()}
    return {spec: least[spec] + spare * n // total for spec, n in parts.items()}


def usual_parts(specs: Iterable[CacheSpec], wishes: Wishes) -> dict[CacheSpec, int]:
    """The number of blocks of each cache that a usual request holds while it decodes."""
    n_tokens = min(_USUAL_TOKENS, wishes.n_longest or _USUAL_TOKENS)
    return {spec: spec.held_by(n_tokens) for spec in specs}


def too_small(sizes: Mapping[CacheSpec, int], wishes: Wishes) -> bool:
    """Whether some cache has less than the least it needs."""
    return any(n < spec.least(wishes) for spec, n in sizes.items())


def tokens_in(sizes: Mapping[CacheSpec, int]) -> float:
    """The most tokens, of all requests together, whose state fits caches of these sizes; infinite if tokens need no
    room."""
    return min((spec.tokens_in(n) for spec, n in sizes.items()), default=float("inf"))
