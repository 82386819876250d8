"""A shared store on the virtual clock: what it has, and how long reading and writing take."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

import msgspec

from hydrainfer.cache import CacheSpec, StoreJob, StoreResult, stored_bytes


class StoreModel(msgspec.Struct, frozen=True, kw_only=True):
    """A store. `read_bytes_per_s`, `write_bytes_per_s`: of one instance; `latency_s`: of each job; `n_bytes`: the most
    that it keeps, of what was used last."""

    read_bytes_per_s: float = 1.5e9
    write_bytes_per_s: float = 0.6e9
    latency_s: float = 2e-4
    n_bytes: float = float("inf")


class Shelf:
    """What the store has, by cache and key, least recently used first."""

    def __init__(self, model: StoreModel) -> None:
        self.model = model
        self._sizes: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        self._n_bytes = 0

    def has(self, spec: str, key: bytes) -> bool:
        return (spec, key) in self._sizes

    def touch(self, spec: str, key: bytes) -> bool:
        there = (spec, key) in self._sizes
        if there:
            self._sizes.move_to_end((spec, key))
        return there

    def put(self, spec: str, key: bytes, n_bytes: int) -> bool:
        if not self.touch(spec, key):
            self._sizes[spec, key] = n_bytes
            self._n_bytes += n_bytes
        while self._n_bytes > self.model.n_bytes:
            self._n_bytes -= self._sizes.popitem(last=False)[1]
        return self.has(spec, key)


class ModelledStore:
    """An `engine.ports.StoreClient` of one instance, which reads one job at a time and writes another."""

    n_corrupt = 0

    def __init__(self, shelf: Shelf, specs: Mapping[str, CacheSpec], clock: Callable[[], float]) -> None:
        self._shelf, self._clock = shelf, clock
        self._sizes = {name: stored_bytes(spec) for name, spec in specs.items()}
        self._until_s = {"load": 0.0, "save": 0.0}

    def start(self, job: StoreJob) -> ModelledJob:
        model, now = self._shelf.model, self._clock()
        seconds = model.latency_s
        if job.what in self._until_s:
            rate = model.read_bytes_per_s if job.what == "load" else model.write_bytes_per_s
            seconds += sum(len(refs) * self._sizes[spec] for spec, (refs, _) in job.blocks.items()) / rate
            end_s = self._until_s[job.what] = max(now, self._until_s[job.what]) + seconds
            return ModelledJob(self, job, end_s, seconds)
        return ModelledJob(self, job, now + seconds, seconds)

    def result(self, job: StoreJob, seconds: float) -> StoreResult:
        """What a job that is done has found."""
        shelf, sizes = self._shelf, self._sizes
        does: dict[str, Callable[[str, bytes], bool]] = {
            "ask": shelf.has,
            "load": shelf.touch,
            "touch": shelf.touch,
            "save": lambda spec, key: shelf.put(spec, key, sizes[spec]),
        }
        do = does[job.what]
        there = {spec: [do(spec, ref.key) for ref in refs] for spec, (refs, _) in job.blocks.items()}
        return StoreResult(there, seconds=seconds)

    def close(self) -> None:
        """Nothing to do: nothing runs outside the virtual clock."""


class ModelledJob:
    """An `engine.ports.StoreTicket` that is done at a known time."""

    def __init__(self, store: ModelledStore, job: StoreJob, at_s: float, seconds: float) -> None:
        self._store, self._job, self._at_s, self._seconds = store, job, at_s, seconds

    def poll(self, now: float) -> StoreResult | None:
        return self._store.result(self._job, self._seconds) if now >= self._at_s else None

    def ready_at(self) -> float | None:
        return self._at_s

    def began_at(self) -> float:
        return self._at_s - self._seconds

    def wait(self, seconds: float) -> float:  # noqa: ARG002 - as other tickets
        return 0.0

    def cancel(self) -> None:
        """Nothing to do: a job that is not polled has no effect."""
