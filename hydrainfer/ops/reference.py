"""The plain-torch reference of every operator: what each variant must equal, on any device and dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.ops.batch import KV, AttentionBatch, GridRows, HeadNorms, Segments, visible
from hydrainfer.ops.memory import rows_in_steps
from hydrainfer.ops.scan import DeltaLayer, ScanBatch, state_of
from hydrainfer.ops.table import OpSet
from hydrainfer.ops.weights import ExpertWeights

_UNIT_EPS = 1e-6  # in the normalisation of queries and keys to unit length


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[rows, in] x [out, in] -> [rows, out]."""
    return F.linear(x, weight, bias)


def linear_add(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """out [rows, width] += x [rows, in] @ weight[width, in].T + bias, in place; returns `out`."""
    if bias is not None:
        out.add_(bias)
    return out.addmm_(x, weight.t())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in float32. x: [rows, width]."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def rms_norm_wide(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` with float32 weights, rounded only after the multiplication by them, as in Gemma."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[rows, 2 * width] -> silu(first half) * second half, [rows, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """[rows, 2 * width] -> gelu(first half) * second half by the tanh approximation, [rows, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """GPT-OSS's SwiGLU: [rows, 2 * width], gate and up values interleaved → [rows, width]."""
    gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(gate * alpha)


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x) in place (CLIP); returns `x`."""
    return x.mul_(torch.sigmoid(1.702 * x))


def rope(qk: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Apply rotary embedding to the halves of each head, in place. qk: [rows, heads, dim] (any row stride); cos, sin:
    [rows, dim / 2] float32. If they have fewer columns, the rest of each head stays as it is."""
    half = cos.shape[-1]
    first, second = qk[..., :half].float(), qk[..., half : 2 * half].float()
    cos, sin = cos[:, None], sin[:, None]
    rotated = first * cos - second * sin, second * cos + first * sin  # both before either is written
    qk[..., :half], qk[..., half : 2 * half] = (part.to(qk.dtype) for part in rotated)


def prepare(batch: AttentionBatch) -> None:
    """Prepare a batch for the chosen attention, once before all layers. The reference needs nothing."""


def write_kv(cache: KV, fresh: KV, batch: AttentionBatch) -> None:
    """Store the keys and values of the batch's rows in one layer's cache."""
    block = torch.div(batch.slots, batch.block_tokens, rounding_mode="floor")
    offset = batch.slots - block * batch.block_tokens
    for kept, rows in zip(cache, fresh):
        kept[block, offset] = rows


def rope_write_kv(qk: Tensor, values: Tensor, cos: Tensor, sin: Tensor, cache: KV, batch: AttentionBatch) -> None:
    """`rope` of queries and keys, in place, then `write_kv`. qk: [rows, heads + kv_heads, dim], heads may be 0; values:
    [rows, kv_heads, value dim]."""
    rope(qk, cos, sin)
    write_kv(cache, KV(qk[:, -values.shape[1] :], values), batch)


def norm_rope_write_kv(
    qk: Tensor, values: Tensor, norms: HeadNorms, cos: Tensor, sin: Tensor, cache: KV, batch: AttentionBatch, ops: OpSet
) -> Tensor:
    """`rope_write_kv`, by `ops`, after a norm of each head of queries and keys. Returns these; `qk` may be
    overwritten."""
    n = qk.shape[1] - values.shape[1]
    for part, weight in ((qk[:, :n], norms.q), (qk[:, n:], norms.k)):
        norm_heads(part, weight, norms.eps, ops)
    ops.rope_write_kv(qk, values, cos, sin, cache, batch)
    return qk


def norm_rope(
    qk: Tensor, kv_heads: int, norms: HeadNorms, cos: Tensor, sin: Tensor, ops: OpSet
) -> tuple[Tensor, Tensor]:
    """Queries and keys of `qk` [rows, heads + kv_heads, dim] after a norm of each head and `rope`, by `ops`."""
    n, dim = qk.shape[1] - kv_heads, qk.shape[2]
    q, k = (
        ops.rms_norm(part.reshape(-1, dim), weight, norms.eps).view(part.shape)
        for part, weight in ((qk[:, :n], norms.q), (qk[:, n:], norms.k))
    )
    ops.rope(q, cos, sin)
    ops.rope(k, cos, sin)
    return q, k


def norm_heads(heads: Tensor, weight: Tensor, eps: float, ops: OpSet) -> None:
    """Normalise [rows, heads, head_dim] in place, each head by itself."""
    if heads.shape[1]:
        norm = ops.rms_norm if weight.dtype == heads.dtype else ops.rms_norm_wide
        heads.copy_(norm(heads.reshape(-1, heads.shape[-1]), weight, eps).view(heads.shape))


def gather_kv(cache: KV, table: Tensor, stop: int, first: int = 0) -> KV:
    """The keys and values of tokens `first .. stop-1` behind one block table, each [stop - first, kv_heads, dim]."""
    size = cache.keys.shape[1]
    skipped = first // size
    blocks, rows = table[skipped : -(-stop // size)].long(), slice(first - skipped * size, stop - skipped * size)
    return KV(*(part[blocks].flatten(0, 1)[rows] for part in cache))


def attention(
    q: Tensor,
    _fresh: KV,
    cache: KV,
    batch: AttentionBatch,
    scale: float,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Attention of every row over the tokens of its request up to itself, as limited or extended by `batch.window` and
    `batch.spans`. All keys and values, this batch's included, are already written to the cache.

    q: [rows, heads, dim]; cache: one layer. `sinks` [heads] float32: per head, the score of an extra key without a
    value, which takes a share of the attention. `cap`: scores are held within it by tanh, unless it is 0. Returns
    [rows, heads, value dim]. Variants may read the batch's fresh keys and values from the second argument; the
    reference does not.
    """
    out = q.new_empty((*q.shape[:2], cache.values.shape[3]))
    row = 0
    for i, (count, context) in enumerate(zip(batch.counts, batch.contexts)):
        keys, values = gather_kv(cache, batch.tables[i], context + count)
        group = q.shape[1] // keys.shape[1]
        keys = keys.float().repeat_interleave(group, dim=1)  # [length, heads, dim]
        values = values.float().repeat_interleave(group, dim=1)
        scores = capped(torch.einsum("qhd,khd->hqk", q[row : row + count].float(), keys) * scale, cap)
        seen = visible(context, count, range(context + count), q.device, batch.window, batch.spans_of(i))
        scores.masked_fill_(~seen, float("-inf"))
        weights = softmax(scores, None if sinks is None else sinks[:, None, None])
        out[row : row + count] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        row += count
    return out


def capped(scores: Tensor, cap: float) -> Tensor:
    """`scores` held within -cap .. cap by tanh, in place; as they are if `cap` is 0."""
    return scores.div_(cap).tanh_().mul_(cap) if cap else scores


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension of `scores` [..., rows, keys]. `sinks`, of the same shape with one column, holds
    the score of one more key, which is dropped from the result."""
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]


def attention_segments(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    """Attention without a mask, each segment by itself. q, k, v: [rows, heads, dim]. Returns [rows, heads, dim]."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    first = 0
    for n in segments.lengths:
        rows = slice(first, first + n)
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k[rows].float()) * scale
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[rows].float()).to(q.dtype)
        first += n
    return out


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, tails: Tensor, batch: ScanBatch) -> Tensor:
    """Depthwise causal convolution of every row with the previous rows of its request. x: [rows, columns]; weight:
    [columns, width], the current row's weight last; tails: the last `width - 1` rows of each request, one layer's
    [blocks, width - 1, columns]. Returns [rows, columns]."""
    out = torch.empty_like(x)
    for wave in batch.waves:
        seen = torch.cat([state_of(tails, batch.sources[wave]), x[wave, None]], 1)  # [rows, width, columns]
        out[wave] = (seen * weight.t()).sum(1)
        tails[batch.targets[wave]] = seen[:, 1:]
    for rows, source, target in batch.pieces:
        before = tails[source] if source >= 0 else torch.zeros_like(tails[target])
        seen = torch.cat([before, x[rows]])
        n = len(seen) - len(before)
        padded = F.pad(seen, (0, 0, 0, rows_in_steps(n) - n))  # few numbers of rows, as in `stepping`
        out[rows] = F.conv1d(padded.t()[None], weight[:, None], groups=x.shape[1])[0].t()[:n]
        tails[target] = seen[-tails.shape[1] :]
    return out if bias is None else out.add_(bias)


def grid_conv(rows: Tensor, weight: Tensor, grid: GridRows) -> Tensor:
    """Depthwise convolution within each frame, between two gates: the first third of `rows` [rows, 3 * columns] times
    the last one, convolved, times the second. weight: [columns, 1, kernel, kernel]. Returns [rows, columns]."""
    before, after, x = rows.chunk(3, dim=-1)
    m, columns, kernel = grid.merge, x.shape[1], weight.shape[-1]
    gated, found, first = before * x, [], 0
    for t, h, w in grid.grids:
        n = t * h * w * m * m
        squares = gated[first : first + n].view(t, h, w, m, m, columns)
        frames = squares.transpose(2, 3).reshape(t, h * m, w * m, columns).permute(0, 3, 1, 2)  # channels last
        frames = F.conv2d(frames, weight, padding=kernel // 2, groups=columns)
        squares = frames.permute(0, 2, 3, 1).reshape(t, h, m, w, m, columns)
        found.append(squares.transpose(2, 3).reshape(n, columns))
        first += n
    return torch.cat(found).mul_(after)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, batch: ScanBatch
) -> Tensor:
    """The gated delta rule in float32. Each head keeps a matrix S, which a request's rows update one after the other:

        S <- exp(decay) S;   S <- S + k (beta (v - k S));   out = q S

    q, k: [rows, key_heads, key_dim]; v: [rows, heads, dim], where consecutive heads share a key head; decay (at most
    0), beta: [rows, heads]; states: one layer's [blocks, heads, key_dim, dim]. Returns [rows, heads, dim]."""
    q, k = (x.repeat_interleave(v.shape[1] // k.shape[1], 1) for x in (q, k))
    out = torch.empty_like(v)

    def step(state: Tensor, i: slice) -> Tensor:
        """Compute rows `i`, one for each state [rows, heads, key_dim, dim]. Returns the states after them."""
        state = state * decay[i].exp()[..., None, None]
        known = (k[i][..., None] * state).sum(-2)
        state = state + k[i][..., None] * (beta[i][..., None] * (v[i] - known))[..., None, :]
        out[i] = (q[i][..., None] * state).sum(-2)
        return state

    for wave in batch.waves:
        states[batch.targets[wave]] = step(state_of(states, batch.sources[wave]), wave)
    for rows, source, target in batch.pieces:
        state = states[source : source + 1] if source >= 0 else torch.zeros_like(states[:1])
        for i in range(rows.start, rows.stop):
            state = step(state, slice(i, i + 1))
        states[target] = state[0]
    return out


def gated_delta(
    qkv: Tensor,
    gate: Tensor,
    beta: Tensor,
    step: Tensor,
    layer: DeltaLayer,
    tails: Tensor,
    states: Tensor,
    batch: ScanBatch,
    rule: Callable[..., Tensor] = delta_rule,
    norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm,
) -> Tensor:
    """The gated delta rule on queries, keys and values after a short convolution. The output is normalised per head and
    gated.

    qkv: [rows, channels]; gate: [rows, heads * dim]; beta, step: [rows, heads], raw (before sigmoid and softplus);
    tails, states: one layer's cache, see `short_conv` and `delta_rule`; `rule`: a variant of `delta_rule`. Returns
    [rows, heads * dim]."""
    mixed = F.silu(short_conv(qkv, layer.conv, None, tails, batch)).float()
    return delta_heads(mixed, gate, beta, step, layer, states, batch, rule, norm)


def delta_heads(
    mixed: Tensor,
    gate: Tensor,
    beta: Tensor,
    step: Tensor,
    layer: DeltaLayer,
    states: Tensor,
    batch: ScanBatch,
    rule: Callable[..., Tensor] = delta_rule,
    norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm,
) -> Tensor:
    """The part of `gated_delta` that follows the convolution, whose output is `mixed` [rows, channels] float32."""
    _, heads, key_dim, dim = states.shape
    keys = (mixed.shape[1] - heads * dim) // 2
    q, k = (x.unflatten(1, (-1, key_dim)) for x in (mixed[:, :keys], mixed[:, keys : 2 * keys]))
    q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _UNIT_EPS) for x in (q, k))
    v = mixed[:, 2 * keys :].unflatten(1, (heads, dim))
    decay = -layer.log_rate.exp() * F.softplus(step.float() + layer.step_bias)
    given = rule(q * key_dim**-0.5, k, v, decay, beta.sigmoid().float(), states, batch).to(gate.dtype)
    normed = norm(given.flatten(0, 1), layer.norm, layer.eps).view(len(mixed), -1)
    return (normed * F.silu(gate.float())).to(gate.dtype)


def experts(out: Tensor, x: Tensor, weights: Tensor, chosen: Tensor, e: ExpertWeights, ops: OpSet) -> Tensor:
    """Add to each row of `out` [rows, hidden] the weighted sum of its experts' outputs, in place; returns `out`.
    `chosen` (expert ids) and `weights`: [rows, experts per row]. The rows of one expert are multiplied together, by
    `ops`."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    rows, weights = order // chosen.shape[1], weights.flatten()[order, None]
    first = 0
    for i, n in enumerate(flat.bincount(minlength=e.n).tolist()):
        if n:
            mine, (gate_up, down) = rows[first : first + n], e.of(i)
            wide = ops.linear(x[mine], gate_up, None if e.gate_up_bias is None else e.gate_up_bias[i])
            given = ops.linear(e.gated(wide, ops), down, None if e.down_bias is None else e.down_bias[i])
            out.index_add_(0, mine, given.mul_(weights[first : first + n]))
            first += n
    return out
