"""The decoder of all families, over a paged cache, for flattened batches of any mix of chunks and decodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.checkpoint import TextConfig
from hydrainfer.models.mixers import Mixer, mixer_of
from hydrainfer.models.moe import Moe
from hydrainfer.models.rope import angles, axes, inverse_frequencies
from hydrainfer.models.slots import Slot, Weight, empty, matrix
from hydrainfer.ops import (
    KV,
    AttentionBatch,
    Decode,
    HeadNorms,
    Int8Weight,
    OpSet,
    PlainLayer,
    ScanBatch,
    Shortlist,
    norm_heads,
)

_LARGE_HEAD = 32 << 20
"""The size in bytes from which a head's shortlist saves more time than it costs."""


class LayerCache(NamedTuple):
    """One layer's cache in one step: its tensors `parts` by name, `[n_blocks, *shape]` each, and the batch with this
    cache's block tables."""

    parts: Mapping[str, Tensor]
    batch: AttentionBatch | ScanBatch

    @property
    def kv(self) -> KV:
        """Keys and values of every token."""
        return KV(self.parts["keys"], self.parts["values"])


class LastRows(NamedTuple):
    """The rows whose hidden states are wanted, `rows` [n] int64. `batch`: their requests as decodes, with the block
    tables of the last layer; None if that layer has no attention."""

    rows: Tensor
    batch: AttentionBatch | None


class DeepRows(NamedTuple):
    """Visual features for the first layers: `features[:, i]` is added to `rows` after layer i. `rows` [n] int64,
    `features` [n, levels, hidden]."""

    rows: Tensor
    features: Tensor


class Run(NamedTuple):
    """Layers `first` .. `stop - 1`, which `decode` computes in one call; a single layer if `decode` is None."""

    first: int
    stop: int
    decode: Decode | None


