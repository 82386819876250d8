"""The exports of an instance's caches to its peers, and its routes to theirs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from hydrainfer.core import ConfigError, ExportHandle
from hydrainfer.storage import cuda_ipc, shared_memory
from hydrainfer.storage.cuda_ipc import CudaIpcTransport
from hydrainfer.storage.nccl import NCCL
from hydrainfer.storage.places import OVER_SERVER, check_transport, device_name, here, ways_here
from hydrainfer.storage.server import BlockServer
from hydrainfer.storage.shared_memory import SharedMemoryTransport
from hydrainfer.storage.store import BlockStore
from hydrainfer.storage.tcp import TcpTransport
from hydrainfer.storage.transport import (
    TIMEOUT_S,
    CopyBlocks,
    LocalExports,
    LocalTransport,
    Transport,
    TransportError,
    Unreachable,
)
from hydrainfer.storage.two_sided import GLOO, TwoSidedTransport

_log = logging.getLogger(__name__)
_BACKENDS = {b.name: b for b in (GLOO, NCCL)}


class Exports:
    """The exports of one instance incarnation, `owner`, as `handles` by cache. `transport`: one of `TRANSPORTS`; auto
    offers shared memory or CUDA IPC, TCP, and `local` if given. `host`: the address at which its server listens and
    peers find it. `secret`: the cluster's. Raises `ConfigError` if the transport cannot work here."""

    def __init__(
        self,
        owner: str,
        stores: Mapping[str, BlockStore],
        transport: str = "auto",
        *,
        host: str = "127.0.0.1",
        secret: bytes = b"",
        local: LocalExports | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        device = next((s.device for s in stores.values()), torch.device("cpu"))
        check_transport(transport, device)
        names = _offered(transport, device, local is not None)
        if transport == "auto" and "cuda-ipc" in names and (problem := _not_shared(stores)):
            names.remove("cuda-ipc")
            _log.warning("%s: peers on this host pull blocks over tcp instead, which is slower", problem)
        self._stores, self._local = stores, local
        self._server: BlockServer | None = None
        if set(names) & set(OVER_SERVER):
            _check_server(host, secret)
            self._server = BlockServer(owner, stores, secret, host, _BACKENDS, timeout_s)
        try:
            self.handles = {spec: self._handle(owner, spec, names) for spec in stores}
        except BaseException:
            self.close()
            raise

    def _handle(self, owner: str, spec: str, names: list[str]) -> ExportHandle:
        store, place = self._stores[spec], here()
        return ExportHandle(
            owner=owner,
            host=place.host,
            process=place.process,
            device=device_name(store.device),
            n_blocks=store.n_blocks,
            block_bytes=store.spec.block_bytes,
            ways={name: self._address(name, f"{owner}/{spec}", spec) for name in names},
        )

    def _address(self, name: str, key: str, spec: str) -> str:
        match name:
            case "local":
                assert self._local is not None, "no LocalExports"
                self._local.add(key, self._stores[spec])
                return key
            case "shared-memory":
                return shared_memory.offer(self._stores[spec])
            case "cuda-ipc":
                return cuda_ipc.offer(self._stores[spec])
            case _:
                assert self._server is not None
                return f"{self._server.address}/{spec}"

    def close(self) -> None:
        """End all exports, threads and connections. A peer that has mapped a store may go on reading. Safe to
        repeat."""
        if self._server is not None:
            self._server.close()
        for spec, handle in getattr(self, "handles", {}).items():
            if self._local is not None and "local" in handle.ways:
                self._local.remove(handle.ways["local"])
            memory = self._stores[spec].memory
            if memory is not None:
                memory.close()


def _offered(transport: str, device: torch.device, local: bool) -> list[str]:
    if transport != "auto":
        return [transport]
    return [*(["local"] if local else []), "shared-memory" if device.type == "cpu" else "cuda-ipc", "tcp"]


def _not_shared(stores: Mapping[str, BlockStore]) -> str:
    """Why CUDA memory cannot be shared between processes here (virtual GPUs, WSL, confidential computing, an
    allocator's expandable segments); empty if it can."""
    try:
        for store in stores.values():
            cuda_ipc.offer(store)
    except ConfigError as e:
        return str(e)
    return ""


def _check_server(host: str, secret: bytes) -> None:
    if not secret:
        raise ConfigError("transports over sockets need the cluster's secret", param="transport")
    if host in ("", "0.0.0.0", "::"):
        raise ConfigError("give the address at which peers reach this host, not a wildcard", param="host")


class Routes:
    """The `Transport` to every peer: `transport` or, with auto, the best that each peer offers. A way that does not
    work is skipped. `device`: the device of our caches. `copy_blocks`: the kernel that copies
    scattered blocks, if there is one."""

    def __init__(
        self,
        transport: str,
        device: torch.device | str = "cpu",
        *,
        secret: bytes = b"",
        local: LocalExports | None = None,
        timeout_s: float = TIMEOUT_S,
        copy_blocks: CopyBlocks | None = None,
    ) -> None:
        self._name, self._device, self._place = transport, torch.device(device), here()
        check_transport(transport, self._device)
        makers: dict[str, Callable[[], Transport]] = {
            "local": lambda: LocalTransport(local or LocalExports(), copy_blocks),
            "shared-memory": SharedMemoryTransport,
            "cuda-ipc": lambda: CudaIpcTransport(copy_blocks),
            "tcp": lambda: TcpTransport(secret, timeout_s),
            "gloo": lambda: TwoSidedTransport(GLOO, secret, timeout_s),
            "nccl": lambda: TwoSidedTransport(NCCL, secret, timeout_s),
        }
        self._transports = {name: make() for name, make in makers.items() if transport in ("auto", name)}
        self._chosen: dict[str, str] = {}

    def copy(self, source: ExportHandle, source_ids: list[int], store: BlockStore, ids: list[int]) -> None:
        chosen = self._chosen.get(source.owner)
        if chosen is not None:
            try:
                self._transports[chosen].copy(source, source_ids, store, ids)
                return
            except Unreachable:
                self._chosen.pop(source.owner, None)  # choose another way
        problems = []
        for name, why in self._ways(source):
            try:
                self._transports[name].copy(source, source_ids, store, ids)
            except Unreachable as e:
                problems.append(f"{name}: {e}")
                continue
            self._chosen[source.owner] = name
            _log.info("pulling blocks from %s over %s: %s", source.owner, name, "; ".join([why, *problems]))
            return
        raise Unreachable("; ".join(problems) or f"no way from {source.owner} to here among {', '.join(source.ways)}")

    def _ways(self, source: ExportHandle) -> list[tuple[str, str]]:
        if self._name == "auto":
            return ways_here(source, self._place, self._device)
        if self._name not in source.ways:
            raise TransportError(f"{source.owner} offers {', '.join(source.ways)}, not {self._name}")
        return [(self._name, "configured")]

    def forget(self, owner: str) -> None:
        self._chosen.pop(owner, None)
        for transport in self._transports.values():
            transport.forget(owner)

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()
