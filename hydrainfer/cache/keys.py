"""Where a request's pictures lie in its EMBED blocks, and under which keys they are found again."""

from __future__ import annotations

from hydrainfer.cache.spec import CacheSpec
from hydrainfer.core import Request


def embed_ranges(request: Request, spec: CacheSpec) -> list[range]:
    """For each picture, the indices of its blocks in the request's EMBED blocks. A picture starts on a block
    boundary, so that its blocks can be shared with other requests."""
    ranges, first = [], 0
    for span in request.media:
        n = spec.blocks_for(span.n_tokens)
        ranges.append(range(first, first + n))
        first += n
    return ranges


def embed_keys(request: Request, spec: CacheSpec) -> list[bytes]:
    """One key per EMBED block of the request: the picture's content key and the block's number in it."""
    return [span.key + i.to_bytes(4, "little") for span in request.media for i in range(spec.blocks_for(span.n_tokens))]
