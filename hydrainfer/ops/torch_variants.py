"""Faster torch expressions of some operators, no compiler needed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.ops import reference
from hydrainfer.ops.batch import AttentionBatch, Segments


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm` by torch's own operator, which computes in float32 too."""
    return F.rms_norm(x, weight.shape, weight, eps)


def prepare(batch: AttentionBatch) -> None:
    """The tiles and masks of `chunk_attention`."""
    batch.tiles()


def chunk_attention(q: Tensor, kv: Tensor, cache: Tensor, batch: AttentionBatch, scale: float, out: Tensor) -> None:
    """Attention of the requests past the decodes, by scaled-dot-product calls, written into `out`.

    A whole prompt attends to its fresh keys; a chunk with context gathers the pages that it sees first. Queries go in
    tiles, see `AttentionBatch.tiles`: torch's causal kernel on a CPU computes much of the masked half.
    """
    for i, tiles in enumerate(batch.tiles(), batch.n_decodes):
        stop, seen_from = batch.contexts[i] + batch.counts[i], tiles[0].low
        if batch.contexts[i] == 0:
            rows = slice(tiles[0].rows.start, tiles[-1].rows.stop)
            keys, values = kv[rows, 0], kv[rows, 1]
        else:
            keys, values = reference.gather_kv(cache, batch.tables[i], stop, seen_from)
        keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]  # [1, kv_heads, length, dim]
        for rows, low, high, mask in tiles:
            seen, group = slice(low - seen_from, high - seen_from), q.shape[1] // keys.shape[1]
            visible_keys, visible_values = keys[:, :, seen], values[:, :, seen]
            if group > 1 and mask is not None and q.device.type == "cuda":  # its fused kernels take no mask with groups
                visible_keys, visible_values = (x.repeat_interleave(group, 1) for x in (visible_keys, visible_values))
            out[rows] = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1)[None],
                visible_keys,
                visible_values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=q.shape[1] != visible_keys.shape[1],
            )[0].transpose(0, 1)


def attention_sdpa(q: Tensor, kv: Tensor, cache: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """`reference.attention` by scaled-dot-product calls. Decodes are gathered into one padded batch."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    chunk_attention(q, kv, cache, batch, scale, out)
    n = batch.n_decodes
    if n:
        length = max(batch.contexts[:n]) + 1
        n_blocks = -(-length // cache.shape[2])
        pages = cache[batch.tables[:n, :n_blocks].long()]  # [n, blocks, 2, block_tokens, kv_heads, dim]
        keys, values = (pages[:, :, j].flatten(1, 2).transpose(1, 2) for j in (0, 1))  # [n, kv_heads, length, dim]
        places, lengths = torch.arange(keys.shape[2], device=q.device)[None], batch.lengths[:n, None]
        visible = places < lengths
        if batch.window:
            visible &= places >= lengths - batch.window
        grouped = q[:n].unflatten(1, (keys.shape[1], -1))  # [n, kv_heads, group, dim]: what shares keys are its rows
        out[:n] = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=visible[:, None, None], scale=scale
        ).flatten(1, 2)
    return out


def attention_segments_sdpa(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    """`reference.attention_segments` with one call for all segments of a length."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for rows, n, length in segments.groups:
        queries, keys, values = (x[rows].unflatten(0, (n, length)).transpose(1, 2) for x in (q, k, v))
        # each [n, heads, length, dim]
        out[rows] = F.scaled_dot_product_attention(queries, keys, values, scale=scale).transpose(1, 2).flatten(0, 1)
    return out