@dataclass(slots=True)
class LlamaLayer:
    """One layer's weights. The query, key and value projections are fused, and so are gate and up. A layer with experts
    has no MLP. If a `mixer` replaces attention, `qkv` and `out` are the matrices before and after it."""

    mixer: Mixer | None
    input_norm: Tensor
    qkv: Weight
    out: Weight
    mlp_norm: Tensor
    gate_up: Weight | None
    down: Weight | None
    qkv_bias: Tensor | None
    out_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    head_norms: HeadNorms | None
    out_norm: Tensor | None
    down_norm: Tensor | None
    sinks: Tensor | None
    experts: Moe | None
    widths: tuple[int, int, int]
    """The widths of the parts of a `qkv` row: queries with their gates, keys, and values."""

    @classmethod
    def make(cls, c: TextConfig, i: int, ops: OpSet, dtype: torch.dtype, device: torch.device) -> LlamaLayer:
        """The empty weights of layer number `i`."""
        heads, kv_heads, h, m = c.heads, c.kv_heads_of(c.windows[i]), c.hidden, c.intermediate
        q, k, v = widths = heads * (c.head_dim + c.gate_dim), kv_heads * c.head_dim, kv_heads * c.value_dim
        into, out, into_bias, out_bias = q + k + v, heads * c.value_dim, c.qkv_bias, c.out_bias
        mixer = mixer_of(c, i, ops, dtype, device)
        if mixer is not None:
            into, out, into_bias, out_bias = mixer.in_width, mixer.out_width, mixer.bias, mixer.bias
        qk_norm, dense = c.qk_norm and mixer is None, not c.has_experts(i)

        def tensor(*shape: int) -> Tensor:
            return empty(shape, dtype, device)

        def norm(width: int) -> Tensor:
            return empty((width,), norm_dtype(c, dtype), device)

        return cls(
            mixer=mixer,
            input_norm=norm(h),
            qkv=matrix(ops, (into, h), dtype, device),
            out=matrix(ops, (h, out), dtype, device),
            mlp_norm=norm(h),
            gate_up=matrix(ops, (2 * m, h), dtype, device) if dense else None,
            down=matrix(ops, (h, m), dtype, device) if dense else None,
            qkv_bias=tensor(into) if into_bias else None,
            out_bias=tensor(h) if out_bias else None,
            gate_up_bias=tensor(2 * m) if c.mlp_bias and dense else None,
            down_bias=tensor(h) if c.mlp_bias and dense else None,
            head_norms=HeadNorms(norm(c.head_dim), norm(c.head_dim), c.norm_eps) if qk_norm else None,
            out_norm=norm(h) if c.sandwich else None,
            down_norm=norm(h) if c.sandwich else None,
            sinks=empty((heads,), torch.float32, device) if c.has_sinks(i) else None,
            experts=Moe.make(c.experts, h, ops, dtype, device) if c.experts and not dense else None,
            widths=widths,
        )

    def plain(self, c: TextConfig) -> PlainLayer | None:
        """This layer as `OpSet.decoder` takes it; None if it has a part that `PlainLayer` lacks."""
        if self.mixer is not None or self.gate_up is None or self.down is None or self.out_norm is not None:
            return None
        if c.gate_dim or c.centred_norms or c.value_scale != 1.0 or c.activation != "silu":
            return None
        q_norm, k_norm = (None, None) if self.head_norms is None else self.head_norms[:2]
        norms = self.input_norm, self.mlp_norm, q_norm, k_norm, self.sinks
        mlp = self.gate_up, self.gate_up_bias, self.down, self.down_bias
        return PlainLayer(*norms, self.qkv, self.qkv_bias, self.out, self.out_bias, *mlp)

    def multiplied(self) -> list[Weight]:
        found = [weight for weight in (self.qkv, self.out, self.gate_up, self.down) if weight is not None]
        return found if self.experts is None else found + self.experts.multiplied()

    def slots(self, prefix: str, c: TextConfig) -> dict[str, Slot]:
        m, attention, mlp = c.intermediate, f"{prefix}.self_attn", f"{prefix}.mlp"
        norms = {"input_layernorm": self.input_norm, "post_attention_layernorm": self.mlp_norm}
        if self.out_norm is not None and self.down_norm is not None:
            norms |= {"post_attention_layernorm": self.out_norm, "post_feedforward_layernorm": self.down_norm}
            norms["pre_feedforward_layernorm"] = self.mlp_norm
        if self.head_norms is not None:
            norms |= {"self_attn.q_norm": self.head_norms.q, "self_attn.k_norm": self.head_norms.k}
        found = {f"{prefix}.{name}.weight": Slot(norm, plus=float(c.centred_norms)) for name, norm in norms.items()}
        for leaf, qkv, out, gate_up, down in (
            ("weight", self.qkv, self.out, self.gate_up, self.down),
            ("bias", self.qkv_bias, self.out_bias, self.gate_up_bias, self.down_bias),
        ):
            if self.mixer is not None and qkv is not None and out is not None:
                found |= {f"{prefix}.{name}.{leaf}": Slot(part) for name, part in self.mixer.around(qkv, out).items()}
                qkv = out = None
            if qkv is not None:
                parts = dict(zip("qkv", qkv.split(self.widths)))
                if c.gate_dim == 1:
                    parts["g"], parts["q"] = parts["q"].split([c.heads, c.heads * c.head_dim])
                for letter, part in parts.items():
                    found[f"{attention}.{letter}_proj.{leaf}"] = Slot(part)
            if out is not None:
                found[f"{attention}.o_proj.{leaf}"] = Slot(out)
            if gate_up is not None and down is not None:
                for name, part in zip(("gate", "up"), gate_up.split([m, m])):
                    found[f"{mlp}.{name}_proj.{leaf}"] = Slot(part)
                found[f"{mlp}.down_proj.{leaf}"] = Slot(down)
        if self.sinks is not None:
            found[f"{attention}.sinks"] = Slot(self.sinks)
        if self.mixer is not None:
            found |= self.mixer.slots(prefix)
        return found if self.experts is None else found | self.experts.slots(mlp)


