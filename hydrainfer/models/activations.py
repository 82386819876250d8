"""Activation functions by their Hugging Face names. Each may overwrite its input."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.ops import OpSet


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def activation(name: str, ops: OpSet) -> Callable[[Tensor], Tensor]:
    """The function `name`, one of `checkpoint.model.ACTIVATIONS`."""
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "quick_gelu": ops.quick_gelu,
        "gelu": F.gelu,
        "gelu_pytorch_tanh": _gelu_tanh,
        "silu": F.silu,
        "relu": torch.relu,
    }
    return known[name]


def gated(name: str, ops: OpSet) -> Callable[[Tensor], Tensor]:
    """A function of rows [rows, 2 * width]: the activation `name` of the first half times the second half."""
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": ops.silu_and_mul,
        "gelu_pytorch_tanh": ops.gelu_tanh_and_mul,
    }
    plain = activation(name, ops)

    def multiplied(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return plain(gate) * up

    return known.get(name, multiplied)
