"""The keys of prefixes: a chain of digests, one per block of tokens, by which their KV is found again.

    k(0) = H(what all keys depend on)      k(i) = H(k(i-1) | ids of block i | the pictures that overlap block i)

Equal keys mean equal KV bytes, because everything up to the block's end is equal: the ids, the content of the pictures
(`MediaSpan.key`), where they lie, and what determines their positions.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import iter_unpack

from hydrainfer.core.request import MediaSpan, Request

KEY_BYTES = 16
_VERSION = b"1"


def chain_root(*parts: bytes) -> bytes:
    """The root key k(0) for the facts `parts`; different facts give different roots."""
    digest = blake2b(_VERSION, digest_size=KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def chain_keys(
    before: bytes, ids: Sequence[int], block_tokens: int, media: Sequence[MediaSpan] = (), first: int = 0
) -> list[bytes]:
    """The keys of the blocks from number `first` on that `ids` fill. `before`: the key of block `first - 1`, or k(0).
    `media`: in the order of their positions."""
    stop, size = len(ids) // block_tokens, 4 * block_tokens
    data = array("i", ids[first * block_tokens : stop * block_tokens]).tobytes()
    ahead = [(span, _said(span)) for span in reversed(media) if span.end > first * block_tokens]
    keys: list[bytes] = []
    for i in range(first, stop):
        at, low = (i - first) * size, i * block_tokens
        digest = blake2b(before + data[at : at + size], digest_size=KEY_BYTES)
        while ahead and ahead[-1][0].end <= low:
            ahead.pop()
        for span, said in reversed(ahead):
            if span.start >= low + block_tokens:
                break
            digest.update(said + (span.start - low).to_bytes(8, "little", signed=True))
        before = digest.digest()
        keys.append(before)
    return keys


def chain_of(root: bytes, ids: Sequence[int], block_tokens: int, media: Sequence[MediaSpan] = ()) -> bytes:
    """`Request.keys`: k(0) and a key for each whole block of the prompt, one after the other."""
    return b"".join([root, *chain_keys(root, ids, block_tokens, media)])


def answer_keys(request: Request, tokens: Sequence[int], keys: Sequence[bytes], block_tokens: int) -> list[bytes]:
    """The keys that follow `keys` for `tokens`, which are the prompt and the produced tokens. If an answer's positions
    differ from those of the same text in a prompt, its keys differ, too."""
    n, before = len(keys), keys[-1] if keys else request.keys
    if len(tokens) < (n + 1) * block_tokens:
        return []
    if n == request.n_prompt // block_tokens and (ahead := answer_ahead(request)):
        before = chain_root(before, b"ahead", ahead.to_bytes(8, "little"))
    return chain_keys(before, tokens, block_tokens, request.media, n)


def answer_ahead(request: Request) -> int:
    """How much higher the positions of an answer are than those of the same text in the prompt. Text continues after
    the longer side of a video's frames; an answer continues after the highest position of the prompt, which may be that
    of the video's last frame (`runtime.positions`)."""
    at = origin = position = highest = 0  # `position`: of prompt token `at`; `highest`: above all before it
    for span in request.media:
        if span.grid is None:
            continue  # a model without positions in time
        position += span.start - at
        origin = origin if span.joined else position
        n_times, *sides = span.grid
        highest = max(highest, position, origin + (max(span.times) + 1 if span.times else n_times))
        at, position = span.end, origin + max(sides)
    return max(0, highest - (position + request.n_prompt - at))


def split_chain(chain: bytes) -> list[bytes]:
    """The keys in `chain_of`'s result, k(0) first, as a new list."""
    return [*_keys_in(chain)]


@lru_cache(maxsize=8)  # a request's caches ask for the same chain, one after the other
def _keys_in(chain: bytes) -> tuple[bytes, ...]:
    return tuple(key for (key,) in iter_unpack(f"{KEY_BYTES}s", chain))


def _said(span: MediaSpan) -> bytes:
    """A digest of everything about a picture that the KV depends on, except for its place."""
    facts = repr((span.n_tokens, span.grid, span.times, span.joined)).encode()
    if span.gaps:
        facts += repr(span.gaps).encode()
    return blake2b(span.key + facts, digest_size=KEY_BYTES).digest()
