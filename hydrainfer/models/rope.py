"""Rotary position embedding angles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hydrainfer.checkpoint import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """The rotation of each pair in radians per position, float32 [dim / 2], where `dim` numbers of each head are
    rotated. "llama3" follows Llama 3.1's model card: low frequencies are divided by the factor, high ones are kept,
    those between are interpolated. "yarn" does the same by the index of the pair (https://arxiv.org/abs/2309.00071,
    section 3.2). "longrope" divides each by its own factor. "proportional" rotates only the first pairs, with the
    frequencies that they have if all are rotated."""
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
    if rope.kind == "longrope":
        return freqs / torch.tensor(rope.divisors)
    if rope.kind != "llama3":
        return freqs
    low, high, context = rope.low_freq_factor, rope.high_freq_factor, rope.original_context
    wavelength = 2 * math.pi / freqs
    smooth = ((context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * freqs / rope.factor + smooth * freqs


def _pair_that_turns(n: float, rope: Rope, dim: int) -> float:
    """The index of the pair, possibly fractional, that turns `n` times within the original context."""
    return dim * math.log(rope.original_context / (n * 2 * math.pi)) / (2 * math.log(rope.theta))


def axes(rope: Rope) -> Tensor:
    """The axis (0: time, 1: row, 2: column) that rotates each pair, int64 [dim / 2]. The axes take consecutive
    sections, as in Qwen2-VL, or, if `interleaved`, alternate as in Qwen3-VL, where time takes the pairs that are left
    over."""
    assert rope.sections is not None
    if not rope.interleaved:
        return torch.tensor([axis for axis, n in enumerate(rope.sections) for _ in range(n)])
    found = torch.zeros(sum(rope.sections), dtype=torch.int64)
    for axis in (1, 2):
        found[axis : 3 * rope.sections[axis] : 3] = axis
    return found


def angles(inverse: Tensor, positions: Tensor, axes: Tensor | None = None, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin times `scale`, each [rows, dim / 2] float32. `positions`: int64 [rows], or [3, rows] from which
    `axes` picks one per pair."""
    if positions.dim() == 1:
        turns = positions.float()[:, None] * inverse
    else:
        assert axes is not None, "positions in three dimensions for a model that has one"
        turns = positions.float()[axes].t().contiguous() * inverse  # kernels need contiguous rows
    cos, sin = turns.cos(), turns.sin()
    return (cos, sin) if scale == 1.0 else (cos.mul_(scale), sin.mul_(scale))
