"""The exports of an instance's caches to its peers, and its routes to theirs."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
import torch

from hydrainfer.core import ConfigError, ExportHandle
from hydrainfer.storage.places import WAYS, check_transport, device_name, here, ways_here
from hydrainfer.storage.server import BlockServer
from hydrainfer.storage.store import BlockStore
from hydrainfer.storage.transport import TIMEOUT_S, CopyBlocks, LocalExports, TransportError, Unreachable
from hydrainfer.storage.way import Tools, Way

_log = logging.getLogger(__name__)


class Exports:
    """The exports of one instance incarnation, `owner`, as `handles` by cache. `transport`: one of `WAYS`; auto offers
    all usual ones that can copy these caches, `local` only if given. `host`: the address at which its server listens
    and peers find it. `secret`: the cluster's. Raises `ConfigError` if the transport cannot work here."""

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
        self._owner, self._stores, self._local = owner, stores, local
        self._tools = Tools(secret, local, timeout_s)
        self._server: BlockServer | None = None
        self.handles: dict[str, ExportHandle] = {}
        try:
            ways = self._usual(device, host) if transport == "auto" else self._offered(WAYS[transport], host)
            self.handles = {spec: self._handle(spec, ways[spec]) for spec in stores}
        except BaseException:
            self.close()
            raise

    def _handle(self, spec: str, ways: dict[str, str]) -> ExportHandle:
        store, place = self._stores[spec], here()
        return ExportHandle(
            owner=self._owner,
            host=place.host,
            process=place.process,
            device=device_name(store.device),
            n_blocks=store.n_blocks,
            block_bytes=store.spec.block_bytes,
            ways=ways,
        )

    def _usual(self, device: torch.device, host: str) -> dict[str, dict[str, str]]:
        """The addresses of each store by all usual ways that work here, by cache and transport."""
        ways: dict[str, dict[str, str]] = {spec: {} for spec in self._stores}
        for way in WAYS.values():
            if not way.usual or way.check(device) or (not way.between and self._local is None):
                continue
            try:
                for spec, address in self._offered(way, host).items():
                    ways[spec] |= address
            except ConfigError as e:
                if not way.maps:
                    raise
                # CUDA memory may be no memory to share: virtual GPUs, WSL, confidential computing, expandable segments
                _log.warning("%s: peers on this host pull blocks over tcp instead, which is slower", e)
        return ways

    def _offered(self, way: Way, host: str) -> dict[str, dict[str, str]]:
        """The address of each store by one way. Raises `ConfigError` if that does not work here."""
        if way.offer is not None:
            offer, owner, tools = way.offer, self._owner, self._tools
            return {spec: {way.name: offer(f"{owner}/{spec}", store, tools)} for spec, store in self._stores.items()}
        if self._server is None:
            _check_server(host, self._tools.secret)
            backends = {name: other.backend for name, other in WAYS.items() if other.backend is not None}
            self._server = BlockServer(
                self._owner, self._stores, self._tools.secret, host, backends, self._tools.timeout_s
            )
        return {spec: {way.name: f"{self._server.address}/{spec}"} for spec in self._stores}

    def offer(self, name: str, host: str) -> dict[str, ExportHandle]:
        """See `engine.PeerPuller.offer`. A peer on another machine is offered sockets only."""
        ways = {spec: _ways_to(host, handle) for spec, handle in self.handles.items()}
        if self._server is None or any(WAYS[way].maps for there in ways.values() for way in there):
            return self.handles  # memory that the peer maps
        self._server.open_offer(name)
        replace = msgspec.structs.replace
        return {spec: replace(handle, ways=ways[spec], offer=name) for spec, handle in self.handles.items()}

    def end_offer(self, name: str) -> bool:
        """See `engine.PeerPuller.end_offer`."""
        return self._server is None or self._server.end_offer(name)

    def close(self) -> None:
        """End all exports, threads and connections. A peer that has mapped a store may go on reading. Safe to
        repeat."""
        if self._server is not None:
            self._server.close()
        for spec, handle in self.handles.items():
            if self._local is not None and "local" in handle.ways:
                self._local.remove(handle.ways["local"])
            memory = self._stores[spec].memory
            if memory is not None:
                memory.close()


def _ways_to(host: str, handle: ExportHandle) -> dict[str, str]:
    """The ways that a peer on this machine ("": unknown) can use."""
    if host in ("", handle.host):
        return handle.ways
    return {name: way for name, way in handle.ways.items() if not WAYS[name].maps}


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
        tools = Tools(secret, local, timeout_s, copy_blocks)
        self._transports = {name: way.open(tools) for name, way in WAYS.items() if transport in ("auto", name)}
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
