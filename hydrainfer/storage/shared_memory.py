"""Copies between processes of one host: the importer maps the exporter's memory, read-only, and copies from it. The
CUDA counterpart is `cuda_ipc`."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
import torch

from hydrainfer.core import ExportHandle
from hydrainfer.storage.store import BlockStore
from hydrainfer.storage.transport import PeerTransport, Unreachable, pieces_of
from hydrainfer.storage.way import ProcessPlace, Tools, Way, on_cpu


def offer(key: str, store: BlockStore, tools: Tools) -> str:  # noqa: ARG001 - the address says it all
    """The address of a shared store: where to open its memory, and facts to check it by."""
    assert store.memory is not None, "not a shared store"
    return f"{os.getpid()}/{store.memory.fd}/{os.fstat(store.memory.fd).st_ino}/{store.memory.name}"


class SharedMemoryTransport(PeerTransport["_Mappings"]):
    """The transport over shared memory. It keeps one mapping per store of a peer, which survives the peer. Both
    processes need the same user."""

    def copy(self, source: ExportHandle, source_ids: list[int], store: BlockStore, ids: list[int]) -> None:
        pieces = pieces_of(source, source_ids, store, ids)
        ours = store.bytes.numpy()
        with self._peers.use(source.owner, _Mappings) as mappings:
            theirs = mappings.of(source)
            for first, into, n in pieces:
                np.copyto(ours[into : into + n], theirs[first : first + n])


class _Mappings:
    def __init__(self) -> None:
        self._mapped: dict[tuple[str, int], np.ndarray] = {}  # by address and block size

    def of(self, source: ExportHandle) -> np.ndarray:
        """The peer's blocks, [n_blocks, block_bytes], read-only. The array keeps the mapping alive."""
        key = address, size = source.ways["shared-memory"], source.block_bytes
        if key not in self._mapped:
            n_bytes = source.n_blocks * size
            pages = _map(source.owner, address, n_bytes)
            self._mapped[key] = np.frombuffer(pages, np.uint8, n_bytes).reshape(source.n_blocks, size)
        return self._mapped[key]

    def abort(self) -> None:
        pass  # a copy in memory ends by itself

    def close(self) -> None:
        self._mapped.clear()


def _map(owner: str, address: str, n_bytes: int) -> mmap.mmap:
    try:
        pid, fd, inode, name = address.split("/")
        ours = os.open(f"/proc/{int(pid)}/fd/{int(fd)}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as e:
        raise Unreachable(f"the memory of {owner} cannot be opened ({e}); does it run, as the same user?") from e
    try:
        _check(ours, owner, int(inode), name, n_bytes)
        return mmap.mmap(ours, n_bytes, prot=mmap.PROT_READ)
    except (OSError, ValueError) as e:
        raise Unreachable(f"the memory of {owner} cannot be mapped: {e}") from e
    finally:
        os.close(ours)


def _check(fd: int, owner: str, inode: int, name: str, n_bytes: int) -> None:
    """Check that the memory is the offered one and cannot shrink, because reading it could then kill this process.
    Raises `Unreachable`."""
    found, facts = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd)
    if not found.startswith(f"/memfd:{name}") or facts.st_ino != inode:
        raise Unreachable(f"{owner} is gone: its memory's place is taken by {found}")
    if facts.st_size < n_bytes or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise Unreachable(f"the memory of {owner} is not what it offered: {facts.st_size} bytes, not {n_bytes}")


def _reaches(source: ExportHandle, place: ProcessPlace, device: torch.device) -> str:
    return "same host" if source.host == place.host and source.device == device.type == "cpu" else ""


WAY = Way(
    "shared-memory",
    check=on_cpu("shared-memory", twin="cuda-ipc"),
    offer=offer,
    reaches=_reaches,
    open=lambda _: SharedMemoryTransport(),
)
