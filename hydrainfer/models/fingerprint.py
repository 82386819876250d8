"""A cheap identity of the vision weights, part of every embedding's key."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hydrainfer.checkpoint import ModelConfig, read_config, require
from hydrainfer.models.layers import layers_of
from hydrainfer.models.stored import weight_headers

_SAMPLE_BYTES = 64
_SAMPLES = 8


def vision_fingerprint(path: str | Path, config: ModelConfig | None = None) -> bytes:
    """16 bytes: a hash of the vision tensors' names, shapes, dtypes and of bytes sampled evenly from each. Reads a few
    kilobytes; does not depend on sharding or on which spelling of the names the checkpoint uses. Empty for a
    model that takes text only. `config`: the checkpoint's, if it has been read already."""
    path = Path(path).expanduser()
    config = config or read_config(path)
    if config.vision is None:
        return b""
    canonical = layers_of(config).canonical
    parts: dict[str, bytes] = {}
    for file, tensors in weight_headers(path).items():
        with file.open("rb") as f:
            for t in tensors:
                name = canonical(t.name)
                if not name.startswith(("vision.", "projector.")):
                    continue
                digest = hashlib.blake2b(f"{name} {t.dtype} {t.shape}".encode(), digest_size=16)
                for i in range(_SAMPLES):
                    f.seek(t.offset + max(0, t.n_bytes - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
                    digest.update(f.read(min(_SAMPLE_BYTES, t.n_bytes)))
                parts[name] = digest.digest()
    require(bool(parts), path, "holds no vision tensors")
    return hashlib.blake2b(b"".join(parts[name] for name in sorted(parts)), digest_size=16).digest()
