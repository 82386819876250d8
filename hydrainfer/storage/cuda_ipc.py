"""Copies between processes with GPUs on one host: the importer maps the exporter's device memory and copies from it,
without the exporter's help. Tests have a driver of their own.

The driver is called directly, because torch's sharing of storages counts references for one reader per export. If the
exporter dies, the importer's CUDA context may be lost with it.
"""

from __future__ import annotations

import base64
import ctypes
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from hydrainfer.core import ConfigError, ExportHandle
from hydrainfer.ops import upload
from hydrainfer.storage.store import BlockStore
from hydrainfer.storage.transport import CopyBlocks, PeerTransport, TransportError, Unreachable, pieces_of
from hydrainfer.storage.way import ProcessPlace, Tools, Way, on_cuda

_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_ACCESS = 16  # bytes; the kernel reads so many at once
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE_BYTES)]


class IpcAllocation(NamedTuple):
    """A CUDA allocation, and the offset of a store in it."""

    handle: bytes
    offset: int

    def encode(self) -> str:
        return f"{base64.urlsafe_b64encode(self.handle).decode()}/{self.offset}"

    @classmethod
    def decode(cls, text: str) -> IpcAllocation:
        """The allocation written by `encode`. Raises `Unreachable` for any other text."""
        try:
            handle, offset = text.split("/")
            found = cls(base64.b64decode(handle, b"-_", validate=True), int(offset))
        except ValueError as e:
            raise Unreachable(f"{text!r} is no CUDA memory") from e
        if len(found.handle) != _HANDLE_BYTES or found.offset < 0:
            raise Unreachable(f"{text!r} is no CUDA memory")
        return found


def offer(key: str, store: BlockStore, tools: Tools) -> str:  # noqa: ARG001 - the address says it all
    """The address of a CUDA store. Raises `ConfigError` if its memory cannot be shared."""
    pointer = store.bytes.data_ptr()
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
    with torch.cuda.device(store.device):
        _bind(store.device)
        try:
            _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
            _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        except TransportError as e:
            raise ConfigError(
                f"CUDA memory cannot be shared between processes here ({e}); use transport tcp, and do not set "
                "expandable_segments in PYTORCH_CUDA_ALLOC_CONF for cuda-ipc",
                param="transport",
            ) from e
    return IpcAllocation(bytes(handle.reserved), pointer - base.value).encode()


class CudaIpcTransport(PeerTransport["_OpenAllocations"]):
    """The transport over CUDA IPC. It keeps one mapping per store of a peer. A copy of one run of blocks is a driver
    call on the calling thread's stream, which is not the default one. Several runs are one launch of `copy_blocks`, if
    there is such a kernel: the driver needs some 5 us for each run (an H200 copied 512 KiB runs at 96 GB/s)."""

    def __init__(self, copy_blocks: CopyBlocks | None = None) -> None:
        super().__init__()
        self._copy_blocks = copy_blocks

    def copy(self, source: ExportHandle, source_ids: list[int], store: BlockStore, ids: list[int]) -> None:
        pieces = pieces_of(source, source_ids, store, ids)
        size, on_host = store.spec.block_bytes, store.device.type == "cpu"
        device = torch.device("cuda", torch.cuda.current_device()) if on_host else store.device
        with self._peers.use(source.owner, lambda: _OpenAllocations(device)) as mappings, torch.cuda.device(device):
            _bind(device)
            theirs, ours = mappings.of(source), store.bytes.data_ptr()
            stream = torch.cuda.current_stream(device).cuda_stream
            assert stream, "the legacy default stream would wait for all others"
            if not pieces:
                return
            together = len(pieces) > 1 and not on_host and not size % _ACCESS and not theirs % _ACCESS
            try:
                if self._copy_blocks is not None and together:
                    on = upload({"to": np.array(ids), "from": np.array(source_ids)}, device)
                    self._copy_blocks(store.bytes, on["to"], theirs, on["from"])
                    return
                _copy([(ours + p.into * size, theirs + p.first * size, p.n * size) for p in pieces], stream, on_host)
            finally:  # no timeout: a copy cannot be cancelled, so it has to end, even if another was refused
                _call("cuStreamSynchronize", ctypes.c_void_p(stream))


