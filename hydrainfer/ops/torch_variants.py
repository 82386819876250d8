"""Faster torch expressions of some operators, no compiler needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.ops import reference
from hydrainfer.ops.batch import KV, AttentionBatch, Segments
from hydrainfer.ops.table import OpSet
from hydrainfer.ops.weights import ExpertWeights


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm` by torch's own operator, which computes in float32 too."""
    return F.rms_norm(x, weight.shape, weight, eps)


def prepare(batch: AttentionBatch) -> None:
    """Make the tiles and masks that `chunk_attention` uses."""
    batch.tiles()


def chunk_attention(
    q: Tensor,
    fresh: KV,
    cache: KV,
    batch: AttentionBatch,
    scale: float,
    sinks: Tensor | None,
    cap: float,
    out: Tensor,
) -> None:
    """Attention of the requests after the decodes, by scaled-dot-product calls, written into `out`.

    A whole prompt attends to its fresh keys; a chunk with context first gathers the blocks that it sees. Queries are
    computed in tiles (see `AttentionBatch.tiles`), because torch's causal kernel on a CPU computes much of the masked
    half.
    """
    attend: Callable[..., Tensor] = _attend_sdpa
    if sinks is not None or cap:
        attend = partial(_attend_in_full, sinks=sinks, cap=cap)
    for i, tiles in enumerate(batch.tiles(), batch.n_decodes):
        stop, seen_from = batch.contexts[i] + batch.counts[i], tiles[0].low
        if batch.contexts[i] == 0:
            rows = slice(tiles[0].rows.start, tiles[-1].rows.stop)
            found = KV(fresh.keys[rows], fresh.values[rows])
        else:
            found = reference.gather_kv(cache, batch.tables[i], stop, seen_from)
        for rows, low, high, mask in tiles:
            seen = slice(low - seen_from, high - seen_from)
            keys, values = (x[seen].transpose(0, 1)[None] for x in found)  # [1, kv_heads, length, dim]
            queries = q[rows].transpose(0, 1)[None]
            out[rows] = attend(queries, keys, values, mask, scale)[0].transpose(0, 1)


def _attend_sdpa(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of q [n, heads, rows, dim] over keys and values [n, kv_heads, length, dim]. `mask` [rows, length];
    None: causal."""
    group = q.shape[1] // keys.shape[1]
    if group > 1 and mask is not None and q.device.type == "cuda":  # fused kernels take no mask with GQA
        keys, values, group = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), 1
    return F.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=group > 1
    )


def _attend_in_full(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None, cap: float
) -> Tensor:
    """`_attend_sdpa` with `sinks` [heads] or a cap of scores, written out because torch's own attention has none."""
    if mask is None:
        mask = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool, device=q.device).tril()
    grouped = q.unflatten(1, (keys.shape[1], -1))  # [n, kv_heads, group, rows, dim]
    scores = reference.capped((grouped.float() @ keys[:, :, None].float().mT).mul_(scale), cap)
    scores.masked_fill_(~mask, float("-inf"))
    weights = reference.softmax(scores, None if sinks is None else sinks.view(keys.shape[1], -1, 1, 1))
    return (weights @ values[:, :, None].float()).flatten(1, 2).to(q.dtype)


