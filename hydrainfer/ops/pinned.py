"""Copies of arrays between host and device, through pinned memory and without waiting."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 16  # bytes; each array begins at a multiple


def upload(arrays: Mapping[str, np.ndarray], device: torch.device, into: Tensor | None = None) -> dict[str, Tensor]:
    """The arrays as tensors on `device`: on a CPU the arrays themselves, on CUDA views of one copy made on the current
    stream. `into`: device memory of `packed_bytes` to copy into; default: new memory."""
    if device.type == "cpu" and into is None:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    places, end = {}, 0
    for name, array in arrays.items():
        places[name] = end
        end += _room(array)
    pinned = torch.empty(max(end, 1), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, array in arrays.items():
        part = pinned[places[name] : places[name] + array.nbytes]
        part.copy_(torch.from_numpy(np.ascontiguousarray(array).reshape(-1)).view(torch.uint8))
    there = pinned.to(device, non_blocking=True) if into is None else into.copy_(pinned, non_blocking=True)
    return {
        name: there[places[name] : places[name] + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .view(array.shape)
        for name, array in arrays.items()
    }


def packed_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """The bytes of device memory that `upload` needs for these arrays."""
    return max(sum(map(_room, arrays.values())), 1)


def _room(array: np.ndarray) -> int:
    return -(-array.nbytes // _ALIGNED) * _ALIGNED


def to_host(found: Tensor) -> Tensor:
    """A CPU tensor itself, or a copy of a CUDA tensor in pinned memory. The copy is complete once the current stream
    has finished the work submitted so far."""
    if found.device.type == "cpu":
        return found
    pinned = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    return pinned.copy_(found, non_blocking=True)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy one array, as `upload` does."""
    return upload({"": array}, device)[""]
