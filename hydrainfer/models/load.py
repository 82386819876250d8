"""Filling a model from its checkpoint: each file is read once, front to back, and only what the role needs."""

from __future__ import annotations

from collections.abc import Callable
from io import FileIO
from pathlib import Path

import torch

from hydrainfer.checkpoint import ModelConfig, read_config, require
from hydrainfer.core import CheckpointError, Role
from hydrainfer.models.layers import layers_of
from hydrainfer.models.model import Model
from hydrainfer.models.safetensors_file import StoredTensor, read_header, read_into, weight_files
from hydrainfer.models.slots import Slot
from hydrainfer.ops import Int8Weight, OpSet, select_ops

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
    config: ModelConfig | None = None,
    pause: Callable[[], None] | None = None,
) -> Model:
    """The towers of `role` from a Hugging Face checkpoint directory, cast to `dtype` ("float32", "bfloat16",
    "float16"; "auto" is the checkpoint's own).

    `on_progress(done, total)` is called in bytes as they are read. Peak memory is the weights and one small buffer.
    `config`: the checkpoint's, if it has been read already. `pause`: see `Model`.
    Raises `CheckpointError` in one line.
    """
    path = Path(path).expanduser()
    config = config or read_config(path)
    dtype = config.dtype if dtype == "auto" else dtype
    require(dtype in DTYPES, path, f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    files = weight_files(path)
    headers = {file: read_header(file) for file in files}
    device = torch.device(device)
    ops = ops or select_ops(device, DTYPES[dtype], config.text.head_dim)
    with torch.inference_mode():
        wanted = _wanted(Model(config, role, ops, DTYPES[dtype], torch.device("meta")), path, headers)
        model = Model(config, role, ops, DTYPES[dtype], device, pause)  # only now: a damaged shape may be of any size
        _fill(model, wanted, on_progress or (lambda _done, _total: None))
    return model


def _wanted(
    model: Model, path: Path, headers: dict[Path, list[StoredTensor]]
) -> dict[Path, list[tuple[StoredTensor, str]]]:
    """The tensors to read, in file order, each with the name of its slot. `model` takes no memory. Raises
    `CheckpointError` unless the files hold all that the model wants, in its shapes."""
    canonical = layers_of(model.config).canonical
    waiting = model.slots()
    wanted: dict[Path, list[tuple[StoredTensor, str]]] = {}
    for file, tensors in headers.items():
        for t in tensors:
            name = canonical(t.name)
            slot = waiting.pop(name, None)
            if slot is None:
                continue
            require(t.dtype in _STORED, path, f"tensor {t.name} has dtype {t.dtype}; supported: {', '.join(_STORED)}")
            require(
                t.shape == slot.expected,
                path,
                f"tensor {t.name} has shape {list(t.shape)}, config.json wants {list(slot.expected)}",
            )
            wanted.setdefault(file, []).append((t, name))
    if waiting:
        raise CheckpointError(f"{path}: {len(waiting)} tensors are missing, first {min(waiting)}")
    return wanted


def _fill(
    model: Model, wanted: dict[Path, list[tuple[StoredTensor, str]]], on_progress: Callable[[int, int], None]
) -> None:
    slots = model.slots()
    total = sum(t.n_bytes for pairs in wanted.values() for t, _ in pairs)
    done = 0
    for file, pairs in wanted.items():
        with file.open("rb", buffering=0) as f:
            for t, name in pairs:
                slot = slots[name]
                _copy(f, t, slot)
                if slot.plus:
                    assert not isinstance(slot.into, Int8Weight), "only norms are shifted"
                    slot.into.add_(slot.plus)
                done += t.n_bytes
                on_progress(done, total)


def _copy(file: FileIO, stored: StoredTensor, slot: Slot) -> None:
    """One tensor from file to slot: directly where the bytes are alike, else through a small buffer."""
    if isinstance(slot.into, Int8Weight):
        return _copy_int8(file, stored, slot.into)
    flat = slot.into.view(-1)  # slots are whole rows of a fused weight, so contiguous
    kind = _STORED[stored.dtype]
    if flat.device.type == "cpu" and flat.dtype == kind:
        read_into(file, stored.offset, flat.view(torch.uint8).numpy().data)
        return
    piece = _PIECE_BYTES // kind.itemsize
    buffer = torch.empty(min(piece, flat.numel()), dtype=kind)
    for first in range(0, flat.numel(), piece):
        part = buffer[: min(piece, flat.numel() - first)]
        read_into(file, stored.offset + first * kind.itemsize, part.view(torch.uint8).numpy().data)
        flat[first : first + part.numel()].copy_(part)


def _copy_int8(file: FileIO, stored: StoredTensor, into: Int8Weight) -> None:
    """One matrix from file to 8 bits, some rows at a time."""
    kind, (outer, inner) = _STORED[stored.dtype], into.shape
    step = max(1, _PIECE_BYTES // (kind.itemsize * inner))
    buffer = torch.empty((min(step, outer), inner), dtype=kind)
    for first in range(0, outer, step):
        rows = buffer[: min(step, outer - first)]
        read_into(file, stored.offset + first * inner * kind.itemsize, rows.view(-1).view(torch.uint8).numpy().data)
        into[first : first + len(rows)].take(rows)
