"""The places of a checkpoint's tensors: preallocated weights, fused ones filled slice by slice."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Slot(NamedTuple):
    """`into` receives one checkpoint tensor; `shape` is that tensor's shape where it differs from `into`'s. `plus` is
    added to what was read."""

    into: Tensor
    shape: tuple[int, ...] | None = None
    plus: float = 0.0

    @property
    def expected(self) -> tuple[int, ...]:
        return self.shape or tuple(self.into.shape)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
