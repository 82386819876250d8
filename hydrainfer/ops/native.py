"""Compiled CPU kernels: built once into the user's cache by the local C++ compiler, absent without one."""

from __future__ import annotations

import torch


class Kernels:
    """The functions of `kernels/cpu`, with their references' signatures."""

    def supports(self, dtype: torch.dtype, head_dim: int) -> bool:
        return False


def load_kernels(device: torch.device, dtype: torch.dtype) -> tuple[Kernels | None, tuple[str, ...]]:
    """The kernels for this device, or None and the reason in one line."""
    return None, ()
