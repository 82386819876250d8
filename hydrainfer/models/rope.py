"""Rotary position embedding angles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hydrainfer.checkpoint import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[dim / 2] float32, where `dim` numbers of a head are turned: radians per position. "llama3" follows Llama 3.1's
    model card: low frequencies are divided by the factor, high ones kept, those between interpolated. "yarn" does
    likewise, by the place of a pair (https://arxiv.org/abs/2309.00071, section 3.2). "proportional" turns the first
    pairs as if all were turned, and leaves the others."""
    dim = rope.dim(head_dim)
    freqs = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if rope.kind == "proportional":
        freqs[int(rope.fraction * head_dim // 2) :] = 0
    if rope.kind in ("linear", "proportional"):
        return freqs / rope.factor
    if rope.kind == "yarn":
        low, high = (_pair_that_turns(n, rope, dim) for n in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high += 0.001 if low == high else 0.0
        kept = 1.0 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return freqs / rope.factor * (1 - kept) + freqs * kept
    if rope.kind != "llama3":
        return freqs
    low, high, context = rope.low_freq_factor, rope.high_freq_factor, rope.original_context
    wavelength = 2 * math.pi / freqs
    smooth = ((context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * freqs / rope.factor + smooth * freqs


def _pair_that_turns(n: float, rope: Rope, dim: int) -> float:
    """The number of the pair, if not whole, that turns `n` times within the original context."""
    return dim * math.log(rope.original_context / (n * 2 * math.pi)) / (2 * math.log(rope.theta))


def axes(rope: Rope) -> Tensor:
    """[dim / 2] int64: which of (time, row, column) turns each pair. Following each other as in Qwen2-VL, or, with
    `interleaved`, time, row, column by turns as in Qwen3-VL, time taking what the others leave."""
    assert rope.sections is not None
    if not rope.interleaved:
        return torch.tensor([axis for axis, n in enumerate(rope.sections) for _ in range(n)])
    found = torch.zeros(sum(rope.sections), dtype=torch.int64)
    for axis in (1, 2):
        found[axis : 3 * rope.sections[axis] : 3] = axis
    return found


def angles(inverse: Tensor, positions: Tensor, axes: Tensor | None = None, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin times `scale`, each [rows, dim / 2] float32, of int64 positions [rows], or [3, rows] of which `axes`
    says the one for each pair."""
    if positions.dim() == 1:
        turns = positions.float()[:, None] * inverse
    else:
        assert axes is not None, "positions in three dimensions for a model that has one"
        turns = positions.float()[axes].t().contiguous() * inverse  # kernels want whole rows
    cos, sin = turns.cos(), turns.sin()
    return (cos, sin) if scale == 1.0 else (cos.mul_(scale), sin.mul_(scale))
