"""One engine's work with the shared store: questions, loads, saves and touches, carried out beside the steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from hydrainfer.cache import BlockRef, Pulls, StoreJob, StoreResult, StoreTier, stored_bytes
from hydrainfer.core import StoreStats
from hydrainfer.engine.ports import StoreClient, StoreTicket
from hydrainfer.scheduler import Ask, Save, Scheduler, Touch

_log = logging.getLogger(__name__)
_NEVER = float("inf")
_LAST_S = 2.0  # for which an engine that ends goes on to save


class StoreTimes(NamedTuple):
    """A store that takes longer than `ask_s` to say what it has, or than `save_s` to take blocks, is left alone for a
    while. That does not count in which a job waits for others. `full_s`: until writes are tried again after there was
    no room."""

    ask_s: float = 1.0
    save_s: float = 10.0
    full_s: float = 10.0


class _Running(NamedTuple):
    what: Ask | Save | Touch
    ticket: StoreTicket
    limit_s: float


class Stored:
    """`client` executes jobs on threads of its own, or models them. `warn` gets what people should know, as a logger's
    method does. Used on the engine's thread only."""

    def __init__(
        self,
        scheduler: Scheduler,
        client: StoreClient,
        tier: StoreTier,
        times: StoreTimes | None = None,
        warn: Callable[..., None] = _log.warning,
    ) -> None:
        self._warn = warn
        self._times = times or StoreTimes()
        self._counts = StoreStats()
        self._client = client
        self._asking, self._saving = scheduler.asking, scheduler.room.saving
        self._caches, self._tier = scheduler.room.caches, tier
        self._running: list[_Running] = []
        self._write_at = -_NEVER
        self._saves = False  # whether one is running: one at a time
        self._told = False  # whether it was said that nothing can be written

    # ---- loads, for `Copies`

    def begin(self, source: str, pulls: Pulls, now: float, limit_s: float = _NEVER) -> _Load:  # noqa: ARG002
        """Begin to load blocks."""
        blocks: dict[str, tuple[list[BlockRef], list[int]]] = {}
        for spec, (theirs, ours) in pulls.blocks.items():
            refs = [self._tier.ref(block) for block in theirs]
            blocks[spec] = [ref for ref in refs if ref is not None], ours
        if any(len(refs) < len(ours) for refs, ours in blocks.values()):  # forgotten since: a miss
            return _Load(self, StoreJob("load", {}), None, limit_s, now)
        job = StoreJob("load", blocks)
        return _Load(self, job, self._client.start(job), limit_s, now)

    def loaded(self, job: StoreJob, result: StoreResult, seconds: float, now: float) -> bool:
        """Note the result of a load. Returns whether every block came."""
        self._counts.load_s += seconds
        if result.error:
            self.failed("load", result.error, now)
            return False
        n_lost = n_bytes = 0
        for spec, (refs, _) in job.blocks.items():
            there = result.there.get(spec, [False] * len(refs))
            self._tier.heard(spec, refs, there)
            n_lost += len(there) - sum(there)
            self._counts.n_loaded += sum(there)
            self._counts.n_bytes_loaded += sum(there) * stored_bytes(self._caches.specs[spec])
            n_bytes += sum(there) * self._caches.specs[spec].block_bytes
        self._counts.n_lost += n_lost
        if n_bytes and result.seconds:
            self._tier.measured(n_bytes, result.seconds)
        self._tier.worked("load")
        return not n_lost

    def late(self, now: float) -> None:
        """Note that a load was given up because it took too long."""
        self._counts.n_late += 1
        self.failed("load", "a load took longer than computing would have", now)

    def given_up(self, ticket: StoreTicket, limit_s: float, now: float) -> bool:
        """Give up a job that takes too long by itself, or whose turn has not come when the store is left alone. Returns
        whether it was."""
        began_s = ticket.began_at()
        if now < began_s + limit_s and (began_s <= now or self._tier.open):
            return False
        ticket.cancel()
        return True

    def ends_at(self, ticket: StoreTicket, limit_s: float) -> float:
        """The time at which a job is over or given up; infinity if the engine is woken before."""
        began_s, ready_s = ticket.began_at(), ticket.ready_at()
        if began_s == _NEVER and not self._tier.open:
            return -_NEVER
        return began_s + limit_s if ready_s is None else min(ready_s, began_s + limit_s)

    def failed(self, what: str, why: str, now: float) -> None:
        """Leave the store alone for a while."""
        self._counts.n_failures += 1
        if self._tier.failed(what, now) == 1:
            self._warn("the store is left alone for a while, and prompts are computed: %s", why)

    # ---- the loop

    def turn(self, now: float) -> None:
        """Take in answers, and let requests go on that have waited for too long."""
        if self._running:
            self._poll(now)
        self._asking.turn(now)

    def start(self, now: float) -> None:
        """Begin what is to be done."""
        is_open = self._tier.turn(now)
        for ask in self._asking.asks():
            self._counts.n_asks += 1
            self._start(ask, self._times.ask_s)
        if not is_open or now < self._write_at:
            if self._saving.waiting and now < self._write_at:
                self._saving.clear()
            return
        for touch in self._saving.touches(now):
            self._start(touch, self._times.ask_s)
        if not self._saves and self._saving.waiting and (save := self._saving.next_save()) is not None:
            self._saves = True
            self._start(save, self._times.save_s)

    def _start(self, what: Ask | Save | Touch, limit_s: float) -> None:
        self._running.append(_Running(what, self._client.start(what.job), limit_s))

    def _poll(self, now: float) -> None:
        running, self._running = self._running, []
        for job in running:
            result = job.ticket.poll(now)
            if result is None and not self.given_up(job.ticket, job.limit_s, now):
                self._running.append(job)
                continue
            result = result or StoreResult({}, "it took too long to answer")
            if result.full:
                self._hold_writes(result.error, now)
            elif not result.error:
                self._tier.worked(job.what.job.what)
            elif job.ticket.began_at() <= now:
                self.failed(job.what.job.what, result.error, now)
            self._over(job.what, result)

    def _over(self, what: Ask | Save | Touch, result: StoreResult) -> None:
        match what:
            case Ask():
                self._asking.answered(what, result.there)
            case Save():
                self._saves = False
                self._told = self._told and not result.there
                self._saving.saved(what, result.there)
            case Touch() if result.there:
                self._saving.touched(what, result.there[what.spec])

    def _hold_writes(self, why: str, now: float) -> None:
        """Write nothing for a while."""
        self._write_at = now + self._times.full_s
        if not self._told:
            self._told = True
            self._warn("nothing is written to the store until there is room: %s", why)

    def wake_at(self) -> float:
        """The time of the next turn at the latest; infinity if the engine is woken before."""
        wake_at = min(self._asking.wake_at(), self._tier.opens_at() if self._saving.waiting else _NEVER)
        for job in self._running:
            wake_at = min(wake_at, self.ends_at(job.ticket, job.limit_s))
        if self._saving.waiting and not self._saves and self._tier.open:
            wake_at = min(wake_at, self._write_at)
        return wake_at

    @property
    def waiting(self) -> bool:
        """Whether anything waits to be saved."""
        return self._saving.waiting

    @property
    def saving(self) -> bool:
        """Whether blocks are held to be saved."""
        return self._saves

    def stats(self) -> StoreStats:
        """A snapshot of what was done."""
        saves = self._saving.counts
        return msgspec.structs.replace(
            self._counts,
            n_saved=saves.n_saved,
            n_bytes_saved=saves.n_bytes,
            n_skipped=saves.n_skipped,
            n_corrupt=self._client.n_corrupt,
        )

    def close(self) -> None:
        """Save what waits, for a moment, and end the rest; nothing more is read of our blocks."""
        left_s = _LAST_S
        for job in self._running:
            if isinstance(job.what, Save):
                left_s = self._finish(job.what, job.ticket, left_s)
            else:
                job.ticket.cancel()
        self._running.clear()
        while left_s > 0.0 and self._tier.open and (save := self._saving.next_save()) is not None:
            left_s = self._finish(save, self._client.start(save.job), left_s)
        self._client.close()

    def _finish(self, save: Save, ticket: StoreTicket, left_s: float) -> float:
        """Wait for a save. Returns the time that is then left; 0 if it failed."""
        left_s = ticket.wait(left_s)
        result = ticket.poll(_NEVER)
        if result is None:
            ticket.cancel()
            result = StoreResult({}, "it took too long")
        self._saving.saved(save, result.there)
        return 0.0 if result.error else left_s


class _Load:
    """A load that waits for its turn or runs; a `CopyTicket`. It is given up if it takes too long by itself, or if the
    store is left alone before its turn comes."""

    cut, wait_for = False, None

    def __init__(self, stored: Stored, job: StoreJob, ticket: StoreTicket | None, limit_s: float, now: float) -> None:
        self._stored, self._job, self._ticket = stored, job, ticket
        self._limit_s, self._queued_s = limit_s, now

    def poll(self, now: float) -> bool | None:
        if self._ticket is None:
            return False
        result = self._ticket.poll(now)
        if result is not None:
            return self._stored.loaded(self._job, result, now - self._queued_s, now)
        if not self._stored.given_up(self._ticket, self._limit_s, now):
            return None
        if self._ticket.began_at() <= now:
            self._stored.late(now)
        return False

    def ready_at(self) -> float | None:
        return -_NEVER if self._ticket is None else self._stored.ends_at(self._ticket, self._limit_s)
