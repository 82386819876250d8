"""The tags that an emulated device keeps in place of keys, values and embeddings: a word at the head of each block.

    KV block b of a sequence with n computed tokens:           identity << 32 | min(n, end of b)
    the state after n tokens:                                  identity << 32 | n
    EMBED block `part` of a picture:                           identity << 32 | part + 1

The identity is that of the picture's content, or of the chained key up to the last whole block, so that requests that
share a prefix read the same words, or, for a request that shares no prefix, of the request and its prompt. So a word
tells whose block it is, which block, and how much of it was there when it was copied. The rest of a block is never
touched and takes no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch

from hydrainfer.core import Request, chain_keys, split_chain
from hydrainfer.storage import BlockStore

MASK = (1 << 64) - 1
_WORD_BYTES = 8
_GOLDEN = 0x9E3779B97F4A7C15


def digest(data: bytes) -> int:
    """A hash of 64 bits that is the same in every process (`hash` of bytes is not)."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def content_of(request: Request) -> int:
    """A hash of 64 bits of the prompt's ids and pictures. (`hash` of a tuple of integers is not salted.)"""
    pictures = digest(b"\0".join(m.key for m in request.media)) if request.media else 0
    return (hash(request.prompt_ids) * _GOLDEN + pictures) & MASK


def identity(hashed: int) -> int:
    return (hashed & 0x7FFFFFFF) << 32


def _of_key(key: bytes) -> int:
    return identity(int.from_bytes(key[:8], "little"))


class KVTags:
    """The tags of one sequence: `idents[i]` is the identity of its first i blocks. `content`: the hash of its prompt,
    see `content_of`."""

    __slots__ = ("_block_tokens", "_last", "_own", "_request", "idents")

    def __init__(self, request: Request, content: int, block_tokens: int) -> None:
        self._request, self._block_tokens = request, block_tokens
        self._own = identity(content ^ digest(request.id.encode()))
        chain = split_chain(request.keys)
        self.idents = [_of_key(key) for key in chain]
        self._last = chain[-1] if chain else b""

    def know(self, tokens: Sequence[int]) -> None:
        """Extend `idents` to all blocks that `tokens` fill."""
        n, size = len(self.idents), self._block_tokens
        stop = len(tokens) // size + 1
        if n >= stop:
            return
        if not self._last:
            self.idents += [self._own] * (stop - n)
            return
        keys = chain_keys(self._last, tokens, size, self._request.media, n - 1)
        self.idents += [_of_key(key) for key in keys]
        self._last = keys[-1]

    def of(self, first: int, n_tokens: int) -> list[int]:
        """The tags of the blocks from number `first` to the last that `n_tokens` tokens reach."""
        size, idents = self._block_tokens, self.idents
        tags = [idents[i + 1] + (i + 1) * size for i in range(first, n_tokens // size)]
        return [*tags, self.after(n_tokens)] if n_tokens % size else tags

    def after(self, n_tokens: int) -> int:
        """The tag of the state after `n_tokens` tokens."""
        return self.idents[n_tokens // self._block_tokens] + n_tokens


class TagStore:
    """The tags in one cache's blocks, in host memory."""

    def __init__(self, store: BlockStore) -> None:
        assert store.device.type == "cpu", "an emulated device keeps its caches in host memory"
        assert store.spec.block_bytes % _WORD_BYTES == 0, f"a block of {store.spec.block_bytes} bytes is too odd"
        self.spec = store.spec
        self._words: np.ndarray = store.bytes.view(torch.int64)[:, 0].numpy()  # [n_blocks], strided

    def write(self, blocks: list[int], tags: list[int]) -> None:
        if blocks:
            self._words[blocks] = tags

    def mismatches(self, reads: Reads) -> dict[str, str]:
        """By reader, a description of the first block that does not hold its tag."""
        if not reads.blocks:
            return {}
        held = self._words[reads.blocks].tolist()
        if held == reads.tags:
            return {}
        found: dict[str, str] = {}
        for reader, block, got, tag in zip(reads.readers, reads.blocks, held, reads.tags):
            if got != tag:
                found.setdefault(reader, f"{self.spec.name} block {block} holds {got:#018x}, not {tag:#018x}")
        return found


class Reads:
    """Blocks that a batch reads, the tags they must hold, and which requests read them: one entry each per read."""

    __slots__ = ("blocks", "readers", "tags")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.tags: list[int] = []
        self.readers: list[str] = []

    def add(self, reader: str, blocks: list[int], tags: list[int]) -> None:
        self.blocks += blocks
        self.tags += tags
        self.readers += [reader] * len(blocks)
