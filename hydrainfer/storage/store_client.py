"""The threads of one instance that wait for its shared store, so that no step does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import NamedTuple

import torch

from hydrainfer.cache import BlockName, BlockRef, StoreJob, StoreResult, layout_digest, name_of, stored_bytes
from hydrainfer.storage.store import BlockStore
from hydrainfer.storage.transport import compute_alone
from hydrainfer.stores.port import SharedStore, StoreError, StoreFull

_log = logging.getLogger(__name__)
_LOADERS = 2
_BUFFER_BYTES = 8 << 20
_LOOK_S = 0.002
_NEVER = float("inf")
_CLOSE_S = 1.0  # how long closing waits for a thread: one that hangs is left behind


class Ticket:
    """An `engine.ports.StoreTicket`."""

    __slots__ = ("began_s", "lock", "result", "unwanted")

    def __init__(self) -> None:
        self.result: StoreResult | None = None
        self.unwanted = False
        self.began_s = _NEVER
        self.lock = threading.Lock()  # whoever holds it may touch the blocks, if it is wanted

    def poll(self, now: float) -> StoreResult | None:  # noqa: ARG002 - a modelled store needs the time
        return self.result

    def ready_at(self) -> float | None:
        return None

    def began_at(self) -> float:
        return self.began_s

    def wait(self, seconds: float) -> float:
        until_s = time.monotonic() + seconds
        while self.result is None and (left_s := until_s - time.monotonic()) > 0.0:
            time.sleep(min(_LOOK_S, left_s))
        return max(0.0, until_s - time.monotonic())

    def cancel(self) -> None:
        with self.lock:
            self.unwanted = True

    def wanted(self) -> bool:
        with self.lock:
            return not self.unwanted


class _Task(NamedTuple):
    job: StoreJob
    ticket: Ticket


class ThreadedClient:
    """An `engine.ports.StoreClient`. `stores`: the blocks of the instance, by cache; `clock`: the engine's. It calls
    `wake()` when a job begins and when it is over. Questions, loads and writes do not wait for each other. `close` also
    closes `shared`."""

    def __init__(
        self,
        shared: SharedStore,
        stores: Mapping[str, BlockStore],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shared, self._stores, self._wake, self._clock = shared, stores, wake, clock
        self._layouts = {name: layout_digest(store.spec) for name, store in stores.items()}
        self._closed = False
        self._queues: dict[str, SimpleQueue[_Task | None]] = {}
        self._threads: list[threading.Thread] = []
        self._loading: dict[str, Ticket] = {}  # by thread
        self._local = threading.local()
        for names, n in ((("ask",), 1), (("load",), _LOADERS), (("save", "touch"), 1)):
            queue: SimpleQueue[_Task | None] = SimpleQueue()
            self._queues |= dict.fromkeys(names, queue)
            for i in range(n):
                thread = threading.Thread(
                    target=self._loop, args=(queue,), name=f"hydrainfer-store-{names[0]}-{i}", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    @property
    def n_corrupt(self) -> int:
        return self._shared.counts["corrupt"]

    def start(self, job: StoreJob) -> Ticket:
        ticket = Ticket()
        if self._closed:
            ticket.result = StoreResult({}, "the store is closed")
        elif job.what == "load" and self._hangs():
            ticket.result = StoreResult({}, "earlier loads have not ended yet")
        else:
            self._queues[job.what].put(_Task(job, ticket))
        return ticket

    def close(self) -> None:
        """End all threads. Safe to repeat."""
        if self._closed:
            return
        self._closed = True
        for queue in {id(queue): queue for queue in self._queues.values()}.values():
            for _ in range(_LOADERS):
                queue.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)
        self._shared.close()

    def _hangs(self) -> bool:
        """Whether every thread that loads is at something that was given up."""
        loading = list(self._loading.values())
        return len(loading) == _LOADERS and all(ticket.unwanted for ticket in loading)

    def _loop(self, queue: SimpleQueue[_Task | None]) -> None:
        compute_alone()
        with torch.inference_mode():
            while (task := queue.get()) is not None:
                task.ticket.began_s = self._clock()
                if task.job.what == "load":
                    self._loading[threading.current_thread().name] = task.ticket
                self._wake()
                task.ticket.result = self._done(task)
                self._loading.pop(threading.current_thread().name, None)
                self._wake()

    def _done(self, task: _Task) -> StoreResult:
        job, ticket, there = task.job, task.ticket, dict[str, list[bool]]()
        start_s = time.perf_counter()
        try:
            for spec, (refs, blocks) in job.blocks.items():
                if not ticket.wanted() or self._closed:
                    return StoreResult({}, "the store is closed" if self._closed else "")
                there[spec] = self._carry_out(job.what, spec, refs, blocks, ticket)
        except StoreError as e:
            return StoreResult({}, str(e) or type(e).__name__, isinstance(e, StoreFull))
        except Exception as e:
            _log.exception("the store %s failed", self._shared.place)
            return StoreResult({}, f"{type(e).__name__}: {e}")
        return StoreResult(there, seconds=time.perf_counter() - start_s)

    def _carry_out(
        self, what: str, spec: str, refs: Sequence[BlockRef], blocks: Sequence[int], ticket: Ticket
    ) -> list[bool]:
        names = [self._name(spec, ref) for ref in refs]
        if what == "ask":
            return self._shared.has(names)
        if what == "touch":
            return self._shared.touch(names)
        store = self._stores[spec]
        if what == "load":
            return self._load(store, names, blocks, ticket)
        n = self._shared.write(names, _views(store, blocks), ticket.wanted)
        return [i < n for i in range(len(names))]

    def _name(self, spec: str, ref: BlockRef) -> BlockName:
        return name_of(self._layouts[spec], spec, ref)

    def _load(self, store: BlockStore, names: Sequence[BlockName], blocks: Sequence[int], ticket: Ticket) -> list[bool]:
        """Which blocks came. They are read elsewhere first: the room of a load that is given up is free at once, also
        if reading hangs. What did not come, or came broken, is not written to the cache, as it may hold a NaN."""
        size, there = stored_bytes(store.spec), list[bool]()
        buffer = self._buffer(size, pinned=store.device.type != "cpu")
        for i in range(0, len(blocks), len(buffer)):
            some = blocks[i : i + len(buffer)]
            came = self._shared.read(names[i : i + len(buffer)], [row.numpy().data for row in buffer[: len(some)]])
            there += came
            with ticket.lock:
                if ticket.unwanted:
                    return there + [False] * (len(blocks) - len(there))
                _put(store, some, buffer[: len(some)], came)
        return there

    def _buffer(self, size: int, *, pinned: bool) -> torch.Tensor:
        """This thread's room for blocks of so many bytes, one in each row."""
        n_rows = max(1, _BUFFER_BYTES // size)
        flat: torch.Tensor | None = getattr(self._local, "flat", None)
        if flat is None or len(flat) < n_rows * size:
            flat = self._local.flat = torch.empty(max(_BUFFER_BYTES, size), dtype=torch.uint8, pin_memory=pinned)
        return flat[: n_rows * size].view(n_rows, size)


def _put(store: BlockStore, blocks: Sequence[int], rows: torch.Tensor, came: Sequence[bool]) -> None:
    """Write those blocks that came, and wait until they are written."""
    if store.device.type == "cpu":
        for block, row, has in zip(blocks, rows, came, strict=True):
            if has:
                store.bytes[block, : len(row)].copy_(row)
        return
    mask, ids = torch.tensor(came, device=store.device), torch.tensor(blocks, device=store.device)
    store.bytes[ids[mask], : rows.shape[1]] = rows.to(store.device)[mask]
    torch.cuda.current_stream(store.device).synchronize()


def _views(store: BlockStore, blocks: Sequence[int]) -> list[memoryview]:
    """The bytes of blocks, without the padding behind them; on a GPU, of a copy."""
    size = stored_bytes(store.spec)
    if store.device.type == "cpu":
        return [store.bytes[block, :size].numpy().data for block in blocks]
    copied = store.bytes[torch.tensor(blocks, device=store.device), :size].cpu()
    return [row.numpy().data for row in copied]
