"""Copies of blocks from peers' caches into ours, on separate threads, so that no lane waits for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import NamedTuple

import torch

from hydrainfer.cache import DEVICE, Pulls
from hydrainfer.core import ExportHandle
from hydrainfer.storage.exports import Exports
from hydrainfer.storage.local import LocalTransport
from hydrainfer.storage.store import BlockStore
from hydrainfer.storage.transport import LocalExports, Transport, TransportError, Unreachable, compute_alone

_log = logging.getLogger(__name__)
Tiers = Mapping[str, Mapping[str, BlockStore]]


class Copy:
    """A copy in flight; an `engine.ports.CopyTicket`. The copying thread sets `done` once, after `cut`."""

    __slots__ = ("cut", "done")

    wait_for = None

    def __init__(self) -> None:
        self.done: bool | None = None
        self.cut = False

    def poll(self, now: float) -> bool | None:  # noqa: ARG002 - a modelled copy needs the time
        return self.done

    def ready_at(self) -> float | None:
        return None


class _PullJob(NamedTuple):
    sources: dict[str, ExportHandle]
    pulls: Pulls
    copy: Copy


class StorePuller:
    """An `engine.ports.PeerPuller` with a thread per peer, so that a hanging peer delays no other. `tiers`: the stores
    of each tier that copies go to, by cache. It calls `wake()` after each copy. `close` also closes `exports` and
    `transport`."""

    def __init__(
        self,
        tiers: Tiers,
        exports: Exports,
        transport: Transport,
        wake: Callable[[], None],
    ) -> None:
        self.exports = exports.handles
        self._offers = exports
        self._tiers, self._transport, self._wake = tiers, transport, wake
        self._peers: dict[str, _PeerThread] = {}
        self._gone: set[str] = set()
        self._ending: list[_PeerThread] = []
        self._closed = False

    def pull(self, sources: dict[str, ExportHandle], pulls: Pulls) -> Copy:
        """Start a copy from one peer. The copy fails if `sources` have several owners, which a faulty peer might
        offer."""
        owner, *others = {sources[spec].owner for spec in pulls.blocks}
        copy = Copy()
        if self._closed or others or owner in self._gone:
            copy.done = False
            self._wake()
            return copy
        if owner not in self._peers:
            self._peers[owner] = _PeerThread(owner, self._tiers, self._transport, self._wake)
        self._peers[owner].put(_PullJob(sources, pulls, copy))
        return copy

    def offer(self, name: str, host: str) -> dict[str, ExportHandle]:
        return self._offers.offer(name, host)

    def end_offer(self, name: str) -> bool:
        return self._offers.end_offer(name)

    def forget(self, owner: str) -> None:
        self._gone.add(owner)
        peer = self._peers.pop(owner, None)
        if peer is not None:
            peer.end()
            self._ending = [p for p in self._ending if p.alive] + [peer]

    def close(self) -> None:
        """End all threads. Running copies fail. Safe to repeat."""
        self._closed = True
        for owner in list(self._peers):
            self.forget(owner)
        self._transport.close()
        for peer in self._ending:
            peer.join()
        self._offers.close()


class _PeerThread:
    """The thread that copies from one peer."""

    def __init__(self, owner: str, tiers: Tiers, transport: Transport, wake: Callable[[], None]) -> None:
        self._owner, self._tiers, self._transport, self._wake = owner, tiers, transport, wake
        self._queue: SimpleQueue[_PullJob | None] = SimpleQueue()
        self._ending = False
        self._thread = threading.Thread(target=self._loop, name=f"hydrainfer-pull-{owner}", daemon=True)
        self._thread.start()

    def put(self, pull: _PullJob) -> None:
        self._queue.put(pull)

    def end(self) -> None:
        """Tell the thread to end, without waiting. It ends once the copy it is waiting for has failed."""
        self._ending = True
        self._queue.put(None)
        self._transport.forget(self._owner)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _loop(self) -> None:
        compute_alone()
        device = next((s.device for s in self._tiers[DEVICE].values()), torch.device("cpu"))
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.inference_mode(), torch.cuda.stream(stream):
            while (pull := self._queue.get()) is not None:
                pull.copy.done = not self._ending and self._copied(pull)
                self._wake()
        self._transport.forget(self._owner)  # again: a copy that ran when `end` forgot may have opened a new session

    def _copied(self, pull: _PullJob) -> bool:
        try:
            stores = self._tiers[pull.pulls.tier]
            for spec, (source_ids, ids) in pull.pulls.blocks.items():
                self._transport.copy(pull.sources[spec], source_ids, stores[spec], ids)
        except TransportError as e:
            pull.copy.cut = isinstance(e, Unreachable)
            _log.warning("no blocks from %s: %s", self._owner, e)
        except Exception:
            _log.exception("a copy of blocks from %s failed", self._owner)
        else:
            return True
        return False


def between_tiers(tiers: Tiers, wake: Callable[[], None]) -> tuple[StorePuller, dict[str, dict[str, ExportHandle]]]:
    """A puller between the tiers of this instance, and the handles by which it reads each of them."""
    own = LocalExports()
    stores = {f"{tier}/{spec}": store for tier, held in tiers.items() for spec, store in held.items()}
    exports = Exports("tiers", stores, "local", local=own)
    handles = {tier: {spec: exports.handles[f"{tier}/{spec}"] for spec in held} for tier, held in tiers.items()}
    return StorePuller(tiers, exports, LocalTransport(own), wake), handles
