"""Arrays of the host on a device, and back: through pinned memory, without waiting."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 16  # bytes: where each array begins


def upload(arrays: Mapping[str, np.ndarray], device: torch.device, into: Tensor | None = None) -> dict[str, Tensor]:
    """The same arrays on `device`: on a CPU themselves, on CUDA parts of one copy that the current stream makes.
    `into`: memory of `packed_bytes` on the device that they are copied to, one after the other; else it is new."""
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
    """The bytes that `upload` needs for them."""
    return max(sum(map(_room, arrays.values())), 1)


def _room(array: np.ndarray) -> int:
    return -(-array.nbytes // _ALIGNED) * _ALIGNED


def to_host(found: Tensor) -> Tensor:
    """A tensor of a CPU itself; of CUDA a copy in pinned memory, which is there once the current stream is done with
    what it was given so far."""
    if found.device.type == "cpu":
        return found
    pinned = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    return pinned.copy_(found, non_blocking=True)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy one array, as `upload` does."""
    return upload({"": array}, device)[""]
