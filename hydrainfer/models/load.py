"""Loading of a model from its checkpoint. Each file is read front to back, and only the tensors that the role needs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from io import FileIO
from pathlib import Path

import torch

from hydrainfer.checkpoint import ModelConfig, require
from hydrainfer.checkpoint.gguf import VISION_FILE, WEIGHT_FILE
from hydrainfer.core import CheckpointError, Role
from hydrainfer.families import family_of, read_config
from hydrainfer.models.fp8 import FP8, with_scales
from hydrainfer.models.matrices import copy_matrices
from hydrainfer.models.model import Model, attentions_of
from hydrainfer.models.mtp import PREFIX
from hydrainfer.models.safetensors_file import PLAIN, StoredTensor, read_into, same_bytes
from hydrainfer.models.slots import Slot
from hydrainfer.models.stored import pieces, weight_headers
from hydrainfer.ops import Int8Weight, OpSet, select_ops

_TABLE, _HEAD = "text.embed_tokens.weight", "lm_head.weight"
_EXPERTS = re.compile(r"text\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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

    `on_progress(done, total)` is called with the bytes read so far. Peak memory is the weights and one small buffer.
    `config`: the checkpoint's, if it has been read already. `pause`: see `Model`.
    Raises `CheckpointError` with a message of one line.
    """
    path = Path(path).expanduser()
    config = config or read_config(path)
    dtype = config.dtype if dtype == "auto" else dtype
    require(dtype in DTYPES, path, f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    headers = weight_headers(path)
    config = _as_stored(config, headers)
    device = torch.device(device)
    kind = DTYPES[dtype]
    ops = ops or select_ops(device, kind, config.text.head_dim, attentions=attentions_of(config, role, kind))
    experts = config.text.experts
    packed = experts is not None and experts.stored == "mxfp4"
    require(not (packed and ops.int8), path, "weights in MXFP4 cannot be quantized to int8; leave --quantization out")
    with torch.inference_mode():
        wanted = _wanted(Model(config, role, ops, kind, torch.device("meta")), path, headers)
        model = Model(config, role, ops, kind, device, pause)  # now: a damaged shape may be of any size
        _fill(model, wanted, on_progress or (lambda _done, _total: None))
        if model.language is not None:
            model.language.loaded()
        model.prepare()
    return model


def holds_mtp(path: str | Path, config: ModelConfig) -> bool:
    """Whether a checkpoint's files have the tensors of its MTP layer. Raises `CheckpointError`."""
    canonical = family_of(config).names.canonical
    headers = weight_headers(Path(path).expanduser())
    return any(canonical(t.name).startswith(PREFIX) for tensors in headers.values() for t in tensors)


def _as_stored(config: ModelConfig, headers: dict[Path, list[StoredTensor]]) -> ModelConfig:
    """`config`, corrected by what these files hold. The head is not tied if they hold one that differs from the token
    table, as in transformers. Experts are marked as stacked if they are in one tensor. For some families transformers
    saves another layout than the published one. The shapes of both tensors decide, because one alone may be square."""
    text, canonical = config.text, family_of(config).names.canonical
    stored = [(canonical(t.name), file, t) for file, tensors in headers.items() for t in tensors]
    ends = {name: (file, t) for name, file, t in stored if name in (_TABLE, _HEAD)}
    scaled = any(t.dtype == FP8 for _, t in ends.values())  # then equal bytes may be other numbers
    if text.tied and len(ends) == 2 and (scaled or not same_bytes(*ends.values())):
        text = replace(text, tied=False)
    e, shapes = text.experts, {t.shape for name, _, t in stored if _EXPERTS.fullmatch(name)}
    if e is not None and shapes == {(e.count, 2 * e.intermediate, text.hidden), (e.count, text.hidden, e.intermediate)}:
        text = replace(text, experts=replace(e, stored="stacked"))
    return replace(config, text=text)


def _wanted(
    model: Model, path: Path, headers: dict[Path, list[StoredTensor]]
) -> dict[Path, list[tuple[StoredTensor, str]]]:
    """The tensors to read, in file order, each with the name of its slot. If the head is tied to the token table and
    the files hold only the head, this is read as the table. `model` may be on the meta device. Raises `CheckpointError`
    unless the files hold all tensors that the model needs, in its shapes."""
    canonical = family_of(model.config).names.canonical
    by_name = {t.name: (file, t) for file, tensors in headers.items() for t in tensors}
    names = {stored: canonical(stored) for stored in by_name}
    if model.config.text.tied and _TABLE not in names.values():
        names = {stored: _TABLE if name == _HEAD else name for stored, name in names.items()}
    values = next((stored for stored, name in names.items() if name in _surplus(model.config)), None)
    require(values is None, path, f"attention_k_eq_v is true, but the files hold {values}")
    waiting = model.slots()
    wanted: dict[Path, list[tuple[StoredTensor, str]]] = {}
    for file, tensors in headers.items():
        for t in tensors:
            name = names[t.name]
            slot = waiting.pop(name, None)
            if slot is None:
                continue
            kinds = ("U8",) if slot.how.startswith("mxfp4") else (*PLAIN, FP8)
            known = t.dtype in kinds or file.name in (WEIGHT_FILE, VISION_FILE)  # for GGUF, `pieces` checks it
            require(known, path, f"tensor {t.name} has dtype {t.dtype}; supported: {', '.join(kinds)}")
            require(
                t.shape == slot.expected,
                path,
                f"tensor {t.name} has shape {list(t.shape)}, config.json wants {list(slot.expected)}",
            )
            if t.dtype == FP8:
                t = with_scales(t, by_name, model.config.fp8, matrices=bool(slot.how))
            wanted.setdefault(file, []).append((t, name))
    if waiting:
        raise CheckpointError(f"{path}: {len(waiting)} tensors are missing, first {min(waiting)}")
    return wanted


def _surplus(config: ModelConfig) -> set[str]:
    """The value matrices of layers whose values are their keys, which no file may have."""
    text = config.text
    layers = [i for i, window in enumerate(text.windows) if text.keys_as_values and not window]
    return {f"text.layers.{i}.self_attn.v_proj.weight" for i in layers if text.cache_of(i) == i}


def _fill(
    model: Model, wanted: dict[Path, list[tuple[StoredTensor, str]]], on_progress: Callable[[int, int], None]
) -> None:
    slots = model.slots()
    total = sum(t.n_bytes for pairs in wanted.values() for t, _ in pairs)
    done = 0
    passes = [(file, pairs, scales) for scales in (False, True) for file, pairs in wanted.items()]
    for file, pairs, scales in passes:
        with file.open("rb", buffering=0) as f:
            for t, name in pairs:
                slot = slots[name]
                if (slot.how == "mxfp4 scales") is not scales:
                    continue
                _copy(f, t, slot)
                done += t.n_bytes
                on_progress(done, total)


def _copy(file: FileIO, stored: StoredTensor, slot: Slot) -> None:
    """Copy one tensor from file to slot: directly if the bytes are the same, else some rows at a time."""
    if slot.how:
        copy_matrices(file, stored, slot, PLAIN.get(stored.dtype, torch.uint8))
        return
    into = slot.into
    if isinstance(into, Int8Weight):
        for first, rows in pieces(file, stored, slot.pairs):
            into[first : first + len(rows)].take(rows)
        return
    flat = into.view(-1)  # slots are whole rows of a fused weight, so contiguous
    plain = not (stored.heads or slot.pairs or slot.quarters)
    if flat.device.type == "cpu" and flat.dtype == PLAIN.get(stored.dtype) and plain:
        read_into(file, stored.offset, flat.view(torch.uint8).numpy().data)
    else:
        for first, rows in pieces(file, stored, slot.pairs, slot.quarters):
            flat[first * rows.shape[1] :][: rows.numel()].copy_(rows.view(-1))
    if slot.plus + stored.plus:
        flat.add_(slot.plus + stored.plus)
