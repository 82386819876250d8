"""Filling a model from its checkpoint: each file is read once, front to back, and only what the role needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch

from hydrainfer.core import CheckpointError, Role
from hydrainfer.models.config import require
from hydrainfer.models.families import family_of, read_config
from hydrainfer.models.model import Model
from hydrainfer.models.safetensors_file import StoredTensor, read_header, read_into, weight_files
from hydrainfer.models.slots import Slot
from hydrainfer.ops import OpSet, select_ops

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_PIECE_BYTES = 16 << 20


def load_model(
    path: str | Path,
    role: Role,
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    on_progress: Callable[[int, int], None] | None = None,
    ops: OpSet | None = None,
) -> Model:
    """The towers of `role` from a Hugging Face checkpoint directory, cast to `dtype` ("float32", "bfloat16",
    "float16"; "auto" is the checkpoint's own).

    `on_progress(done, total)` is called in bytes as they are read. Peak memory is the weights and one small buffer.
    Raises `CheckpointError` in one line.
    """
    path = Path(path).expanduser()
    config = read_config(path)
    dtype = config.dtype if dtype == "auto" else dtype
    require(dtype in DTYPES, path, f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    files = weight_files(path)
    headers = {file: read_header(file) for file in files}
    device = torch.device(device)
    ops = ops or select_ops(device, DTYPES[dtype], config.text.head_dim)
    with torch.inference_mode():
        model = Model(config, role, ops, DTYPES[dtype], device)
        _fill(model, path, headers, on_progress or (lambda _done, _total: None))
    return model


def _fill(
    model: Model, path: Path, headers: dict[Path, list[StoredTensor]], on_progress: Callable[[int, int], None]
) -> None:
    canonical = family_of(model.config).canonical
    waiting = model.slots()
    wanted: dict[Path, list[tuple[StoredTensor, Slot]]] = {}
    for file, tensors in headers.items():
        for t in tensors:
            slot = waiting.pop(canonical(t.name), None)
            if slot is None:
                continue
            require(t.dtype in _STORED, path, f"tensor {t.name} has dtype {t.dtype}; supported: {', '.join(_STORED)}")
            require(
                t.shape == slot.expected,
                path,
                f"tensor {t.name} has shape {list(t.shape)}, config.json wants {list(slot.expected)}",
            )
            wanted.setdefault(file, []).append((t, slot))
    if waiting:
        raise CheckpointError(f"{path}: {len(waiting)} tensors are missing, first {min(waiting)}")
    total = sum(t.n_bytes for pairs in wanted.values() for t, _ in pairs)
    done = 0
    for file, pairs in wanted.items():
        with file.open("rb", buffering=0) as f:
            for t, slot in pairs:
                _copy(f, t, slot)
                done += t.n_bytes
                on_progress(done, total)


def _copy(file: BinaryIO, stored: StoredTensor, slot: Slot) -> None:
    """One tensor from file to slot: directly where the bytes are alike, else through a small buffer."""
    flat = slot.into.view(-1)  # slots are whole rows of a fused weight, so contiguous
    kind = _STORED[stored.dtype]
    if flat.device.type == "cpu" and flat.dtype == kind:
        read_into(file, stored.offset, memoryview(flat.view(torch.uint8).numpy()))
        return
    piece = _PIECE_BYTES // kind.itemsize
    buffer = torch.empty(min(piece, flat.numel()), dtype=kind)
    for first in range(0, flat.numel(), piece):
        part = buffer[: min(piece, flat.numel() - first)]
        read_into(file, stored.offset + first * kind.itemsize, memoryview(part.view(torch.uint8).numpy()))
        flat[first : first + part.numel()].copy_(part)
