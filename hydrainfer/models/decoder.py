"""The decoder of all families, over a paged cache, for flattened batches of any mix of chunks and decodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.checkpoint import TextConfig
from hydrainfer.models.layer import LlamaLayer, norm_dtype
from hydrainfer.models.passes import DeepRows, LastRows, LayerCache, Pass, Turn
from hydrainfer.models.per_layer import PerLayerInputs
from hydrainfer.models.rope import angles, axes, inverse_frequencies
from hydrainfer.models.slots import Slot, Weight, empty, matrix
from hydrainfer.ops import (
    KV,
    AttentionBatch,
    Decode,
    Int8Weight,
    OpSet,
    ScanBatch,
    Shortlist,
    norm_heads,
)

_LARGE_HEAD = 32 << 20
"""The size in bytes from which a head's shortlist saves more time than it costs."""


class Run(NamedTuple):
    """Layers `first` .. `stop - 1`, which `decode` computes in one call; a single layer if `decode` is None."""

    first: int
    stop: int
    decode: Decode | None


class Decoder:
    """Embedding table, decoder layers and head. The caller runs the methods under `torch.inference_mode`."""

    def __init__(self, config: TextConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._ops = ops
        local = config.head_dims(window=1)[0]
        ropes = (config.rope, config.head_dim), (config.local_rope, local)
        self._inverse, self._local_inverse = (inverse_frequencies(*rope).to(device) for rope in ropes)
        self._two_turns = ropes[0] != ropes[1]
        self._gated = ops.gelu_tanh_and_mul
        if config.activation == "silu":
            self._gated = ops.silu_and_mul
        self._norm: Callable[[Tensor, Tensor, float], Tensor] = ops.rms_norm
        if norm_dtype(config, dtype) != dtype:
            self._norm = ops.rms_norm_wide
        self._embed_scale = float(torch.tensor(config.embed_scale).to(dtype))
        self._axes: Tensor | None = None
        if config.rope.sections is not None:
            self._axes = axes(config.rope).to(device)
        self._dtype = dtype
        whole = config.vocab, config.hidden
        self.head = matrix(ops, whole, dtype, device)
        self.table = self.head
        if not config.tied:
            self.table = empty(whole, dtype, device)
        self.layers = [LlamaLayer.make(config, i, ops, dtype, device) for i in range(config.layers)]
        self.per_layer: PerLayerInputs | None = None
        if config.per_layer:
            self.per_layer = PerLayerInputs(config, ops, dtype, device)
        self._read = {layer.at for layer in self.layers if layer.at != layer.number}
        self.norm = empty((config.hidden,), norm_dtype(config, dtype), device)
        self.shortlist: Shortlist | None = None
        if ops.likeliest is not None and self.head.nbytes >= _LARGE_HEAD and config.hidden % 32 == 0:
            self.shortlist = Shortlist(whole, device)

    def slots(self) -> dict[str, Slot]:
        norm = Slot(self.norm, plus=float(self.config.centred_norms))
        slots = {"text.embed_tokens.weight": Slot(self.table), "text.norm.weight": norm}
        if not self.config.tied:
            slots["lm_head.weight"] = Slot(self.head)
        if self.per_layer is not None:
            slots |= self.per_layer.slots()
        for i, layer in enumerate(self.layers):
            slots |= layer.slots(f"text.layers.{i}", self.config)
        return slots

    def multiplied(self) -> list[Weight]:
        """The weights that a prompt's rows are multiplied by through `ops`, as they are multiplied. Most rows of the
        last layer need only keys and values, and few rows are multiplied by the head."""
        weights = [weight for layer in self.layers for weight in layer.multiplied()]
        last = self.layers[self.config.n_own - 1]
        if last.mixer is None:
            weights.append(last.qkv[last.widths[0] :])
        return weights

    def loaded(self) -> None:
        """Make the shortlist, once all slots are filled."""
        if self.shortlist is not None and isinstance(self.head, Tensor):
            self.shortlist.take(self.head)

    def embed(self, ids: Tensor) -> Tensor:
        """int64 [rows] → [rows, hidden], a fresh tensor."""
        if isinstance(self.table, Int8Weight):
            rows = self.table[ids].wide(self._dtype)
        else:
            rows = F.embedding(ids, self.table)
        if self._embed_scale != 1.0:
            rows.mul_(self._embed_scale)
        return rows

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        caches: Sequence[LayerCache],
        last: LastRows | None = None,
        deep: DeepRows | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """Run all layers over `x` [rows, hidden] (overwritten), writing keys and values of every row into `caches`, one
        per layer. `positions` int64 [rows], or [3, rows] of (time, row, column). `ids` int64 [rows]: the tokens, for
        models with per-layer embeddings.

        Returns the normalised hidden states [rows, hidden]. With `last` it returns only those rows; the last layer with
        a cache of its own computes only keys and values for the others, and those behind it nothing.
        """
        run = Pass(self._turns(positions), {})
        if self.per_layer is not None:
            assert ids is not None, "a model with per-layer embeddings needs the tokens"
            run.given = self.per_layer.of(x, ids, self._norm)
        if last is None and deep is None and self._few_decodes(x, caches[0].batch):
            self._decode(x, run, caches)
            return self._norm(x, self.norm, self.config.norm_eps)
        n_full = len(self.layers)
        if last is not None:
            n_full = self.config.n_own - 1
        for i in range(n_full):
            self._layer(i, x, run, caches)
            if deep is not None and i < deep.features.shape[1]:
                x.index_add_(0, deep.rows, deep.features[:, i])
        if last is not None:
            x = self._rest(n_full, x, run, caches, last)
        return self._norm(x, self.norm, self.config.norm_eps)

    def _rest(self, first: int, x: Tensor, run: Pass, caches: Sequence[LayerCache], last: LastRows) -> Tensor:
        """The layers from number `first` on, for the wanted rows alone. Returns these rows of `x`."""
        caches[first].wait()
        x = self._attend_last(self.layers[first], x, run, caches[first], last)
        if first + 1 < len(self.layers):
            run.turns = [turn.of(last.rows) for turn in run.turns]
        if run.given is not None:
            run.given = run.given[last.rows]
        self._mlp(self.layers[first], x, run)
        for i, batch in enumerate(last.batches[1:], first + 1):
            if x.shape[0]:
                assert batch is not None
                self._attend(self.layers[i], x, run, caches[i]._replace(batch=batch))
                self._mlp(self.layers[i], x, run)
        return x

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._norm(x, weight, self.config.norm_eps)

    def one_layer(
        self,
        layer: LlamaLayer,
        like: int,
        x: Tensor,
        positions: Tensor,
        cache: LayerCache,
        last: LastRows | None,
        decode: Decode | None = None,
    ) -> Tensor:
        """`forward` through another layer, with attention like that of layer number `like`, without the last norm.
        `decode`: what computes a batch of decodes in one call."""
        run = Pass(self._turns(positions), {})
        turn = run.turns[like]
        cache.wait()
        if decode is not None and self._few_decodes(x, cache.batch):
            assert isinstance(cache.batch, AttentionBatch)
            decode(x, turn.cos, turn.sin, [cache.kv], cache.batch)
            if last is not None:
                x = x[last.rows]
            return x
        if last is None:
            self._attend(layer, x, run, cache)
        else:
            x = self._attend_last(layer, x, run, cache, last)
        self._mlp(layer, x, run)
        return x

    def _turns(self, positions: Tensor) -> list[Turn]:
        """The rotation of each layer."""
        c = self.config
        growth = None
        if c.growth is not None:
            growth = _growth(positions, *c.growth)
        everywhere = Turn(*angles(self._inverse, positions, self._axes, c.rope.scale), growth)
        turns = [everywhere] * len(self.layers)
        if self._two_turns:
            local = Turn(*angles(self._local_inverse, positions, self._axes, c.local_rope.scale), growth)
            turns = [local if window else everywhere for window in c.windows]
        if c.unrotated:
            still = Turn(torch.ones_like(everywhere.cos), torch.zeros_like(everywhere.sin), growth)
            turns = [still if i in c.unrotated else turn for i, turn in enumerate(turns)]
        return turns

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → float32 [rows, vocab]."""
        c = self.config
        logits = self._ops.linear(hidden, self.head).float()
        if c.logit_scale != 1.0:
            logits.mul_(c.logit_scale)
        if c.logit_cap:
            logits.div_(c.logit_cap).tanh_().mul_(c.logit_cap)
        return logits

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
        if not sizes:
            return 0
        return self._ops.decoder_rows(max(sizes))

    def _decode(self, x: Tensor, run: Pass, caches: Sequence[LayerCache]) -> None:
        for some in self._runs:
            if some.decode is None:
                self._layer(some.first, x, run, caches)
                continue
            batch = caches[some.first].batch
            assert isinstance(batch, AttentionBatch)
            turn, kvs = run.turns[some.first], [cache.kv for cache in caches[some.first : some.stop]]
            some.decode(x, turn.cos, turn.sin, kvs, batch)

    @cached_property
    def _runs(self) -> list[Run]:
        """All layers in order: consecutive plain layers with the same window and rotation as one run, every other layer
        as its own run."""
        c, ops = self.config, self._ops
        plain = [layer.plain(c) for layer in self.layers]
        assert ops.decoder is not None

        def kind(i: int) -> Any:
            if plain[i] is None:
                return i  # a run by itself
            return c.windows[i], i in c.unrotated

        runs = []
        for _, run in groupby(range(c.layers), kind):
            members = list(run)
            layers = [layer for i in members if (layer := plain[i]) is not None]
            decode = None
            if layers:
                decode = ops.decoder(layers, c.heads, c.norm_eps, c.attention_scale)
            runs.append(Run(members[0], members[-1] + 1, decode))
        return runs

    def _layer(self, i: int, x: Tensor, run: Pass, caches: Sequence[LayerCache]) -> None:
        caches[i].wait()
        self._attend(self.layers[i], x, run, caches[i])
        self._mlp(self.layers[i], x, run)

    def _attend(self, layer: LlamaLayer, x: Tensor, run: Pass, cache: LayerCache) -> None:
        if layer.mixer is not None:
            return self._add(x, self._mix(layer, x, cache), layer.out, layer.out_bias, layer.out_norm)
        c, ops, turn = self.config, self._ops, run.turns[layer.number]
        normed = self._normed(x, layer.input_norm)
        rows, gate = self._ungated(ops.linear(normed, layer.qkv, layer.qkv_bias))
        if layer.at != layer.number:
            q, fresh = self._queries(rows, layer, turn), run.fresh[layer.at]
        else:
            qk, values = self._heads(rows, layer)
            qk = self._write(layer, qk, values, turn, cache)
            q, fresh = _grown(qk[:, : c.heads], turn), KV(qk[:, c.heads :], values)
            if layer.number in self._read:
                run.fresh[layer.number] = fresh
        mixed = ops.attention(q, fresh, cache.kv, cache.batch, c.attention_scale, layer.sinks, c.attention_cap)
        self._add(x, _gate(mixed, gate), layer.out, layer.out_bias, layer.out_norm)

    def _mix(self, layer: LlamaLayer, x: Tensor, cache: LayerCache) -> Tensor:
        """The mixer's output [rows, its width] for `x` [rows, hidden], in a layer without attention."""
        assert layer.mixer is not None and isinstance(cache.batch, ScanBatch)
        normed = self._normed(x, layer.input_norm)
        return layer.mixer.mix(self._ops.linear(normed, layer.qkv, layer.qkv_bias), cache.parts, cache.batch)

    def _attend_last(
        self,
        layer: LlamaLayer,
        x: Tensor,
        run: Pass,
        cache: LayerCache,
        last: LastRows,
    ) -> Tensor:
        """`_attend` for the last layer with a cache of its own: keys and values of all rows, queries of the wanted
        rows. Returns `x` of those."""
        if layer.mixer is not None:
            mixed, x = self._mix(layer, x, cache)[last.rows], x[last.rows]
            self._add(x, mixed, layer.out, layer.out_bias, layer.out_norm)
            return x
        c, ops, turn = self.config, self._ops, run.turns[layer.number]
        q_width, *kv_widths = layer.widths
        q_bias = kv_bias = None
        if layer.qkv_bias is not None:
            q_bias, kv_bias = layer.qkv_bias.split([q_width, sum(kv_widths)])
        normed = self._normed(x, layer.input_norm)
        keys, values = self._heads(ops.linear(normed, layer.qkv[q_width:], kv_bias), layer)
        keys = self._write(layer, keys, values, turn, cache)
        x = x[last.rows]
        if not last.rows.shape[0]:
            return x
        rows, gate = self._ungated(ops.linear(normed[last.rows], layer.qkv[:q_width], q_bias))
        q, fresh = self._queries(rows, layer, turn.of(last.rows)), KV(keys[last.rows], values[last.rows])
        run.fresh = {at: KV(*(part[last.rows] for part in kv)) for at, kv in run.fresh.items()} | {layer.number: fresh}
        mixed = ops.attention(q, fresh, cache.kv, last.batches[0], c.attention_scale, layer.sinks, c.attention_cap)
        self._add(x, _gate(mixed, gate), layer.out, layer.out_bias, layer.out_norm)
        return x

    def _queries(self, rows: Tensor, layer: LlamaLayer, turn: Turn) -> Tensor:
        """The queries [rows, heads, dim] as they attend, from projected `rows` [rows, width]."""
        c = self.config
        if layer.row_norms is not None:
            rows = self._norm(rows, layer.row_norms[0], c.norm_eps)
        q = rows.unflatten(1, (c.heads, layer.head_dim))
        if layer.head_norms is not None:
            norm_heads(q, layer.head_norms.q, c.norm_eps, self._ops)
        self._ops.rope(q, turn.cos, turn.sin)
        return _grown(q, turn)

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
        if layer.widths[2]:
            values = rows[:, width:]
        else:
            values = rows[:, width - layer.widths[1] :].clone()  # the projected keys
        values = values.unflatten(1, (-1, layer.value_dim))
        if c.value_norm:
            values = F.rms_norm(values.float(), (layer.value_dim,), eps=c.norm_eps).to(values.dtype)
        if c.value_scale != 1.0:
            values.mul_(c.value_scale)
        if layer.row_norms is not None:
            norms, stop = layer.row_norms, width
            for norm in reversed(norms[-1:] if width == layer.widths[1] else norms):
                part = rows[:, stop - norm.shape[0] : stop]
                part.copy_(self._norm(part.contiguous(), norm, c.norm_eps))
                stop -= norm.shape[0]
        return rows[:, :width].unflatten(1, (-1, layer.head_dim)), values

    def _write(self, layer: LlamaLayer, qk: Tensor, values: Tensor, turn: Turn, cache: LayerCache) -> Tensor:
        """The (queries and) keys as they attend, normalised and rotated. Keys and values are written to the cache."""
        ops, norms = self._ops, layer.head_norms
        assert isinstance(cache.batch, AttentionBatch)
        if norms is None:
            ops.rope_write_kv(qk, values, turn.cos, turn.sin, cache.kv, cache.batch)
            return qk
        return ops.norm_rope_write_kv(qk, values, norms, turn.cos, turn.sin, cache.kv, cache.batch, ops)

    def _mlp(self, layer: LlamaLayer, x: Tensor, run: Pass) -> None:
        """The part of a layer behind attention, in place."""
        if not x.shape[0]:
            return
        normed = self._normed(x, layer.mlp_norm)
        if layer.gate_up is None or layer.down is None:
            assert layer.experts is not None
            x.add_(layer.experts.run(normed, self._ops), alpha=self.config.residual_scale)
        else:
            gated = self._gated(self._ops.linear(normed, layer.gate_up, layer.gate_up_bias))
            if layer.beside is None:
                self._add(x, gated, layer.down, layer.down_bias, layer.down_norm)
            else:
                self._add_both(layer, x, self._ops.linear(gated, layer.down, layer.down_bias))
        if layer.per_layer is not None and run.given is not None:
            given = run.given[:, layer.number]
            layer.per_layer.add(x, given, self.config.norm_eps, self._ops, self._norm)
        if layer.scalar is not None:
            x.mul_(layer.scalar)

    def _add_both(self, layer: LlamaLayer, x: Tensor, dense: Tensor) -> None:
        """x += the output of the MLP, `dense`, and that of the experts beside it, in place."""
        assert layer.beside is not None and layer.experts is not None
        dense_norm, norm, out_norm = layer.beside
        routed = layer.experts.beside(x, self._normed(x, norm), self._ops)
        both = self._normed(dense, dense_norm) + self._normed(routed, out_norm)
        x.add_(self._normed(both, layer.down_norm))

    def _add(self, x: Tensor, rows: Tensor, weight: Weight, bias: Tensor | None, norm: Tensor | None) -> None:
        """x += rows @ weight.T + bias in place, normalised first if there is a `norm`, and times `residual_scale`."""
        c = self.config
        if norm is None and c.residual_scale == 1.0:
            self._ops.linear_add(x, rows, weight, bias)
        else:
            x.add_(self._normed(self._ops.linear(rows, weight, bias), norm), alpha=c.residual_scale)

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is None:
            return x
        return self._norm(x, norm, self.config.norm_eps)


def _growth(positions: Tensor, beta: float, n: int) -> Tensor:
    """What queries are multiplied by, [rows, 1, 1] float32."""
    if positions.dim() == 2:
        positions = positions[0]
    return (1 + beta * torch.log(1 + torch.floor(positions / n)))[:, None, None]


def _grown(q: Tensor, turn: Turn) -> Tensor:
    if turn.growth is None:
        return q
    return q * turn.growth.to(q.dtype)


def _gate(mixed: Tensor, gate: Tensor | None) -> Tensor:
    """[rows, heads, dim] → [rows, heads * dim], multiplied by the sigmoid of `gate` if there is one."""
    if gate is not None:
        mixed = mixed * gate.sigmoid()
    return mixed.flatten(1)
