"""What one kind of cached state looks like: enough to size a pool, allocate its bytes and migrate a block."""

from __future__ import annotations

import enum
import math

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class CacheKind(enum.StrEnum):
    """`FULL`: keys and values of every token. `EMBED`: one row of image embedding per placeholder token."""

    FULL = "full"
    EMBED = "embed"


class CacheSpec(msgspec.Struct, frozen=True):
    """One cache. `block_shape` is the shape of a block's bytes, block-major so that a block moves in one copy:
    FULL `(layers, 2, block_tokens, kv_heads, head_dim)`, EMBED `(block_tokens, width)`."""

    name: str
    kind: CacheKind
    block_tokens: int
    block_shape: tuple[int, ...]
    dtype: str

    @classmethod
    def full(cls, *, layers: int, kv_heads: int, head_dim: int, dtype: str, block_tokens: int = 16) -> CacheSpec:
        shape = (layers, 2, block_tokens, kv_heads, head_dim)
        return cls("kv", CacheKind.FULL, block_tokens, shape, dtype)

    @classmethod
    def embed(cls, *, width: int, dtype: str, block_tokens: int = 64) -> CacheSpec:
        return cls("embed", CacheKind.EMBED, block_tokens, (block_tokens, width), dtype)

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block_shape) * DTYPE_BYTES[self.dtype]

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that hold `n_tokens` tokens of one request (FULL) or of one picture (EMBED)."""
        return -(-n_tokens // self.block_tokens)
