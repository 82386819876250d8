"""Tensors in FP8: their scales, which are found and checked before memory is taken, and their numbers as float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hydrainfer.checkpoint import Fp8, require
from hydrainfer.core import CheckpointError
from hydrainfer.models.safetensors_file import PLAIN, Scales, StoredTensor, read_into

FP8 = "F8_E4M3"
_ENDINGS = "_scale_inv", "_scale"
_USUAL = 128  # rows and columns of a block in transformers, if config.json does not say


def with_scales(
    stored: StoredTensor, by_name: Mapping[str, tuple[Path, StoredTensor]], fp8: Fp8 | None, *, matrices: bool
) -> StoredTensor:
    """An FP8 tensor, [matrices, rows, columns] if `matrices`, else [rows, ...], with its scales. `by_name`: all tensors
    of the checkpoint and their files. Raises `CheckpointError` if scales are missing, or have another shape or
    dtype."""
    name, (file, _) = stored.name, by_name[stored.name]
    if fp8 is None:
        raise CheckpointError(f"{file}: tensor {name} is in FP8, of which config.json has no quantization_config")
    names = [name + ending for ending in _ENDINGS if name + ending in by_name]
    require(bool(names), file, f"tensor {name} is in FP8, and its scales {name}{_ENDINGS[0]} are missing")
    file, scales = by_name[names[0]]
    known = scales.dtype in PLAIN
    require(known, file, f"tensor {scales.name} has dtype {scales.dtype}; supported: {', '.join(PLAIN)}")
    shape, grid = stored.shape, scales.shape
    if not matrices:
        shape, grid = (1, *(shape[:1] or (1,)), math.prod(shape[1:])), (1, *grid)
    grid += (1,) * (3 - len(grid))
    block = _block(shape, grid, fp8)
    if block is None:
        each = "one scale, or one per row"
        if fp8.block is not None:
            each = f"one per block of quantization_config.weight_block_size {list(fp8.block)}"
        of = f"{name} of shape {list(stored.shape)}"
        raise CheckpointError(f"{file}: tensor {scales.name} has shape {list(scales.shape)}; {of} needs {each}")
    return stored._replace(scales=Scales(file, scales.offset, scales.dtype, grid, block))


def _block(shape: tuple[int, ...], grid: tuple[int, ...], fp8: Fp8) -> tuple[int, ...] | None:
    """How many matrices, rows and columns of a tensor share a scale of this grid; None if the grid does not fit."""
    if fp8.block is not None:
        sizes: list[tuple[int, ...]] = [(1,), *((size,) for size in fp8.block)]
    else:
        sizes = [(shape[0], 1), *((n, 1, _USUAL) for n in shape[1:])]
    fits = [[size for size in some if -(-n // size) == parts] for n, some, parts in zip(shape, sizes, grid)]
    return tuple(some[0] for some in fits) if len(grid) == 3 and all(fits) else None


def widened(numbers: Tensor, scales: Scales, *, matrix: int = 0, first: int = 0) -> Tensor:
    """The rows of a matrix from number `first` on, uint8 [rows, columns] → float32 [rows, columns], each number times
    its scale. Only the scales of these rows are read. Raises `CheckpointError`."""
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    wide = table.index_select(0, numbers.view(-1).int()).view(numbers.shape)  # 4 times as fast as a cast
    n, (some, tall, broad) = len(numbers), scales.block
    top, end = first // tall, -(-(first + n) // tall)
    stored = torch.empty(end - top, scales.grid[2], dtype=PLAIN[scales.dtype])
    row = matrix // some * scales.grid[1] + top
    with scales.file.open("rb", buffering=0) as file:
        at = scales.offset + row * stored.shape[1] * stored.itemsize
        read_into(file, at, stored.view(-1).view(torch.uint8).numpy().data)
    factors = stored.float()[torch.arange(first, first + n) // tall - top]  # [rows, blocks of columns]
    whole = numbers.shape[1] // broad
    wide[:, : whole * broad].unflatten(1, (whole, broad)).mul_(factors[:, :whole, None])
    wide[:, whole * broad :].mul_(factors[:, whole:])
    return wide
