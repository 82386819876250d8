"""The names of a checkpoint's safetensors files."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hydrainfer.checkpoint.files import read_json
from hydrainfer.core import CheckpointError

_MTP = "mtp.safetensors"
_FILE_NAME = re.compile(r"[^/\0\\][^\0\\]{0,240}\.safetensors")  # relative


def weight_files(path: Path) -> list[Path]:
    """The weight files of a checkpoint directory: one or, if that is not there, the shards its index names, as in
    transformers. Behind them `mtp.safetensors`, which transformers does not read, if it is there. Raises
    `CheckpointError`."""
    beside = [path / _MTP] if (path / _MTP).is_file() else []
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if single.is_file():
        return [single, *beside]
    if index.exists():
        names = _indexed(index)
        missing = [n for n in names if not (path / n).is_file()]
        if missing:
            raise CheckpointError(f"{path}: {len(missing)} of {len(names)} weight files are missing: {missing[0]}")
        return [path / n for n in names] + [file for file in beside if file.name not in names]
    other = next((p.name for pattern in ("*.bin", "*.pth", "*.gguf") for p in path.glob(pattern)), None)
    found = f"found {other}, which is not supported" if other else "no weight file found"
    raise CheckpointError(f"{path}: {found}; supported: model.safetensors or shards with model.safetensors.index.json")


def _indexed(index: Path) -> list[str]:
    """The files that an index names. A name must not lead out of the index's directory; a file there may be a link.
    Raises `CheckpointError`."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must be an object that names a file per tensor")
    for tensor, name in weight_map.items():
        if not (isinstance(name, str) and _FILE_NAME.fullmatch(name)) or ".." in name.split("/"):
            raise CheckpointError(
                f"{index}: weight_map.{tensor} is {json.dumps(name)[:100]}; it must be the name of a .safetensors file "
                "in the checkpoint's directory"
            )
    return sorted(set(weight_map.values()))
