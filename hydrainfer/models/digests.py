"""Digests of all bytes of weight files, remembered in the user's cache folder.

A file's digests lie under its path, with the facts by which a change of the file is noticed. So only the first start
reads all weights. A record that is absent, damaged or of an earlier state of the file is no error: the file is read.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from hydrainfer.config import cache_folder, keep, locked
from hydrainfer.core import CheckpointError
from hydrainfer.machine import n_cores
from hydrainfer.models.safetensors_file import StoredTensor

_log = logging.getLogger(__name__)

_VERSION, _NUL = b"1", b"\0"
_PIECE_BYTES = 4 << 20
_THREADS = 4
_DIGEST_BYTES = 16
_LEAST_BYTES = 4 << 20  # fewer are read sooner than a record is worth
_SETTLED_NS = 2 * 10**9  # a file may change twice within one tick of its file system's clock

Headers = Mapping[Path, Sequence[StoredTensor]]
"""The tensors of each weight file."""


class _State(NamedTuple):
    """The facts by which a change of a file is noticed."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, file: Path) -> _State:
        """The state of a file, or of that to which the link leads. Raises `CheckpointError`."""
        try:
            facts = file.stat()
        except OSError as e:
            raise _unreadable(file, e) from None
        return cls(facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """Whether every later change will show in `ctime_ns`, which the system sets."""
        return self.ctime_ns + _SETTLED_NS < time.time_ns()


class _Record(msgspec.Struct, frozen=True):
    """The digests of a file in this state: by offset and number of bytes, whatever the names of the tensors."""

    state: _State
    digests: list[tuple[int, int, bytes]]


def tensor_digests(headers: Headers) -> dict[Path, list[bytes]]:
    """The digests of all tensors by file, in the order of `headers`: 16 bytes, a hash of all bytes of a tensor. Of
    processes and threads that start together, one reads, and the others wait for its records. Raises
    `CheckpointError`."""
    folder = _folder()
    if folder is None or _n_bytes(headers, headers) < _LEAST_BYTES:
        return _read_all(headers, list(headers), None)
    known = _remembered(headers, folder)
    if len(known) == len(headers):
        return known
    with locked(_record_of(folder, *headers)):
        known = _remembered(headers, folder)
        return known | _read_all(headers, [file for file in headers if file not in known], folder)


def _folder() -> Path | None:
    """The folder of the records; None if there can be none."""
    try:
        folder = cache_folder() / "weights"
        folder.mkdir(exist_ok=True)
        return folder
    except OSError:
        return None


def _record_of(folder: Path, *files: Path) -> Path:
    """The file with what is known of these files."""
    paths = [os.fsencode(file.resolve()) for file in files]
    return folder / f"{_sum(_NUL.join([_VERSION, *paths])).hex()}.record"


def _remembered(headers: Headers, folder: Path) -> dict[Path, list[bytes]]:
    """The digests by file, as far as they are remembered."""
    known: dict[Path, list[bytes]] = {}
    for file, tensors in headers.items():
        record = _read_record(_record_of(folder, file))
        if record is None or record.state != _State.of(file):
            continue
        digests = {(offset, n_bytes): digest for offset, n_bytes, digest in record.digests}
        found = [digests.get((t.offset, t.n_bytes)) for t in tensors]
        whole = [digest for digest in found if digest is not None]
        if len(whole) == len(tensors):
            known[file] = whole
    return known


def _read_record(path: Path) -> _Record | None:
    """The record in a file; None if there is none or it is damaged."""
    try:
        data = path.read_bytes()
        if _sum(data[_DIGEST_BYTES:]) != data[:_DIGEST_BYTES]:
            return None
        return msgspec.msgpack.decode(data[_DIGEST_BYTES:], type=_Record)
    except (OSError, msgspec.DecodeError):
        return None


def _sum(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _read_all(headers: Headers, files: Sequence[Path], folder: Path | None) -> dict[Path, list[bytes]]:
    """The digests of these files, which are read, and remembered in `folder`. Says so if it takes a while."""
    n_bytes, start_s = _n_bytes(headers, files), time.perf_counter()
    long = n_bytes >= _LEAST_BYTES
    if long:
        _log.info("reading all bytes of %.2f GB of weights, by which the shared store knows the model", n_bytes / 1e9)
    digests = {file: _read(file, headers[file], folder) for file in files}
    if long:
        _log.info("read %.2f GB of weights in %.1f s", n_bytes / 1e9, time.perf_counter() - start_s)
    return digests


def _read(file: Path, tensors: Sequence[StoredTensor], folder: Path | None) -> list[bytes]:
    """The digests of one file. They are remembered unless the file changes meanwhile."""
    before = _State.of(file)
    settled = before.settled
    try:
        with file.open("rb", buffering=0) as f, ThreadPoolExecutor(min(_THREADS, n_cores())) as threads:
            digests = list(threads.map(partial(_digest, file, f.fileno()), tensors))
    except OSError as e:
        raise _unreadable(file, e) from None
    if folder is not None and settled and _State.of(file) == before:
        places = [(t.offset, t.n_bytes, digest) for t, digest in zip(tensors, digests, strict=True)]
        data = msgspec.msgpack.encode(_Record(before, places))
        keep(_record_of(folder, file), _sum(data) + data)
    return digests


def _digest(file: Path, fd: int, tensor: StoredTensor) -> bytes:
    """The digest of a tensor's bytes, which are read in pieces."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    buffer = memoryview(bytearray(min(_PIECE_BYTES, tensor.n_bytes)))
    done = 0
    while done < tensor.n_bytes:
        n = os.preadv(fd, [buffer[: tensor.n_bytes - done]], tensor.offset + done)
        if not n:
            raise CheckpointError(f"{file}: ended early while reading weights")
        digest.update(buffer[:n])
        done += n
    return digest.digest()


def _n_bytes(headers: Headers, files: Mapping[Path, object] | Sequence[Path]) -> int:
    return sum(t.n_bytes for file in files for t in headers[file])


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{file}: cannot be read: {error.strerror}")