class Decoder:
    """Embedding table, decoder layers and head. The caller runs the methods under `torch.inference_mode`."""

    def __init__(self, config: TextConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._ops = ops
        self._inverse, self._local_inverse = (
            inverse_frequencies(rope, config.head_dim).to(device) for rope in (config.rope, config.local_rope)
        )
        self._gated = ops.silu_and_mul if config.activation == "silu" else ops.gelu_tanh_and_mul
        same = norm_dtype(config, dtype) == dtype
        self._norm: Callable[[Tensor, Tensor, float], Tensor] = ops.rms_norm if same else ops.rms_norm_wide
        self._embed_scale = float(torch.tensor(config.embed_scale).to(dtype))
        self._axes = None if config.rope.sections is None else axes(config.rope).to(device)
        whole = config.vocab, config.hidden
        self._dtype = dtype
        self.table = matrix(ops, whole, dtype, device) if config.tied else empty(whole, dtype, device)
        self.layers = [LlamaLayer.make(config, i, ops, dtype, device) for i in range(config.layers)]
        self.norm = empty((config.hidden,), norm_dtype(config, dtype), device)
        self.head = self.table if config.tied else matrix(ops, whole, dtype, device)
        short = ops.likeliest is not None and self.head.nbytes >= _LARGE_HEAD and config.hidden % 32 == 0
        self.shortlist = Shortlist(whole, device) if short else None

    def slots(self) -> dict[str, Slot]:
        norm = Slot(self.norm, plus=float(self.config.centred_norms))
        found = {"text.embed_tokens.weight": Slot(self.table), "text.norm.weight": norm}
        if not self.config.tied:
            found["lm_head.weight"] = Slot(self.head)
        for i, layer in enumerate(self.layers):
            found |= layer.slots(f"text.layers.{i}", self.config)
        return found

    def multiplied(self) -> list[Weight]:
        """The weights that a prompt's rows are multiplied by through `ops`, as they are multiplied. Most rows of the
        last layer need only keys and values, and few rows are multiplied by the head."""
        last = self.layers[-1]
        rest = [last.qkv[last.widths[0] :]] if last.mixer is None else []
        return [weight for layer in self.layers for weight in layer.multiplied()] + rest

    def loaded(self) -> None:
        """Make the shortlist, once all slots are filled."""
        if self.shortlist is not None and isinstance(self.head, Tensor):
            self.shortlist.take(self.head)

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

        Returns the normalised hidden states [rows, hidden]. With `last` it returns only those rows, and the last layer
        computes only keys and values for the others.
        """
        turns = self._turns(positions)
        if last is None and deep is None and self._few_decodes(x, caches[0].batch):
            self._decode(x, turns, caches)
            return self._norm(x, self.norm, self.config.norm_eps)
        n_full = len(self.layers) if last is None else len(self.layers) - 1
        for i in range(n_full):
            self._layer(i, x, turns, caches)
            if deep is not None and i < deep.features.shape[1]:
                x.index_add_(0, deep.rows, deep.features[:, i])
        if last is not None:
            x = self._attend_last(self.layers[-1], x, *turns[-1], caches[n_full], last)
            self._mlp(self.layers[-1], x)
        return self._norm(x, self.norm, self.config.norm_eps)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._norm(x, weight, self.config.norm_eps)

    def one_layer(
        self, layer: LlamaLayer, like: int, x: Tensor, positions: Tensor, cache: LayerCache, last: LastRows | None
    ) -> Tensor:
        """`forward` through another layer, with attention like that of layer number `like`, without the last norm."""
        turns = self._turns(positions)[like]
        if last is None:
            self._attend(layer, x, *turns, cache)
        else:
            x = self._attend_last(layer, x, *turns, cache, last)
        self._mlp(layer, x)
        return x

    def _turns(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The cos and sin of each layer; see `angles`."""
        c = self.config
        everywhere = angles(self._inverse, positions, self._axes, c.rope.scale)
        if c.local_rope == c.rope:
            return [everywhere] * len(self.layers)
        local = angles(self._local_inverse, positions, self._axes, c.local_rope.scale)
        return [local if window else everywhere for window in c.windows]

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → float32 [rows, vocab]."""
        return self._ops.linear(hidden, self.head).float()

    def likeliest(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → int64 [rows], each row's token with the largest logit."""
        find, head, shortlist = self._ops.likeliest, self.head, self.shortlist
        few = hidden.shape[0] <= self._ops.likeliest_rows
        if find is not None and isinstance(head, Tensor) and shortlist is not None and few:
            return find(hidden, head, shortlist)
        return self.logits(hidden).argmax(-1)

    def _few_decodes(self, x: Tensor, batch: AttentionBatch | ScanBatch) -> bool:
        rows = x.shape[0]
        return rows == batch.n_decodes and 0 < rows <= self.few_rows and x.is_contiguous()

    @cached_property
    def few_rows(self) -> int:
        """The number of decodes up to which compiled code computes whole layers, each row as if it were alone; 0 if
        there is no such code."""
        if self._ops.decoder is None:
            return 0
        plain = (layer.plain(self.config) for layer in self.layers)
        sizes = [sum(weight.numel() for weight in layer[5::2]) for layer in plain if layer is not None]
        return self._ops.decoder_rows(max(sizes)) if sizes else 0

    def _decode(self, x: Tensor, turns: Sequence[tuple[Tensor, Tensor]], caches: Sequence[LayerCache]) -> None:
        for run in self._runs:
            if run.decode is None:
                self._layer(run.first, x, turns, caches)
                continue
            batch = caches[run.first].batch
            assert isinstance(batch, AttentionBatch)
            run.decode(x, *turns[run.first], [cache.kv for cache in caches[run.first : run.stop]], batch)

    @cached_property
    def _runs(self) -> list[Run]:
        """All layers in order: consecutive plain layers with the same window as one run, every other layer as its own
        run."""
        c, ops, found = self.config, self._ops, []
        plain = [layer.plain(c) for layer in self.layers]
        assert ops.decoder is not None
        for _, run in groupby(range(c.layers), lambda i: ~i if plain[i] is None else c.windows[i]):
            members = list(run)
            taken = [one for i in members if (one := plain[i]) is not None]
            call = ops.decoder(taken, c.heads, c.norm_eps, c.attention_scale) if taken else None
            found.append(Run(members[0], members[-1] + 1, call))
        return found

    def _layer(self, i: int, x: Tensor, turns: Sequence[tuple[Tensor, Tensor]], caches: Sequence[LayerCache]) -> None:
        self._attend(self.layers[i], x, *turns[i], caches[i])
        self._mlp(self.layers[i], x)

    def _attend(self, layer: LlamaLayer, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache) -> None:
        if layer.mixer is not None:
            return self._add(x, self._mix(layer, x, cache), layer.out, layer.out_bias, layer.out_norm)
        c, ops = self.config, self._ops
        normed = self._norm(x, layer.input_norm, c.norm_eps)
        rows, gate = self._ungated(ops.linear(normed, layer.qkv, layer.qkv_bias))
        qk, values = self._heads(rows, layer)
        qk = self._write(layer, qk, values, cos, sin, cache)
        q, keys = qk[:, : c.heads], qk[:, c.heads :]
        mixed = ops.attention(q, KV(keys, values), cache.kv, cache.batch, c.attention_scale, layer.sinks)
        self._add(x, _gate(mixed, gate), layer.out, layer.out_bias, layer.out_norm)

    def _mix(self, layer: LlamaLayer, x: Tensor, cache: LayerCache) -> Tensor:
        """The mixer's output [rows, its width] for `x` [rows, hidden], in a layer without attention."""
        assert layer.mixer is not None and isinstance(cache.batch, ScanBatch)
        normed = self._norm(x, layer.input_norm, self.config.norm_eps)
        return layer.mixer.mix(self._ops.linear(normed, layer.qkv, layer.qkv_bias), cache.parts, cache.batch)

    def _attend_last(
        self,
        layer: LlamaLayer,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        last: LastRows,
    ) -> Tensor:
        """`_attend` for the last layer: keys and values of all rows, queries of the wanted rows. Returns `x` of
        those."""
        if layer.mixer is not None:
            mixed, x = self._mix(layer, x, cache)[last.rows], x[last.rows]
            self._add(x, mixed, layer.out, layer.out_bias, layer.out_norm)
            return x
        c, ops = self.config, self._ops
        q_width, *kv_widths = layer.widths
        q_bias, kv_bias = (None, None) if layer.qkv_bias is None else layer.qkv_bias.split([q_width, sum(kv_widths)])
        normed = self._norm(x, layer.input_norm, c.norm_eps)
        keys, values = self._heads(ops.linear(normed, layer.qkv[q_width:], kv_bias), layer)
        keys = self._write(layer, keys, values, cos, sin, cache)
        x = x[last.rows]
        if not last.rows.shape[0]:
            return x
        rows, gate = self._ungated(ops.linear(normed[last.rows], layer.qkv[:q_width], q_bias))
        q = rows.unflatten(1, (c.heads, c.head_dim))
        if layer.head_norms is not None:
            norm_heads(q, layer.head_norms.q, c.norm_eps, ops)
        ops.rope(q, cos[last.rows], sin[last.rows])
        fresh = KV(keys[last.rows], values[last.rows])
        mixed = ops.attention(q, fresh, cache.kv, last.batch, c.attention_scale, layer.sinks)
        self._add(x, _gate(mixed, gate), layer.out, layer.out_bias, layer.out_norm)
        return x

    def _ungated(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """`rows` without gates, which then begin with the queries, and the gates [rows, heads, gate_dim] or None. One
        gate per head stands before all queries; wider gates stand behind the queries of their head."""
        c = self.config
        if not c.gate_dim:
            return rows, None
        if c.gate_dim == 1:
            return rows[:, c.heads :], rows[:, : c.heads, None]
        width = 2 * c.heads * c.head_dim
        q, gate = rows[:, :width].unflatten(1, (c.heads, 2, c.head_dim)).unbind(2)
        return torch.cat([q.flatten(1), rows[:, width:]], 1), gate

    def _heads(self, rows: Tensor, layer: LlamaLayer) -> tuple[Tensor, Tensor]:
        """The (queries and) keys, and the values, of `rows` [rows, width]: two views [rows, heads, dim]."""
        c, width = self.config, rows.shape[1] - layer.widths[2]
        values = rows[:, width:].unflatten(1, (-1, c.value_dim))
        if c.value_scale != 1.0:
            values.mul_(c.value_scale)
        return rows[:, :width].unflatten(1, (-1, c.head_dim)), values

    def _write(
        self, layer: LlamaLayer, qk: Tensor, values: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache
    ) -> Tensor:
        """The (queries and) keys as they attend, normalised and rotated. Keys and values are written to the cache."""
        ops, norms = self._ops, layer.head_norms
        assert isinstance(cache.batch, AttentionBatch)
        if norms is None:
            ops.rope_write_kv(qk, values, cos, sin, cache.kv, cache.batch)
            return qk
        return ops.norm_rope_write_kv(qk, values, norms, cos, sin, cache.kv, cache.batch, ops)

    def _mlp(self, layer: LlamaLayer, x: Tensor) -> None:
        if not x.shape[0]:
            return
        normed = self._norm(x, layer.mlp_norm, self.config.norm_eps)
        if layer.experts is not None:
            x.add_(layer.experts.run(normed, self._ops))
            return
        assert layer.gate_up is not None and layer.down is not None
        gate_up = self._ops.linear(normed, layer.gate_up, layer.gate_up_bias)
        self._add(x, self._gated(gate_up), layer.down, layer.down_bias, layer.down_norm)

    def _add(self, x: Tensor, rows: Tensor, weight: Weight, bias: Tensor | None, norm: Tensor | None) -> None:
        """x += rows @ weight.T + bias in place, normalised first if there is a `norm`."""
        if norm is None:
            self._ops.linear_add(x, rows, weight, bias)
        else:
            x.add_(self._norm(self._ops.linear(rows, weight, bias), norm, self.config.norm_eps))


def _gate(mixed: Tensor, gate: Tensor | None) -> Tensor:
    """[rows, heads, dim] → [rows, heads * dim], multiplied by the sigmoid of `gate` if there is one."""
    return (mixed if gate is None else mixed * gate.sigmoid()).flatten(1)


def norm_dtype(c: TextConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of norm weights. It is float32 where they are one plus a small weight, which 16 bits would round
    off."""
    return torch.float32 if c.centred_norms else dtype
