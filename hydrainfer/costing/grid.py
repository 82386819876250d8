"""The batches that a measurement runs, and the memory that they take in the caches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from hydrainfer.cache import CacheSpec
from hydrainfer.planner.costs import BatchShape


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """The grid of measurements. `sizes`: those of pictures, in pixels. Chunks are prefilled alone after a context of
    each of `starts`, and together with `mixed` decodes of every context. Each of `beside`, (decodes, chunk), runs
    beside vision batches of `pictures_beside` pictures. Cases that do not fit the model's context are left out."""

    sizes: tuple[tuple[int, int], ...] = ((336, 336), (640, 480), (1024, 768))
    pictures: tuple[int, ...] = (1, 2, 4, 8)
    chunks: tuple[int, ...] = (16, 64, 128, 256, 512, 1024, 2048)
    starts: tuple[int, ...] = (0, 256, 1024)
    decodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    contexts: tuple[int, ...] = (64, 256, 1024)
    mixed: tuple[int, ...] = (4, 16)
    beside: tuple[tuple[int, int], ...] = ((1, 0), (16, 0), (16, 64), (16, 256), (0, 256))
    pictures_beside: tuple[int, ...] = (1, 4)


GPU_GRID = Grid(
    pictures=(1, 2, 4, 8, 16),
    chunks=(16, 128, 512, 1024, 2048, 4096, 8192),
    starts=(0, 1024, 4096),
    decodes=(1, 4, 16, 32, 64, 128, 256),
    contexts=(256, 1024, 4096, 8191),
    mixed=(16, 64),
    beside=((1, 0), (64, 0), (64, 256), (64, 1024), (0, 2048)),
)
"""The grid for a GPU, which serves more and longer requests at once."""


class Case(NamedTuple):
    """A batch of one lane or, with `beside`, batches of both lanes, the vision batch first."""

    work: BatchShape
    beside: BatchShape | None = None

    @property
    def language(self) -> BatchShape | None:
        """The language batch; None if there is none."""
        return next((w for w in self if w is not None and not w.is_vision), None)

    @property
    def title(self) -> str:
        return " beside ".join(_title(work) for work in self if work is not None)


def _title(work: BatchShape) -> str:
    if work.is_vision:
        return f"encode {work.pictures} × {work.tokens}"
    parts = []
    if work.chunk:
        parts.append(f"prefill {work.chunk} at {work.start}")
    if work.decodes:
        parts.append(f"decode {work.decodes} × {work.context}")
    return " + ".join(parts)


def cases_of(
    grid: Grid, n_context: int, picture_tokens: Sequence[int], fits: Callable[[BatchShape], bool] = lambda _: True
) -> list[Case]:
    """All cases of `grid` for a model of this context, short ones first. `picture_tokens`: the numbers of embedding
    tokens of its pictures, none if it takes text only. `fits`: whether a language batch fits the caches; decodes beside
    pictures have the longest context that does, up to the middle one of the grid."""
    contexts = [c for c in grid.contexts if c < n_context]
    cases = {Case(BatchShape(decodes=n, context=c)): None for c in contexts for n in grid.decodes}
    chunks = [(c, s) for s in grid.starts for c in grid.chunks if s + c <= n_context]
    cases |= {Case(BatchShape(chunk=c, start=s)): None for c, s in chunks}
    for c in (c for c, s in chunks if s == 0):
        cases |= {Case(BatchShape(chunk=c, decodes=n, context=x)): None for n in grid.mixed for x in contexts}
    usual = contexts[: len(contexts) // 2 + 1]
    for tokens in picture_tokens:
        cases |= {Case(BatchShape(pictures=n, tokens=tokens)): None for n in grid.pictures}
        for n in grid.pictures_beside:
            vision = BatchShape(pictures=n, tokens=tokens)
            for decodes, chunk in grid.beside:
                if chunk <= n_context:
                    language = _longest(decodes, chunk, usual, fits)
                    cases |= {Case(language): None, Case(vision): None, Case(vision, language): None}
    return list(cases)


def _longest(decodes: int, chunk: int, contexts: Sequence[int], fits: Callable[[BatchShape], bool]) -> BatchShape:
    """The batch with the longest of these contexts that fits; if none does, with the longest."""
    if not decodes:
        return BatchShape(chunk=chunk)
    batches = [BatchShape(chunk=chunk, decodes=decodes, context=context) for context in reversed(contexts)]
    return next(filter(fits, batches), batches[0])


# ---- memory


def tokens_of(work: BatchShape) -> list[int]:
    """How many tokens each sequence of a language batch has in the end: those that decode, then the one of the
    chunk."""
    return [work.context + 1] * work.decodes + ([work.start + work.chunk] if work.chunk else [])


def blocks_for(spec: CacheSpec, n_tokens: int) -> int:
    """The number of blocks that a sequence of a measurement has in a cache: those of all its tokens, even where a
    window would leave some out."""
    return spec.blocks_for(n_tokens) if spec.paged else len(spec.span(0, n_tokens))


def blocks_of(work: BatchShape, specs: Iterable[CacheSpec]) -> dict[CacheSpec, int]:
    """The blocks that a language batch takes in each cache."""
    lengths = Counter(tokens_of(work))
    return {spec: sum(blocks_for(spec, n) * many for n, many in lengths.items()) for spec in specs}


def bytes_of(blocks: Mapping[CacheSpec, int]) -> int:
    return sum(spec.block_bytes * n for spec, n in blocks.items())


def pool_for(works: Iterable[BatchShape], specs: Sequence[CacheSpec], room: float = math.inf) -> dict[CacheSpec, int]:
    """The blocks of each cache in which any of these batches fits, one at a time. A batch for which all caches together
    would need more than `room` bytes is left out."""
    pool = dict.fromkeys(specs, 0)
    for work in works:
        larger = {spec: max(pool[spec], n) for spec, n in blocks_of(work, specs).items()}
        if bytes_of(larger) <= room:
            pool = larger
    return pool


def fitting(cases: Sequence[Case], specs: Sequence[CacheSpec], room: float) -> list[Case]:
    """The cases whose language batches fit into caches of `room` bytes."""
    works = [(case, case.language) for case in cases]
    pool = pool_for([work for _, work in works if work is not None], specs, room)
    return [case for case, work in works if work is None or _fits(work, pool)]


def _fits(work: BatchShape, pool: Mapping[CacheSpec, int]) -> bool:
    return all(n <= pool[spec] for spec, n in blocks_of(work, pool).items())
