"""The bytes of one cache on one device, block-major."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import weakref
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hydrainfer.cache import CacheSpec, Part

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python knows it from 3.13 on
_PORTABLE = 1  # of cudaHostRegister: pinned for every CUDA context


class Region(NamedTuple):
    """A range of memory for one or several stores. `bytes` uint8 [n_bytes] read as zero at first; on a CPU, pages are
    allocated only when they are first written. `file`: the file behind shared memory."""

    bytes: Tensor
    file: MemoryFile | None = None

    @classmethod
    def of(
        cls, name: str, n_bytes: int, device: torch.device | str = "cpu", shared: bool = False, pinned: bool = False
    ) -> Region:
        device = torch.device(device)
        if shared:
            assert device.type == "cpu", device
            file, pages = _memory_file(f"hydrainfer:{name}", n_bytes)
            return cls(torch.frombuffer(pages, dtype=torch.uint8)[:n_bytes], file)
        if device.type != "cpu" or n_bytes == 0:
            return cls(torch.zeros(n_bytes, dtype=torch.uint8, device=device))
        if pinned:
            return cls(_pinned(n_bytes))
        pages = mmap.mmap(-1, n_bytes)  # the kernel gives zero pages on first touch; the tensor keeps the mapping alive
        return cls(torch.frombuffer(pages, dtype=torch.uint8))

    def clear(self, first: int, n_bytes: int) -> None:
        """Set bytes to zero that nothing reads or writes now. Returns when they are zero."""
        self.bytes[first : first + n_bytes].zero_()
        if self.bytes.device.type == "cuda":
            torch.cuda.current_stream(self.bytes.device).synchronize()


def _pinned(n_bytes: int) -> Tensor:
    """Pinned memory, uint8 [n_bytes], which is unpinned once no view of it is left. (torch's own allocator pins the
    next power of two.) Raises `MemoryError`."""
    pages = (ctypes.c_char * n_bytes).from_buffer(mmap.mmap(-1, n_bytes))
    address, runtime = ctypes.addressof(pages), torch.cuda.cudart()
    if error := int(runtime.cudaHostRegister(address, n_bytes, _PORTABLE)):
        raise MemoryError(f"{n_bytes} bytes of host memory cannot be pinned: CUDA error {error}")
    weakref.finalize(pages, runtime.cudaHostUnregister, address).atexit = False  # before the mapping goes
    return torch.frombuffer(pages, dtype=torch.uint8)


class BlockStore:
    """`n_blocks` blocks of one spec: `bytes` uint8 [n_blocks, block_bytes], so that one copy moves a block.

    Memory reads as zero at first, because a masked row that nobody wrote must not hold a NaN. On a CPU, pages are
    allocated only when blocks are first written.

    `layers`: for each of `spec.layers`, its parts by name, each a strided view of all blocks, `[n_blocks,
    *part.shape]`. `rows`, for a spec with one layer and one part whose first dimension is tokens: [n_blocks *
    block_tokens, ...]; row `block * block_tokens + offset` is one token's state, for embeddings [width]. `memory`: the
    file behind a `shared` store (CPU only), which other processes of this host may map. `pinned`: use host memory that
    a GPU can copy from and to by DMA. `region`: the memory to use, possibly together with other stores, instead of new
    memory.
    """

    def __init__(
        self,
        spec: CacheSpec,
        n_blocks: int,
        device: torch.device | str = "cpu",
        shared: bool = False,
        pinned: bool = False,
        region: Region | None = None,
    ) -> None:
        self.spec = spec
        self.n_blocks = n_blocks
        region = region or Region.of(spec.name, self.n_bytes, device, shared, pinned)
        self.memory = region.file
        if self.memory is not None:
            weakref.finalize(self, self.memory.close)
        self.bytes = region.bytes[: self.n_bytes].view(n_blocks, spec.block_bytes)

    @property
    def device(self) -> torch.device:
        return self.bytes.device

    @cached_property
    def layers(self) -> list[dict[str, Tensor]]:
        spec = self.spec
        firsts = [i * spec.offsets[-1] for i in range(len(spec.layers))]
        placed = list(zip(spec.parts, spec.offsets))
        return [{part.name: self._view(part, first + at) for part, at in placed} for first in firsts]

    def _view(self, part: Part, at: int) -> Tensor:
        """One part of one layer, which begins at byte `at` of every block: [n_blocks, *part.shape]."""
        cut = self.bytes[:, at : at + part.n_bytes].view(getattr(torch, part.dtype))
        return cut.unflatten(1, part.shape)

    @cached_property
    def rows(self) -> Tensor:
        ((part,),) = (layer.values() for layer in self.layers)
        return part.view(-1, *part.shape[2:])

    @property
    def n_bytes(self) -> int:
        return self.n_blocks * self.spec.block_bytes

    def touch(self) -> None:
        """Make the kernel allocate all pages now, so that first writes are faster. The bytes do not change."""
        if self.device.type == "cpu" and self.n_bytes:
            flat = self.bytes.flatten()
            flat[:: mmap.PAGESIZE] |= 0


class MemoryFile(NamedTuple):
    """Anonymous memory that another process opens as `/proc/PID/fd/FD`. It lives until the last process that maps it
    ends, however that ends. `name` is unique, so that a reused pid or descriptor is noticed."""

    fd: int
    name: str
    n_bytes: int

    def close(self) -> None:
        """Close the file. Nobody can open it any more; processes that have mapped it keep it. Safe to repeat."""
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{self.fd}").startswith(f"/memfd:{self.name}"):
                os.close(self.fd)


def _memory_file(prefix: str, n_bytes: int) -> tuple[MemoryFile, mmap.mmap]:
    """New anonymous memory, mapped. It is sealed: peers cannot write it, and it cannot shrink, which would kill a
    reader."""
    n_bytes = max(n_bytes, 1)  # an empty file cannot be mapped
    name = f"{prefix}:{secrets.token_hex(8)}"
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, n_bytes)
        pages = mmap.mmap(fd, n_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return MemoryFile(fd, name, n_bytes), pages
