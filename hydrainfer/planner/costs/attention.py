"""Kinds of attention on paper: what each layer keeps of a prompt, and its arithmetic. Also of kinds that HydraInfer
does not serve.

Tokens are counted as a continuum: of n new tokens after a prefix of m, a query sees m + n/2 keys on average, as half of
the new tokens' square is masked and kernels skip it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal

import msgspec

FLOAT32_BYTES = 4
DELTA_FLOPS = 8
"""The operations of the delta rule, per value of the state and token: decay, read, update, read."""


class Attention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag=str.lower):
    """One layer's attention, or what it has in place of it. The MLP is not part of it."""

    @abstractmethod
    def weights(self, hidden: int) -> int:
        """The number of weights in its matrices, without norms and biases."""

    @abstractmethod
    def cache_bytes(self, tokens: int, item_bytes: int) -> int:
        """Bytes that a prompt of `tokens` leaves: keys and values of `item_bytes` each, and states."""

    @abstractmethod
    def flops(self, tokens: int, prefix: int) -> float:
        """FLOPs of `tokens` new tokens after `prefix`, without the products with the weights."""


class Grouped(Attention, frozen=True, kw_only=True):
    """Attention with keys and values per head, which groups of query heads share (GQA). `window`: how many tokens a
    token sees, 0 for all; `gate_dim`: gates of each head. `keys_as_values`: no weights compute values."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0
    gate_dim: int = 0
    keys_as_values: bool = False

    def weights(self, hidden: int) -> int:
        each = self.key_dim + self.value_dim
        saved = self.kv_heads * self.value_dim * self.keys_as_values
        return ((self.heads + self.kv_heads) * each - saved + self.heads * self.gate_dim) * hidden

    def cache_bytes(self, tokens: int, item_bytes: int) -> int:
        kept = min(tokens, self.window) if self.window else tokens
        return self.kv_heads * (self.key_dim + self.value_dim) * kept * item_bytes

    def flops(self, tokens: int, prefix: int) -> float:
        return 2 * self.heads * (self.key_dim + self.value_dim) * n_pairs(tokens, prefix, self.window)


class Latent(Attention, frozen=True, kw_only=True):
    """Multi-head latent attention (MLA, DeepSeek-V2): each token keeps `rank` values that all heads share and a key of
    `rope_dim` with its position. Keys and values of a prefix are expanded again for each chunk. `q_rank`: of the
    queries, 0 if they have no latent.

    With `chosen` (DeepSeek Sparse Attention), a token attends to so many tokens, which an index of `index_heads` heads
    chooses; that keeps `index_dim` more values. Attention then works on the latents, without expanding them.
    """

    heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int = 0
    chosen: int = 0
    index_heads: int = 0
    index_dim: int = 0

    @property
    def _expansion(self) -> int:
        return self.rank * self.heads * (self.nope_dim + self.value_dim)

    def weights(self, hidden: int) -> int:
        queries = self.heads * (self.nope_dim + self.rope_dim)
        n = queries * (self.q_rank or hidden) + self.q_rank * hidden
        n += (self.rank + self.rope_dim) * hidden + self._expansion + self.heads * self.value_dim * hidden
        index = self.q_rank * self.index_heads * self.index_dim + (self.index_dim + self.index_heads) * hidden
        return n + index

    def cache_bytes(self, tokens: int, item_bytes: int) -> int:
        return (self.rank + self.rope_dim + self.index_dim) * tokens * item_bytes

    def flops(self, tokens: int, prefix: int) -> float:
        if not self.chosen:
            pair = 2 * self.heads * (self.nope_dim + self.rope_dim + self.value_dim)
            return pair * n_pairs(tokens, prefix) + 2 * self._expansion * prefix
        pair = 2 * self.heads * (2 * self.rank + self.rope_dim)
        index_pair = 2 * self.index_heads * self.index_dim
        return pair * n_pairs(tokens, prefix, self.chosen) + index_pair * n_pairs(tokens, prefix)


class Compressed(Attention, frozen=True, kw_only=True):
    """Attention over compressed entries (DeepSeek-V4): a token sees the last `window` tokens and one entry for each
    `every` tokens before it; 0 for none. All heads share an entry of `dim` values, which is key and value.

    With `chosen` (CSA), it sees so many entries, which an index of `index_heads` heads with keys of `index_dim`
    chooses, and entries overlap; without (HCA), it sees all. Queries have rank `q_rank`; the output has `o_groups`
    groups of rank `o_rank`.
    """

    heads: int
    dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    every: int = 0
    chosen: int = 0
    index_heads: int = 0
    index_dim: int = 0

    def weights(self, hidden: int) -> int:
        n = self.q_rank * (hidden + self.heads * self.dim) + self.dim * hidden
        n += self.o_rank * (self.heads * self.dim + self.o_groups * hidden)
        if self.every:
            overlap = 2 if self.chosen else 1
            n += 2 * overlap * (self.dim + self.index_dim) * hidden  # an entry's values and their weights in it
        return n + self.index_heads * (self.q_rank * self.index_dim + hidden)

    def cache_bytes(self, tokens: int, item_bytes: int) -> int:
        n = min(tokens, self.window) * self.dim
        if self.every:
            n += tokens // self.every * (self.dim + self.index_dim)
        return n * item_bytes

    def flops(self, tokens: int, prefix: int) -> float:
        n = n_pairs(tokens, prefix, self.window)
        index = 0.0
        if self.every:
            n += n_pairs(tokens, prefix, self.chosen * self.every) / self.every
            index = 2 * self.index_heads * self.index_dim * n_pairs(tokens, prefix) / self.every
        return 4 * self.heads * self.dim * n + index


_SCAN_FLOPS = {"head": DELTA_FLOPS, "channel": DELTA_FLOPS, "fixed": 5}
"""Per value of the state and token. Lightning attention does not read the state before it updates it."""


class Linear(Attention, frozen=True, kw_only=True):
    """Linear attention: a state of `heads` x `key_dim` x `value_dim` in float32 instead of keys and values. Queries and
    keys have `key_heads` heads. A convolution over `conv_width` tokens (0: none) comes before it.

    `decay`: "head", the gated delta rule with a decay per head (Gated DeltaNet); "channel", with one per channel of the
    keys (Kimi Delta Attention), where decays and output gates have rank `rank`; "fixed", no delta rule and constant
    decays (lightning attention). The output has a gate.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    decay: Literal["head", "channel", "fixed"]
    conv_width: int = 0
    rank: int = 0

    @property
    def channels(self) -> int:
        """The number of values in a token's query, key and value."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    def weights(self, hidden: int) -> int:
        values = self.heads * self.value_dim
        n = (self.channels + values) * hidden
        if self.decay == "channel":
            low_rank = self.rank * (2 * hidden + self.heads * self.key_dim + values)
            return n + self.heads * hidden + low_rank
        decays = 2 * self.heads if self.decay == "head" else 0
        return n + (values + decays) * hidden

    def cache_bytes(self, tokens: int, item_bytes: int) -> int:  # noqa: ARG002 - the state has one size
        state = self.heads * self.key_dim * self.value_dim * FLOAT32_BYTES
        return state + max(0, self.conv_width - 1) * self.channels * item_bytes

    def flops(self, tokens: int, prefix: int) -> float:  # noqa: ARG002 - the state holds the prefix
        return _SCAN_FLOPS[self.decay] * math.prod((self.heads, self.key_dim, self.value_dim, tokens))


class Convolution(Attention, frozen=True, kw_only=True):
    """A convolution over `width` tokens between two gates (LFM2), in place of attention."""

    channels: int
    width: int

    def weights(self, hidden: int) -> int:
        return 4 * self.channels * hidden

    def cache_bytes(self, tokens: int, item_bytes: int) -> int:  # noqa: ARG002 - the state has one size
        return (self.width - 1) * self.channels * item_bytes

    def flops(self, tokens: int, prefix: int) -> float:  # noqa: ARG002 - next to none beside the matrices'
        return 0.0


AnyAttention = Grouped | Latent | Compressed | Linear | Convolution


def n_pairs(tokens: int, prefix: int, limit: int = 0) -> float:
    """Pairs of a query and a key that it sees, of `tokens` new tokens after `prefix`; a query sees the last `limit`
    tokens, 0 for all."""
    return _triangle(prefix + tokens, limit) - _triangle(prefix, limit)


def _triangle(tokens: int, limit: int) -> float:
    if not limit or tokens <= limit:
        return tokens * tokens / 2
    return limit * limit / 2 + limit * (tokens - limit)
