"""The identities of a model, which are parts of the keys of its embeddings and of its KV.

fingerprint         from samples of the weights: for keys that no other server sees
whole_fingerprint   from all bytes of the weights: for what outlives a server, where another may look for it
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from hydrainfer.checkpoint import ModelConfig
from hydrainfer.families import family_of, read_config
from hydrainfer.models.digests import tensor_digests
from hydrainfer.models.safetensors_file import StoredTensor
from hydrainfer.models.stored import weight_headers

_SAMPLED, _WHOLE = b"1", b"whole 1"  # versions
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
    headers = weight_headers(path) if weights else {}
    n = max(2, min(_SAMPLES, _MOST_SAMPLES // max(1, sum(map(len, headers.values())))))
    parts: list[bytes] = []
    for file, tensors in headers.items():
        with file.open("rb", buffering=0) as f:
            for t in tensors:
                digest = _described(t, config)
                for i in range(n):
                    f.seek(t.offset + max(0, t.n_bytes - _SAMPLE_BYTES) * i // (n - 1))
                    digest.update(f.read(min(_SAMPLE_BYTES, t.n_bytes)))
                parts.append(digest.digest())
    return _together(_SAMPLED, config, parts)


def whole_fingerprint(path: str | Path, config: ModelConfig | None = None) -> bytes:
    """16 bytes, as `fingerprint`, but of all bytes of each tensor. Reads all weights the first time, 1 to 2 s
    per GB and core; what files hold is remembered until they change. Raises `CheckpointError`."""
    path = Path(path).expanduser()
    config = config or read_config(path)
    headers = weight_headers(path)
    parts: list[bytes] = []
    for file, contents in tensor_digests(headers).items():
        for t, content in zip(headers[file], contents, strict=True):
            digest = _described(t, config)
            digest.update(content)
            parts.append(digest.digest())
    return _together(_WHOLE, config, parts)


def _described(tensor: StoredTensor, config: ModelConfig) -> hashlib.blake2b:
    """The hash of a tensor, of which its bytes are still left out."""
    name = family_of(config).names.canonical(tensor.name)
    return hashlib.blake2b(f"{name} {tensor.dtype} {tensor.shape}".encode(), digest_size=16)


def _together(version: bytes, config: ModelConfig, tensors: Iterable[bytes]) -> bytes:
    """The hash of a model from those of its tensors, in whatever order and files these are."""
    whole = hashlib.blake2b(version + repr(config).encode(), digest_size=16)
    for digest in sorted(tensors):
        whole.update(digest)
    return whole.digest()
