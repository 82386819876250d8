"""A Llama decoder over a paged cache, for flattened batches of any mix of chunks and decodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.checkpoint import TextConfig
from hydrainfer.models.rope import angles, axes, inverse_frequencies
from hydrainfer.models.slots import Slot, Weight, empty, matrix
from hydrainfer.ops import AttentionBatch, Int8Weight, OpSet


class LayerCache(NamedTuple):
    """The cache of one layer in one step: its `parts` by name, `[n_blocks, *shape]` each, and the batch by its tables.
    Keys and values of every token are the part "kv", [n_blocks, 2, block_tokens, kv_heads, head_dim]."""

    parts: Mapping[str, Tensor]
    batch: AttentionBatch


class LastRows(NamedTuple):
    """The rows whose hidden states are wanted: `rows` [n] int64, and `batch`, the same requests as decodes, by the
    tables of the last layer."""

    rows: Tensor
    batch: AttentionBatch


class DeepRows(NamedTuple):
    """Features that the first layers add: after layer i, `features[:, i]` to `rows`. [n] int64; [n, levels, hidden]."""

    rows: Tensor
    features: Tensor


@dataclass(slots=True)
class LlamaLayer:
    """One block's weights; query-key-value and gate-up fused."""

    input_norm: Tensor
    qkv: Weight
    out: Weight
    mlp_norm: Tensor
    gate_up: Weight
    down: Weight
    qkv_bias: Tensor | None
    out_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out_norm: Tensor | None
    down_norm: Tensor | None

    @classmethod
    def make(cls, c: TextConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> LlamaLayer:
        q, kv, h, m = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.hidden, c.intermediate

        def tensor(*shape: int) -> Tensor:
            return empty(shape, dtype, device)

        def norm(width: int) -> Tensor:
            return empty((width,), norm_dtype(c, dtype), device)

        return cls(
            input_norm=norm(h),
            qkv=matrix(ops, (q + 2 * kv, h), dtype, device),
            out=matrix(ops, (h, q), dtype, device),
            mlp_norm=norm(h),
            gate_up=matrix(ops, (2 * m, h), dtype, device),
            down=matrix(ops, (h, m), dtype, device),
            qkv_bias=tensor(q + 2 * kv) if c.qkv_bias else None,
            out_bias=tensor(h) if c.out_bias else None,
            gate_up_bias=tensor(2 * m) if c.mlp_bias else None,
            down_bias=tensor(h) if c.mlp_bias else None,
            q_norm=norm(c.head_dim) if c.qk_norm else None,
            k_norm=norm(c.head_dim) if c.qk_norm else None,
            out_norm=norm(h) if c.sandwich else None,
            down_norm=norm(h) if c.sandwich else None,
        )

    def slots(self, prefix: str, c: TextConfig) -> dict[str, Slot]:
        q, kv, m = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.intermediate
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        norms = {"input_layernorm": self.input_norm, "post_attention_layernorm": self.mlp_norm}
        if self.out_norm is not None and self.down_norm is not None:
            norms |= {"post_attention_layernorm": self.out_norm, "post_feedforward_layernorm": self.down_norm}
            norms["pre_feedforward_layernorm"] = self.mlp_norm
        if self.q_norm is not None and self.k_norm is not None:
            norms |= {"self_attn.q_norm": self.q_norm, "self_attn.k_norm": self.k_norm}
        found = {f"{prefix}.{name}.weight": Slot(norm, plus=float(c.centred_norms)) for name, norm in norms.items()}
        for leaf, qkv, out, gate_up, down in (
            ("weight", self.qkv, self.out, self.gate_up, self.down),
            ("bias", self.qkv_bias, self.out_bias, self.gate_up_bias, self.down_bias),
        ):
            if qkv is not None:
                for letter, part in zip("qkv", qkv.split([q, kv, kv])):
                    found[f"{attention}.{letter}_proj.{leaf}"] = Slot(part)
            if out is not None:
                found[f"{attention}.o_proj.{leaf}"] = Slot(out)
            if gate_up is not None and down is not None:
                for name, part in zip(("gate", "up"), gate_up.split([m, m])):
                    found[f"{mlp}.{name}_proj.{leaf}"] = Slot(part)
                found[f"{mlp}.down_proj.{leaf}"] = Slot(down)
        return found


class Llama:
    """Embedding table, decoder layers, head. Methods run under `torch.inference_mode` of the caller."""

    def __init__(self, config: TextConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._ops = ops
        self._inverse, self._local_inverse = (
            inverse_frequencies(rope, config.head_dim).to(device) for rope in (config.rope, config.local_rope)
        )
        self._gated = ops.silu_and_mul if config.activation == "silu" else ops.gelu_tanh_and_mul
        same = norm_dtype(config, dtype) == dtype
        self._norm: Callable[[Tensor, Tensor, float], Tensor] = ops.rms_norm if same else _rms_norm_wide
        self._embed_scale = float(torch.tensor(config.embed_scale).to(dtype))
        self._axes = None if config.rope.sections is None else axes(config.rope).to(device)
        whole = config.vocab, config.hidden
        self._dtype = dtype
        self.table = matrix(ops, whole, dtype, device) if config.tied else empty(whole, dtype, device)
        self.layers = [LlamaLayer.make(config, ops, dtype, device) for _ in range(config.layers)]
        self.norm = empty((config.hidden,), norm_dtype(config, dtype), device)
        self.head = self.table if config.tied else matrix(ops, whole, dtype, device)

    def slots(self) -> dict[str, Slot]:
        norm = Slot(self.norm, plus=float(self.config.centred_norms))
        found = {"text.embed_tokens.weight": Slot(self.table), "text.norm.weight": norm}
        if not self.config.tied:
            found["lm_head.weight"] = Slot(self.head)
        for i, layer in enumerate(self.layers):
            found |= layer.slots(f"text.layers.{i}", self.config)
        return found

    def embed(self, ids: Tensor) -> Tensor:
        """int64 [rows] → [rows, hidden], a fresh tensor."""
        table = self.table
        rows = table[ids].wide(self._dtype) if isinstance(table, Int8Weight) else F.embedding(ids, table)
        return rows if self._embed_scale == 1.0 else rows.mul_(self._embed_scale)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        caches: Sequence[LayerCache],
        last: LastRows | None = None,
        deep: DeepRows | None = None,
    ) -> Tensor:
        """Run all layers over `x` [rows, hidden] (overwritten), writing keys and values of every row into `caches`, one
        per layer. `positions` int64 [rows], or [3, rows] of (time, row, column).

        Returns normalised hidden states [rows, hidden]; with `last`, of those rows only, and then the last layer
        computes nothing but keys and values for the others.
        """
        turns = self._turns(positions)
        n_full = len(self.layers) if last is None else len(self.layers) - 1
        for i in range(n_full):
            self._attend(self.layers[i], x, *turns[i], caches[i])
            self._mlp(self.layers[i], x)
            if deep is not None and i < deep.features.shape[1]:
                x.index_add_(0, deep.rows, deep.features[:, i])
        if last is not None:
            x = self._attend_last(self.layers[-1], x, *turns[-1], caches[n_full], last)
            self._mlp(self.layers[-1], x)
        return self._norm(x, self.norm, self.config.norm_eps)

    def _turns(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """cos and sin for each layer; see `angles`."""
        everywhere = angles(self._inverse, positions, self._axes)
        if self.config.local_rope == self.config.rope:
            return [everywhere] * len(self.layers)
        local = angles(self._local_inverse, positions, self._axes)
        return [local if window else everywhere for window in self.config.windows]

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → float32 [rows, vocab]."""
        return self._ops.linear(hidden, self.head).float()

    def _attend(self, layer: LlamaLayer, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache) -> None:
        c, ops, kept = self.config, self._ops, cache.parts["kv"]
        normed = self._norm(x, layer.input_norm, c.norm_eps)
        qkv = ops.linear(normed, layer.qkv, layer.qkv_bias).view(-1, c.heads + 2 * c.kv_heads, c.head_dim)
        self._norm_heads(qkv[:, : c.heads], layer.q_norm)
        self._norm_heads(qkv[:, c.heads : c.heads + c.kv_heads], layer.k_norm)
        ops.rope_write_kv(qkv, cos, sin, kept, cache.batch)
        kv = qkv[:, c.heads :].unflatten(1, (2, c.kv_heads))  # [rows, 2, kv_heads, head_dim]
        mixed = ops.attention(qkv[:, : c.heads], kv, kept, cache.batch, c.attention_scale)
        self._add(x, mixed.flatten(1), layer.out, layer.out_bias, layer.out_norm)

    def _attend_last(
        self,
        layer: LlamaLayer,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        last: LastRows,
    ) -> Tensor:
        """`_attend` for the last layer: keys and values of all rows, queries of the wanted ones. Returns their x."""
        c, ops, kept = self.config, self._ops, cache.parts["kv"]
        q_width = c.heads * c.head_dim
        q_bias, kv_bias = (
            (None, None) if layer.qkv_bias is None else layer.qkv_bias.split([q_width, 2 * c.kv_heads * c.head_dim])
        )
        normed = self._norm(x, layer.input_norm, c.norm_eps)
        kv = ops.linear(normed, layer.qkv[q_width:], kv_bias).view(-1, 2, c.kv_heads, c.head_dim)
        self._norm_heads(kv[:, 0], layer.k_norm)
        ops.rope_write_kv(kv.flatten(1, 2), cos, sin, kept, cache.batch)
        x = x[last.rows]
        if not last.rows.shape[0]:
            return x
        q = ops.linear(normed[last.rows], layer.qkv[:q_width], q_bias).view(-1, c.heads, c.head_dim)
        self._norm_heads(q, layer.q_norm)
        ops.rope(q, cos[last.rows], sin[last.rows])
        mixed = ops.attention(q, kv[last.rows], kept, last.batch, c.attention_scale)
        self._add(x, mixed.flatten(1), layer.out, layer.out_bias, layer.out_norm)
        return x

    def _norm_heads(self, heads: Tensor, weight: Tensor | None) -> None:
        """Normalise [rows, heads, head_dim] in place, each head by itself."""
        if weight is not None:
            flat = heads.reshape(-1, heads.shape[-1])
            heads.copy_(self._norm(flat, weight, self.config.norm_eps).view(heads.shape))

    def _mlp(self, layer: LlamaLayer, x: Tensor) -> None:
        if not x.shape[0]:
            return
        normed = self._norm(x, layer.mlp_norm, self.config.norm_eps)
        gate_up = self._ops.linear(normed, layer.gate_up, layer.gate_up_bias)
        self._add(x, self._gated(gate_up), layer.down, layer.down_bias, layer.down_norm)

    def _add(self, x: Tensor, rows: Tensor, weight: Weight, bias: Tensor | None, norm: Tensor | None) -> None:
        """x += rows @ weight.T + bias in place, normalised first if there is a `norm`."""
        if norm is None:
            self._ops.linear_add(x, rows, weight, bias)
        else:
            x.add_(self._norm(self._ops.linear(rows, weight, bias), norm, self.config.norm_eps))


def norm_dtype(c: TextConfig, dtype: torch.dtype) -> torch.dtype:
    """The type of the weights of norms. One plus a small weight would lose the small part in a short type."""
    return torch.float32 if c.centred_norms else dtype


def _rms_norm_wide(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`ops.rms_norm` with float32 weights, rounded after they are multiplied with, as Gemma's."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
