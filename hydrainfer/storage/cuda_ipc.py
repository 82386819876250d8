"""Copies between processes with GPUs on one host: the importer maps the exporter's device memory and copies,
one-sidedly.

Through the driver's own calls: torch's sharing of storages counts references for one reader per export. The exporter's
death may take the importer's CUDA context with it; then both are lost.
"""

from __future__ import annotations

import base64
import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hydrainfer.core import ConfigError, ExportHandle
from hydrainfer.storage.store import BlockStore
from hydrainfer.storage.transport import Peers, TransportError, Unreachable, pieces_of

_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE_BYTES)]


class Address(NamedTuple):
    """An allocation, and where in it the store begins."""

    handle: bytes
    offset: int

    def encode(self) -> str:
        return f"{base64.urlsafe_b64encode(self.handle).decode()}/{self.offset}"

    @classmethod
    def decode(cls, text: str) -> Address:
        """Raises `Unreachable` for anything else."""
        try:
            handle, offset = text.split("/")
            found = cls(base64.b64decode(handle, b"-_", validate=True), int(offset))
        except ValueError as e:
            raise Unreachable(f"{text!r} is no CUDA memory") from e
        if len(found.handle) != _HANDLE_BYTES or found.offset < 0:
            raise Unreachable(f"{text!r} is no CUDA memory")
        return found


def offer(store: BlockStore) -> str:
    """The address of a CUDA store. Raises `ConfigError` if its memory cannot be shared."""
    pointer = store.bytes.data_ptr()
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
    with torch.cuda.device(store.device):
        try:
            _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
            _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        except TransportError as e:
            raise ConfigError(
                f"CUDA memory cannot be shared between processes here ({e}); use transport tcp, and do not set "
                "expandable_segments in PYTORCH_CUDA_ALLOC_CONF for cuda-ipc",
                param="transport",
            ) from e
    return Address(bytes(handle.reserved), pointer - base.value).encode()


class CudaIpcTransport:
    """One mapping per store of a peer, kept. Copies run on the calling thread's stream."""

    def __init__(self) -> None:
        self._peers: Peers[_Mappings] = Peers()

    def copy(self, source: ExportHandle, source_ids: list[int], store: BlockStore, ids: list[int]) -> None:
        pieces = pieces_of(source, source_ids, store, ids)
        device = store.device
        with self._peers.use(source.owner, lambda: _Mappings(device)) as mappings:
            theirs = mappings.of(source)
            try:
                for first, into, n in pieces:
                    store.bytes[into : into + n].copy_(theirs[first : first + n], non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                event.synchronize()  # without a timeout: the copy cannot be taken back, so it has to end
            except RuntimeError as e:  # torch's word for a CUDA error
                raise TransportError(f"{source.owner}: {e}") from e

    def forget(self, owner: str) -> None:
        self._peers.forget(owner)

    def close(self) -> None:
        self._peers.close()


class _Mappings:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_address: dict[str, tuple[int, Tensor]] = {}  # (base, blocks)

    def of(self, source: ExportHandle) -> Tensor:
        """[n_blocks, block_bytes] of uint8, on the peer's device."""
        text = source.ways["cuda-ipc"]
        if text not in self._by_address:
            address, theirs = Address.decode(text), _visible(source)
            base = _open(source.owner, self._device, address.handle)
            at = base + address.offset
            blocks = torch.as_tensor(_DeviceBytes(at, (source.n_blocks, source.block_bytes)), device=theirs)
            self._by_address[text] = base, blocks
        return self._by_address[text][1]

    def abort(self) -> None:
        pass  # a copy on a device ends by itself, or with the context

    def close(self) -> None:
        with torch.cuda.device(self._device):
            for base, _ in self._by_address.values():
                try:
                    _call("cuIpcCloseMemHandle", ctypes.c_uint64(base))
                except TransportError:
                    continue  # the exporter is gone, perhaps the context too
        self._by_address.clear()


def _open(owner: str, device: torch.device, handle: bytes) -> int:
    """The address here of the peer's allocation; a second opening of the same one counts, and gives the same."""
    given, base = _IpcHandle((ctypes.c_ubyte * _HANDLE_BYTES)(*handle)), ctypes.c_uint64()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()  # makes the device's context this thread's
        try:
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        except TransportError as e:
            raise Unreachable(f"the CUDA memory of {owner} cannot be opened: {e}") from e
    return base.value


class _DeviceBytes:
    """Memory on a device that torch did not allocate, in the form that `torch.as_tensor` takes."""

    def __init__(self, pointer: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {"data": (pointer, False), "shape": shape, "typestr": "|u1", "version": 3}


def _visible(source: ExportHandle) -> torch.device:
    """The peer's device, as this process counts them."""
    for i in range(torch.cuda.device_count()):
        if f"cuda:{torch.cuda.get_device_properties(i).uuid}" == source.device:
            return torch.device("cuda", i)
    raise Unreachable(f"{source.owner} is on a GPU that this process does not see (CUDA_VISIBLE_DEVICES)")


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise TransportError(f"no CUDA driver: {e}") from e


def _call(name: str, *args: Any) -> None:
    """A call of the driver. Raises `TransportError` with the name of its error."""
    code = getattr(_driver(), name)(*args)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
        raise TransportError(f"{name}: {(text.value or b'error %d' % code).decode()}")
