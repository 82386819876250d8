"""A cheap identity of a model, part of every key of its embeddings and of its KV."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hydrainfer.checkpoint import ModelConfig, read_config
from hydrainfer.models.layers import layers_of
from hydrainfer.models.stored import weight_headers

_VERSION = b"1"
_SAMPLE_BYTES = 64
_SAMPLES = 8
_MOST_SAMPLES = 8192  # of a model with many experts fewer are taken of each tensor


def fingerprint(path: str | Path, config: ModelConfig | None = None, *, weights: bool = True) -> bytes:
    """16 bytes: a hash of the parsed configuration and of the names, shapes and dtypes of all tensors, and of bytes
    sampled evenly from each. Reads some hundred kilobytes; does not depend on sharding or on which spelling of the
    names the checkpoint uses, unless experts are stacked in one and not in the other. `config`: the checkpoint's, if it
    has been read already. Without `weights`, as on an emulated device, of the configuration alone. Raises
    `CheckpointError`."""
    path = Path(path).expanduser()
    config = config or read_config(path)
    canonical, headers = layers_of(config).canonical, weight_headers(path) if weights else {}
    n = max(2, min(_SAMPLES, _MOST_SAMPLES // max(1, sum(map(len, headers.values())))))
    parts: dict[str, bytes] = {}
    for file, tensors in headers.items():
        with file.open("rb", buffering=0) as f:
            for t in tensors:
                name = canonical(t.name)
                digest = hashlib.blake2b(f"{name} {t.dtype} {t.shape}".encode(), digest_size=16)
                for i in range(n):
                    f.seek(t.offset + max(0, t.n_bytes - _SAMPLE_BYTES) * i // (n - 1))
                    digest.update(f.read(min(_SAMPLE_BYTES, t.n_bytes)))
                parts[name] = digest.digest()
    whole = hashlib.blake2b(_VERSION + repr(config).encode(), digest_size=16)
    for name in sorted(parts):
        whole.update(parts[name])
    return whole.digest()
