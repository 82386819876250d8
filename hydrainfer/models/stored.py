"""The tensors of a checkpoint's weight files, safetensors or GGUF, and their rows in pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hydrainfer.checkpoint import weight_files
from hydrainfer.checkpoint.gguf import VISION_FILE, WEIGHT_FILE, read_gguf, tensors_of
from hydrainfer.core import CheckpointError
from hydrainfer.models.fp8 import widened
from hydrainfer.models.safetensors_file import PLAIN, StoredTensor, read_header, read_into

_PIECE_VALUES = 4 << 20


def weight_headers(path: Path) -> dict[Path, list[StoredTensor]]:
    """The tensors of each weight file of a checkpoint directory, in file order. Raises `CheckpointError`."""
    files = [path / name for name in (WEIGHT_FILE, VISION_FILE) if (path / name).exists()]
    if not files:
        return {file: read_header(file) for file in weight_files(path)}
    found: dict[Path, list[StoredTensor]] = {}
    for file in files:
        held = tensors_of(read_gguf(file), beside_vision=len(files) > 1)
        stored = (
            StoredTensor(name, t.kind, t.shape, t.offset, t.n_bytes, heads, plus)
            for name, (t, heads, plus) in held.items()
        )
        found[file] = sorted(stored, key=lambda t: t.offset)
    return found


def pieces(file: FileIO, stored: StoredTensor, pairs: tuple[int, int] | None = None) -> Iterator[tuple[int, Tensor]]:
    """The rows of a tensor in pieces: the index of a piece's first row, and the rows [rows, row], in the dtype they are
    stored in or, if quantised, in float32. A piece is valid until the next one, and holds whole heads. `pairs`: see
    `Slot`. Raises `CheckpointError`."""
    n_rows, n_values = (stored.shape or (1,))[0], math.prod(stored.shape[1:])
    if stored.heads:  # llama.cpp rotates neighbours
        pairs = n_rows // stored.heads, n_rows // stored.heads
    per_head = pairs[0] if pairs else 1
    plain = PLAIN.get(stored.dtype)
    row_bytes = stored.n_bytes // max(1, n_rows)
    step = min(n_rows, max(1, _PIECE_VALUES // max(1, n_values * per_head)) * per_head)
    buffer = np.empty((step, row_bytes), np.uint8)
    for first in range(0, n_rows, step):
        held = buffer[: min(step, n_rows - first)]
        read_into(file, stored.offset + first * row_bytes, held.reshape(-1).data)
        if stored.scales is not None:
            rows = widened(torch.from_numpy(held), stored.scales, first=first)
        elif plain is not None:
            rows = torch.from_numpy(held).view(plain)
        else:
            rows = _dequantised(held, stored, file)
        if pairs:
            turned, rest = rows.view(-1, per_head, rows.shape[1]).split([pairs[1], per_head - pairs[1]], 1)
            turned = turned.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
            rows = torch.cat([turned, rest], 1).flatten(0, 1)
        yield first, rows


def _dequantised(rows: np.ndarray, stored: StoredTensor, file: FileIO) -> Tensor:
    """uint8 [rows, bytes] → float32 [rows, values]."""
    from gguf import GGMLQuantizationType, dequantize

    try:
        return torch.from_numpy(dequantize(rows, GGMLQuantizationType[stored.dtype]))
    except NotImplementedError:
        raise CheckpointError(
            f"{file.name}: tensor {stored.name} has type {stored.dtype}, which is not supported"
        ) from None