class _OpenAllocations:
    """The allocations of one peer that this process has opened, by address."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bases: dict[str, int] = {}

    def of(self, source: ExportHandle) -> int:
        """The address of the peer's first block in this process. This process need not see the peer's GPU: the driver
        maps the memory into our own context (CUDA 10.1 and later)."""
        text = source.ways["cuda-ipc"]
        address = IpcAllocation.decode(text)
        if text not in self._bases:
            self._bases[text] = _open(source.owner, self._device, address.handle)
        return self._bases[text] + address.offset

    def abort(self) -> None:
        pass  # a copy on a device ends by itself, or with the context

    def close(self) -> None:
        bases, self._bases = list(self._bases.values()), {}
        with torch.cuda.device(self._device), suppress(TransportError):  # perhaps the context is gone
            _bind(self._device)
            for base in bases:
                with suppress(TransportError):  # the exporter is gone
                    _call("cuIpcCloseMemHandle", ctypes.c_uint64(base))


def _open(owner: str, device: torch.device, handle: bytes) -> int:
    """The address of the peer's allocation in this process. Opening it again gives the same address, and is counted."""
    given, base = _IpcHandle((ctypes.c_ubyte * _HANDLE_BYTES)(*handle)), ctypes.c_uint64()
    with torch.cuda.device(device):
        _bind(device)
        try:
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        except TransportError as e:
            raise Unreachable(f"the CUDA memory of {owner} cannot be opened: {e}") from e
    return base.value


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _CopyAttributes(ctypes.Structure):
    _fields_ = [
        ("source_order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    ]


def _copy(copies: list[tuple[int, int, int]], stream: int, to_host: bool) -> None:
    """Start copies of (target, source, bytes) on the stream. Within a device, one call starts all if the driver
    supports that (CUDA 13), because many small copies take as long as their calls."""
    if to_host or not hasattr(_driver(), "cuMemcpyBatchAsync_v2"):
        name = "cuMemcpyDtoHAsync_v2" if to_host else "cuMemcpyDtoDAsync_v2"
        for target, source, n in copies:
            args = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(n), ctypes.c_void_p(stream)
            _call(name, *args)
        return
    n, (targets, sources, sizes) = len(copies), zip(*copies)
    pointers = ctypes.c_uint64 * n
    _call(
        "cuMemcpyBatchAsync_v2",
        pointers(*targets),
        pointers(*sources),
        (ctypes.c_size_t * n)(*sizes),
        ctypes.c_size_t(n),
        ctypes.byref(_CopyAttributes(source_order=_STREAM_ORDER)),
        (ctypes.c_size_t * 1)(0),  # the attributes hold from the first copy on
        ctypes.c_size_t(1),
        ctypes.c_void_p(stream),
    )


def _bind(device: torch.device) -> None:
    """Make the device's primary context, which torch uses too, the one of the calling thread. A new thread has none,
    and the driver refuses its calls: a mapping that is not closed keeps the memory of an exporter that has died."""
    context = _primary_context(device.index or 0)
    current = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(current))
    if current.value != context:
        _call("cuCtxSetCurrent", ctypes.c_void_p(context))


@cache
def _primary_context(index: int) -> int | None:
    """The primary context of the device with this index. It is kept until the process ends."""
    ordinal, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", ctypes.c_uint(0))
    _call("cuDeviceGet", ctypes.byref(ordinal), ctypes.c_int(index))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    return context.value


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise TransportError(f"no CUDA driver: {e}") from e


def _call(name: str, *args: Any) -> None:
    """Call the driver. Raises `TransportError` with the name of its error."""
    code = getattr(_driver(), name)(*args)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
        raise TransportError(f"{name}: {(text.value or b'error %d' % code).decode()}")


def _reaches(source: ExportHandle, place: ProcessPlace, device: torch.device) -> str:
    on_cuda = source.device.startswith("cuda") and device.type == "cuda"
    return "same host, both on CUDA" if source.host == place.host and on_cuda else ""


WAY = Way(
    "cuda-ipc",
    check=on_cuda("cuda-ipc", twin="shared-memory"),
    offer=offer,
    reaches=_reaches,
    open=lambda tools: CudaIpcTransport(tools.copy_blocks),
    within=False,
)
