"""How many blocks each cache of an instance gets; the same rule where it serves and where it is planned for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hydrainfer.cache.spec import CacheSpec, Wishes

TOKENS_PER_RUNNING = 1024
"""The automatic KV cache of a CPU holds this many tokens for each request that may run."""


def size_caches(
    specs: Iterable[CacheSpec], wishes: Wishes, free_bytes: float, given: Mapping[str, int] | None = None
) -> dict[CacheSpec, int]:
    """Blocks per cache. `given` has those that are fixed, by spec name; caches of a known size come next, and the
    others get what they want of the memory that is left, which may be nothing: `too_small` says so."""
    specs, given = list(specs), given or {}
    sizes: dict[CacheSpec, int] = {}
    for spec in sorted(specs, key=lambda s: s.name not in given and s.takes_the_rest):
        wanted = spec.wanted(wishes)
        if spec.name in given:
            sizes[spec] = given[spec.name]
        elif spec.takes_the_rest:
            left = free_bytes - sum(s.block_bytes * n for s, n in sizes.items())
            fits = max(0, int(left // spec.block_bytes))
            sizes[spec] = fits if wanted is None else min(wanted, fits)
        else:
            assert wanted is not None, f"{spec.name} neither knows its size nor takes the rest"
            sizes[spec] = wanted
    return {spec: sizes[spec] for spec in specs}


def too_small(sizes: Mapping[CacheSpec, int], wishes: Wishes) -> bool:
    """Whether some cache lacks even what one smallest use of it needs."""
    return any(n < spec.least(wishes) for spec, n in sizes.items())


def tokens_in(sizes: Mapping[CacheSpec, int]) -> float:
    """The most tokens, of all requests together, whose state fits caches of these sizes; infinite if tokens need
    none."""
    return min((spec.tokens_in(n) for spec, n in sizes.items()), default=float("inf"))
