"""The engine's ports: protocols for executing its batches, taking its outputs and reaching other instances."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Protocol

from hydrainfer.cache import Pulls, StoreJob, StoreResult
from hydrainfer.core import (
    ExportHandle,
    Forgotten,
    InstanceInfo,
    InstanceStats,
    Parcel,
    Request,
    Stage,
    StepBatch,
    StepResult,
)


class Ticket(Protocol):
    """One batch in flight on one lane."""

    def poll(self, now: float) -> StepResult | None:
        """The result, or None if there is none yet. Never blocks, never raises: a failure is inside the result."""

    def ready_at(self) -> float | None:
        """The time at which the result will be there, if that is known (a modelled device). None if it is not: the
        engine is woken then."""


class Runner(Protocol):
    """Executes the batches of one lane, one after the other, in the order launched."""

    def launch(self, batch: StepBatch) -> Ticket:
        """Read what the batch needs from its sequences now, start it and return. May be called again once the previous
        ticket's result was polled, or before if that batch has decodes only. In that case items of the new batch may
        continue tokens that the previous one samples (`TokenWork.unknown`); their results are useless if it fails."""

    def close(self) -> None:
        """Wait for what is running, then free threads and streams."""


class Placement(Protocol):
    """The choice of the instance that a request goes to next."""

    def choose(self, request: Request, stage: Stage, exclude: Collection[str]) -> str | None:
        """The name of an instance that is not in `exclude`; None if there is none. It runs `stage`, or it runs a later
        one and perhaps has the result of `stage` in its caches. Called on the engine's thread; must not block."""


class PeerLink(Protocol):
    """The way to the other instances."""

    def send(self, peer: str, parcel: Parcel) -> None:
        """Hand the parcel over and return; it may be lost if the peer is gone."""

    def host_of(self, peer: str) -> str:
        """The identity of the peer's machine; "" if it is not known."""

    def is_abroad(self, peer: str) -> bool:
        """Whether the peer is in another cluster."""


WaitFor = Callable[[int], None]
"""`wait_for(layer)` makes what the calling thread enqueues on the device from now on wait for what this layer reads."""


class CopyTicket(Protocol):
    """One copy in flight."""

    @property
    def wait_for(self) -> WaitFor | None:
        """By which batches may read what is copied before the copy is over; None if they may not, or not yet. The
        engine is woken when they may."""

    @property
    def cut(self) -> bool:
        """Whether the copy failed because the peer could not be connected."""

    def poll(self, now: float) -> bool | None:
        """True once every byte is there, False if the copy failed and nothing writes any more, None while it runs.
        Never raises."""

    def ready_at(self) -> float | None:
        """The time at which the copy will be done, on the engine's clock, or None if that is unknown: see `Ticket`."""


class Puller(Protocol):
    """Copies blocks of peers into this instance's caches."""

    @property
    def exports(self) -> dict[str, ExportHandle]:
        """The handles by which peers read this instance's caches, by spec."""

    def pull(self, sources: dict[str, ExportHandle], pulls: Pulls) -> CopyTicket:
        """Start copying from one peer and return. The engine is woken when the copy is done. Copies from other peers do
        not wait for it."""

    def forget(self, owner: str) -> None:
        """Drop what is kept of a peer whose process is gone (`core.owner_of`). Copies from it fail. Does not wait."""

    def close(self) -> None:
        """End running copies, which count as failed, and free threads."""


class PeerPuller(Puller, Protocol):
    """A `Puller` that also decides who may read this instance's caches."""

    def offer(self, name: str, host: str) -> dict[str, ExportHandle]:
        """The handles by which a peer on machine `host` may read the blocks of one offer. If every way to them is over
        a socket, the handles name the offer, and reads are served until `end_offer`."""

    def end_offer(self, name: str) -> bool:
        """Refuse all further reads of an offer that handles name. Returns whether none is running any more; those that
        are end soon. Safe to repeat."""


class StoreTicket(Protocol):
    """One job of a store in flight."""

    def poll(self, now: float) -> StoreResult | None:
        """The result, or None if there is none yet. Never blocks, never raises."""

    def ready_at(self) -> float | None:
        """The time at which the result will be there, on the engine's clock; None if that is unknown: see `Ticket`."""

    def began_at(self) -> float:
        """The time at which the job itself began or will begin, after those before it, on the engine's clock; infinity
        while that is unknown. The engine is woken when a job begins."""

    def wait(self, seconds: float) -> float:
        """Wait until it is done, but no longer than so many seconds. Returns how many are left. For the end, when there
        are no steps."""

    def cancel(self) -> None:
        """Give up. Once this has returned, nothing that is read of our blocks can be found in the store, and nothing is
        written to them."""


class StoreClient(Protocol):
    """Executes the jobs of a shared store beside the engine, which is woken when one is done. `n_corrupt`: blocks that
    were found broken."""

    @property
    def n_corrupt(self) -> int: ...

    def start(self, job: StoreJob) -> StoreTicket:
        """Start a job and return."""

    def close(self) -> None:
        """Start nothing more. Threads that hang in a job are left behind."""


class EngineHandle(Protocol):
    """The running instances, one or several, as the server sees them. All methods may be called from any thread."""

    def submit(self, request: Request) -> None:
        """Run a request. Its outputs reach the handle's `OutputSink`; every request ends with exactly one final output.
        Raises `Unavailable` once `close` was called."""

    def cancel(self, request_ids: list[str]) -> None:
        """End these requests with `finish_reason="abort"`; ids that are unknown or done are ignored."""

    def stats(self) -> InstanceStats:
        """The statistics of all instances together."""

    def instances(self) -> list[InstanceInfo]:
        """Every instance of the layout, whether it runs or not."""

    def lost(self) -> str | None:
        """The reason, in one line, why the engine can never work again; None if it can."""

    def forget_cached(self) -> Future[Forgotten]:
        """Begin to forget, in every instance, what later requests could reuse. Raises `Unavailable` if nothing runs."""

    def restart_all(self) -> bool:
        """Begin to restart every instance, one at a time, while requests go on. False if that cannot be done."""

    def close(self) -> None:
        """Abort what is running, stop the thread, free the caches."""
