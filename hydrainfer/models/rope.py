"""Rotary position embedding angles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hydrainfer.models.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: radians per position. "llama3" follows Llama 3.1's model card: low frequencies are
    divided by the factor, high ones kept, those between interpolated."""
    freqs = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "linear":
        return freqs / rope.factor
    if rope.kind != "llama3":
        return freqs
    low, high, context = rope.low_freq_factor, rope.high_freq_factor, rope.original_context
    wavelength = 2 * math.pi / freqs
    smooth = ((context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * freqs / rope.factor + smooth * freqs


def angles(inverse: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, each [rows, head_dim / 2] float32, of int64 positions [rows]."""
    turns = positions.float()[:, None] * inverse
    return turns.cos(), turns.sin()