def attention_sdpa(
    q: Tensor,
    fresh: KV,
    cache: KV,
    batch: AttentionBatch,
    scale: float,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """`reference.attention` by scaled-dot-product calls. The blocks of decodes are gathered into one padded batch."""
    out = torch.empty((*q.shape[:2], cache.values.shape[3]), dtype=q.dtype, device=q.device)
    chunk_attention(q, fresh, cache, batch, scale, sinks, cap, out)
    n = batch.n_decodes
    if n:
        length = max(batch.contexts[:n]) + 1
        blocks = batch.tables[:n, : -(-length // batch.block_tokens)].long()
        keys, values = (part[blocks].flatten(1, 2).transpose(1, 2) for part in cache)  # [n, kv_heads, length, dim]
        places, lengths = torch.arange(keys.shape[2], device=q.device)[None], batch.lengths[:n, None]
        visible = places < lengths
        if batch.window:
            visible &= places >= lengths - batch.window
        mask = visible[:, None, None]
        if sinks is not None or cap:
            out[:n] = _attend_in_full(q[:n, :, None], keys, values, mask[:, None], scale, sinks, cap)[:, :, 0]
            return out
        grouped = q[:n].unflatten(1, (keys.shape[1], -1))  # [n, kv_heads, group, dim]: a group's heads are rows
        out[:n] = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale).flatten(1, 2)
    return out


def attention_segments_sdpa(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    """`reference.attention_segments` with one call per segment length."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for rows, n, length in segments.groups:
        queries, keys, values = (x[rows].unflatten(0, (n, length)).transpose(1, 2) for x in (q, k, v))
        # each [n, heads, length, dim]
        out[rows] = F.scaled_dot_product_attention(queries, keys, values, scale=scale).transpose(1, 2).flatten(0, 1)
    return out


def attention_segments_varlen(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    """`reference.attention_segments` with one call for all segments, by torch's FlashAttention (CUDA, 16 bits). The
    call reads the segments' bounds on the device, so a CUDA graph may replay it for other segments: as many, none
    longer than `segments.longest`."""
    from torch.nn.attention.varlen import varlen_attn

    if not takes_varlen(q.shape[-1]):
        return attention_segments_sdpa(q, k, v, segments, scale)
    starts, longest = segments.starts, segments.longest
    found = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale)
    assert isinstance(found, Tensor)  # a tuple only if more is asked for
    return found


def takes_varlen(head_dim: int) -> bool:
    return head_dim % 8 == 0 and head_dim <= 256


def has_flash_attention(device: torch.device) -> bool:
    """Whether torch's FlashAttention computes on this CUDA device."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def experts_grouped(out: Tensor, x: Tensor, weights: Tensor, chosen: Tensor, e: ExpertWeights, ops: OpSet) -> Tensor:
    """`reference.experts` by grouped matrix products, which read on the device where each expert's rows end. The host
    waits for nothing and no shape depends on the choice, so a CUDA graph may contain the call. The outputs of a row's
    experts are summed in the order of `chosen`. Matrices whose rows are no multiple of 16 bytes go to the reference."""
    gate_up, down = e.gate_up, e.down
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor), "8 bits are for a CPU"
    if not len(x) or not (_takes_grouped_products(gate_up) and _takes_grouped_products(down)):
        return reference.experts(out, x, weights, chosen, e, ops)
    owners, pairs = chosen.flatten().sort(stable=True)  # of (row, expert) pairs, by expert
    ids = torch.arange(e.n, device=x.device)
    ends = torch.searchsorted(owners, ids, right=True, out_int32=True)
    wide = _grouped_linear(x[pairs // chosen.shape[1]], gate_up, e.gate_up_bias, owners, ends)
    narrow = _grouped_linear(e.gated(wide, ops), down, e.down_bias, owners, ends)
    by_row = torch.empty_like(narrow).index_copy_(0, pairs, narrow).unflatten(0, chosen.shape)
    out[:, None].baddbmm_(weights[:, None], by_row)  # [rows, 1, chosen] x [rows, chosen, hidden]
    return out


def _grouped_linear(x: Tensor, stacked: Tensor, bias: Tensor | None, owners: Tensor, ends: Tensor) -> Tensor:
    """The rows of each expert times its matrix: x [pairs, in], sorted by expert; `stacked` [experts * out, in]; `bias`
    [experts, out]; `owners` [pairs]: each row's expert; `ends` int32 [experts]: the end of its rows. Returns [pairs,
    out]."""
    product = F.grouped_mm(x, stacked.unflatten(0, (len(ends), -1)).mT, offs=ends)
    return product if bias is None else product.add_(bias[owners])


def _takes_grouped_products(weight: Tensor) -> bool:
    return weight.shape[1] * weight.element_size() % 16 == 0


def has_grouped_products(device: torch.device) -> bool:
    """Whether `F.grouped_mm` reads the ends of the groups on this CUDA device. On others, the host would read them."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] in (9, 10)
