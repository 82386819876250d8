"""The compiled CPU kernels of `kernels/cpu`, each with its reference's signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hydrainfer.ops import delta_chunks, reference, torch_variants
from hydrainfer.ops.batch import KV, AttentionBatch, Segments
from hydrainfer.ops.memory import empty_rows
from hydrainfer.ops.scan import DeltaLayer, ScanBatch
from hydrainfer.ops.table import OpSet
from hydrainfer.ops.weights import Decode, ExpertWeights, Int8Weight, PlainLayer, Shortlist

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Kernels:
    """Functions of the compiled module. They compute in float32 with the calling thread's number of torch threads, and
    leave what they do not support to the torch variants."""

    def __init__(self, module: Any, build: str = "") -> None:
        """`build`: a key that changes with the sources, the compiler and the processor."""
        self.build = build
        self._linear = module.linear
        self._linear_int8 = module.linear_int8
        self._linear_many = module.linear_many
        self._widen_int8 = module.widen_int8
        self._attention = module.attention
        self._attention_segments = module.attention_segments
        self._write_kv = module.write_kv
        self._rope = module.rope
        self._rms_norm = module.rms_norm
        self._silu_and_mul = module.silu_and_mul
        self._quick_gelu = module.quick_gelu
        self._gated_delta = module.gated_delta
        self._experts = module.experts
        self._decoder = module.decoder
        self._no_bias = {dtype: torch.empty(0, dtype=dtype) for dtype in _DTYPES}
        self._no_scales = self._no_bias[torch.float32]
        self._no_ends = torch.empty(0, dtype=torch.int32)

    def supports(self, dtype: torch.dtype, head_dim: int) -> bool:
        return dtype in _DTYPES and head_dim % 2 == 0

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A product for few rows, bound by reading each weight once."""
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype)
        self._linear(x.contiguous(), weight, self._no_bias[x.dtype] if bias is None else bias, out, False)
        return out

    def linear_add(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not out.is_contiguous():
            return out.add_(self.linear(x, weight, bias))
        self._linear(x.contiguous(), weight, self._no_bias[x.dtype] if bias is None else bias, out, True)
        return out

    def linear_int8(self, x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
        """A product for few rows. The int8 weights are widened in registers, at no cost beyond reading them."""
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype)
        return self._multiply_int8(out, x, weight, bias, False)

    def linear_int8_add(self, out: Tensor, x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
        if not out.is_contiguous():
            return out.add_(self.linear_int8(x, weight, bias))
        return self._multiply_int8(out, x, weight, bias, True)

    def _multiply_int8(
        self, out: Tensor, x: Tensor, weight: Int8Weight, bias: Tensor | None, accumulate: bool
    ) -> Tensor:
        no_bias = self._no_bias[x.dtype]
        self._linear_int8(
            x.contiguous(), weight.values, weight.scales, no_bias if bias is None else bias, out, accumulate
        )
        return out

    def linear_many(self, x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None = None) -> Tensor:
        """A product for many rows, bound by arithmetic. Each row of the result is independent of the other rows."""
        out = empty_rows((x.shape[0], weight.shape[0]), x.dtype)
        return self._multiply_many(out, x, weight, bias, False)

    def linear_many_add(
        self, out: Tensor, x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None = None
    ) -> Tensor:
        if not out.is_contiguous():
            return out.add_(self.linear_many(x, weight, bias))
        return self._multiply_many(out, x, weight, bias, True)

    def _multiply_many(
        self, out: Tensor, x: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None, accumulate: bool
    ) -> Tensor:
        values, scales = (weight, self._no_scales) if isinstance(weight, Tensor) else (weight.values, weight.scales)
        rows = x if x.stride(1) == 1 else x.contiguous()
        self._linear_many(rows, values, scales, self._no_bias[x.dtype] if bias is None else bias, out, accumulate)
        return out

    def likeliest(self, x: Tensor, head: Tensor, shortlist: Shortlist) -> Tensor:
        """[rows, hidden] → int64 [rows]: `linear(x, head).argmax(-1)`, for few rows. The shortlist leaves a few tokens
        that can have the largest logit; only these are multiplied by the head itself."""
        wide = x.float()
        logits = self.linear_int8(wide, shortlist.narrow)
        off = wide.norm(dim=1, keepdim=True) * shortlist.errors
        least = (logits - off).amax(1, keepdim=True)
        ids = (logits.add_(off) >= least).any(0).nonzero()[:, 0]
        if not least.isfinite().all() or len(ids) > head.shape[0] // 8:
            return self.linear(x, head).argmax(-1)
        return ids[self.linear(x, head[ids]).argmax(-1)]

    def widen_int8(self, weight: Int8Weight, dtype: torch.dtype) -> Tensor:
        """The weight [out, in], widened to `dtype`."""
        out = torch.empty(weight.shape, dtype=dtype)
        self._widen_int8(weight.values, weight.scales, out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not x.is_contiguous():
            return torch_variants.rms_norm_torch(x, weight, eps)
        out = empty_rows(x.shape, x.dtype)
        self._rms_norm(x, weight, out, eps)
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        if not gate_up.is_contiguous():
            return reference.silu_and_mul(gate_up)
        out = empty_rows((gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)
        self._silu_and_mul(gate_up, out)
        return out

    def quick_gelu(self, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            return reference.quick_gelu(x)
        self._quick_gelu(x)
        return x

    def rope(self, qk: Tensor, cos: Tensor, sin: Tensor) -> None:
        self._rope(qk, cos, sin)

    def prepare(self, batch: AttentionBatch) -> None:
        """Compute the last token that each row sees, if tokens of pictures see tokens after themselves."""
        if batch.spans:
            batch.plan = _ends(batch)

    def rope_write_kv(
        self, qk: Tensor, values: Tensor, cos: Tensor, sin: Tensor, cache: KV, batch: AttentionBatch
    ) -> None:
        self._rope(qk, cos, sin)
        self._write_kv(qk[:, -values.shape[1] :], values, cache.keys, cache.values, batch.slots)

    def attention(
        self,
        q: Tensor,
        _fresh: KV,
        cache: KV,
        batch: AttentionBatch,
        scale: float,
        sinks: Tensor | None = None,
        cap: float = 0.0,
    ) -> Tensor:
        """Attention that reads all keys and values from the cache, this batch's included."""
        out = empty_rows((*q.shape[:2], cache.values.shape[3]), q.dtype)
        ends = batch.plan if batch.spans else self._no_ends
        sinks = self._no_bias[torch.float32] if sinks is None else sinks
        requests = batch.tables, batch.lengths, batch.starts
        self._attention(q, *cache, *requests, ends, sinks, batch.n_decodes, batch.window, out, scale, cap)
        return out

    def gated_delta(
        self,
        qkv: Tensor,
        gate: Tensor,
        beta: Tensor,
        step: Tensor,
        layer: DeltaLayer,
        tails: Tensor,
        states: Tensor,
        batch: ScanBatch,
    ) -> Tensor:
        """Decodes take one kernel call, which reads and writes their states once. Chunks use the matrix form."""
        out, n = torch.empty(gate.shape, dtype=gate.dtype), batch.n_decodes
        for wave in batch.waves:
            kept = tails, states, batch.sources[wave], batch.targets[wave]
            rows = (part[wave] for part in (qkv, gate, beta, step))
            self._gated_delta(*rows, *layer[:-1], *kept, out[wave], layer.eps)
        if batch.pieces:
            qkv, gate, beta, step = (part[n:] for part in (qkv, gate, beta, step))
            rule, norm = delta_chunks.delta_rule, self.rms_norm
            out[n:] = reference.gated_delta(qkv, gate, beta, step, layer, tails, states, batch.chunks, rule, norm)
        return out

    def experts(self, out: Tensor, x: Tensor, weights: Tensor, chosen: Tensor, e: ExpertWeights, ops: OpSet) -> Tensor:
        """All experts in one call; each multiplies as `linear` does. Int8 weights and GELU go to the reference."""
        if not isinstance(e.gate_up, Tensor) or not isinstance(e.down, Tensor) or e.gelu:
            return reference.experts(out, x, weights, chosen, e, ops)
        none = self._no_bias[x.dtype]
        biases = (none if bias is None else bias for bias in (e.gate_up_bias, e.down_bias))
        rows = x.contiguous(), chosen.contiguous(), weights.contiguous()
        self._experts(*rows, e.gate_up, e.down, *biases, out, e.limit, e.alpha)
        return out

    def decoder(self, layers: Sequence[PlainLayer], heads: int, eps: float, scale: float) -> Decode:
        """A function that computes all `layers` in one call and one parallel region. The layers' matrices must have the
        same shapes, and so must their caches. The results are bit-identical to those of one call per operator. `eps`:
        of norms; `scale`: of attention."""

        def tensors(layer: PlainLayer) -> list[Tensor | None]:
            found: list[Tensor | None] = [*layer[:5]]
            for weight, bias in zip(layer[5::2], layer[6::2]):
                found += [weight, None, bias] if isinstance(weight, Tensor) else [weight.values, weight.scales, bias]
            return found

        call = self._decoder([tensors(layer) for layer in layers], heads, eps, scale)

        def decode(x: Tensor, cos: Tensor, sin: Tensor, caches: Sequence[KV], batch: AttentionBatch) -> None:
            kept = [part for cache in caches for part in cache]
            call(x, cos, sin, kept, batch.tables, batch.lengths, batch.slots, batch.window, batch.shares)

        return decode

    def attention_segments(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        if q.shape[-1] % 2:
            return torch_variants.attention_segments_sdpa(q, k, v, segments, scale)
        out = torch.empty(q.shape, dtype=q.dtype)
        self._attention_segments(q, k, v, segments.starts, out, scale)
        return out


def _ends(batch: AttentionBatch) -> Tensor:
    """The last token of its request that each row sees, int32 [rows]."""
    ends = [context + i for context, count in zip(batch.contexts, batch.counts) for i in range(count)]
    starts = batch.starts.tolist()
    for request, first, stop in batch.spans:
        row = starts[request] + first - batch.contexts[request]
        ends[row : row + stop - first] = [stop - 1] * (stop - first)
    return torch.tensor(ends, dtype=torch.int32)
