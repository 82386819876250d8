"""A shared store on fake devices: jobs take some time, and may fail in every way that a store can."""

import random
from itertools import count

from hydrainfer.cache import DEVICE, HOST, STORE, StoreResult, StoreTier
from hydrainfer.engine import Copies, Stored, StoreTimes
from tests.scheduler.fakes import FakeDevice


class Shelf:
    """What a store has, by cache and key, as slots of a device that computes nothing."""

    def __init__(self):
        self.numbers, self.device, self._fresh = {}, FakeDevice(), count(1)

    def put(self, name, theirs, block):
        number = self.numbers[name] = self.numbers.get(name) or next(self._fresh)
        self.device.copy(name[0], STORE, theirs, DEVICE, block, number)


class FakeTicket:
    def __init__(self, store, job):
        self.store, self.job = store, job
        self.began = store.clock() + store.rng.uniform(0.0, store.queued) * (job.what == "load")
        self.at = self.began + store.rng.uniform(0.0, store.slowest)
        self.cancelled = False
        if job.what == "save":
            self.before = store.values(job)
        if store.chance(0.02):
            self.at += 300.0

    def poll(self, now):
        return None if now < self.at else self.store.done(self)

    def ready_at(self):
        return self.at

    def began_at(self):
        return self.began

    def wait(self, seconds):
        self.at = float("-inf")
        return seconds

    def cancel(self):
        self.cancelled = True


class FakeStore:
    """A `StoreClient`. `bad`: it fails, loses blocks and lies about them now and then. A load begins after
    `queued` seconds at most; a job takes `slowest` at most. `jobs`: all so far."""

    n_corrupt = 0

    def __init__(self, device, clock, rng=None, bad=False, shelf=None, slowest=3.0, queued=0.0):
        self.device, self.clock, self.rng, self.bad = device, clock, rng or random.Random(0), bad
        self.shelf, self.slowest, self.queued = shelf or Shelf(), slowest, queued
        self.jobs = []

    def start(self, job):
        self.jobs.append(job)
        return FakeTicket(self, job)

    def close(self):
        pass

    def chance(self, p):
        return self.bad and self.rng.random() < p

    def values(self, job):
        """What our blocks hold."""
        slots = {spec: self.device.slots(spec, DEVICE) for spec in job.blocks}
        return {
            (spec, block): [slots[spec].get((block, i)) for i in range(4)] + [slots[spec].get(block)]
            for spec, (_, blocks) in job.blocks.items()
            for block in blocks
        }

    def done(self, ticket):
        job = ticket.job
        if ticket.cancelled or self.chance(0.05):
            return StoreResult({}, "away", self.chance(0.5))
        if job.what == "save":
            assert self.values(job) == ticket.before, "blocks were overwritten while they were saved"
        return StoreResult(
            {
                spec: [self._one(job.what, spec, ref, block) for ref, block in _pairs(refs, blocks)]
                for spec, (refs, blocks) in job.blocks.items()
            }
        )

    def _one(self, what, spec, ref, block):
        numbers, name = self.shelf.numbers, (spec, ref.key)
        if self.chance(0.05):
            numbers.pop(name, None)
        if what in ("ask", "touch"):
            return name in numbers or self.chance(0.05)
        if what == "load" and name in numbers:
            self.device.copy(spec, DEVICE, self.shelf.device, STORE, numbers[name], block)
        elif what == "save":
            self.shelf.put(name, self.device, block)
        return name in numbers


def _pairs(refs, blocks):
    return zip(refs, blocks, strict=True) if blocks else [(ref, None) for ref in refs]


class FakeMover:
    """Copies between the tiers of one device, some of which fail if it is `bad`. For a share `ordered` of those from
    host memory batches may wait."""

    def __init__(self, device, rng, bad, ordered=0.5, slowest=3.0):
        self.device, self.rng, self.bad, self.ordered, self.slowest = device, rng, bad, ordered, slowest

    def begin(self, source, pulls, now, limit_s=0.0):
        ordered = source == HOST and self.rng.random() < self.ordered
        return FakeCopy(self, source, pulls, now + self.rng.uniform(0.0, self.slowest), ordered)


class FakeCopy:
    """`ordered`: batches may wait for it, so that its bytes are there for whoever reads them."""

    cut = False

    def __init__(self, mover, source, pulls, at, ordered):
        self.mover, self.source, self.pulls, self.at = mover, source, pulls, at
        self.wait_for = (lambda layer: None) if ordered else None
        self.waited = False
        if ordered:
            self.copy()

    def poll(self, now):
        if now < self.at:
            return None
        if self.waited:
            return True
        if self.wait_for is not None:
            before = self.there()
            self.copy()
            assert self.there() == before, "blocks were overwritten while they were copied"
            return True
        if self.mover.bad and self.mover.rng.random() < 0.1:
            return False
        self.copy()
        return True

    def copy(self):
        for name, blocks in self.pulls.blocks.items():
            for source, target in zip(*blocks, strict=True):
                self.mover.device.copy(name, self.pulls.tier, self.mover.device, self.source, source, target)

    def there(self):
        """What the blocks hold that are copied to."""
        slots = {name: self.mover.device.slots(name, self.pulls.tier) for name in self.pulls.blocks}
        return {
            (name, block): [slots[name].get((block, i)) for i in range(4)] + [slots[name].get(block)]
            for name, (_, blocks) in self.pulls.blocks.items()
            for block in blocks
        }

    def ready_at(self):
        return self.at


class StoreRig:
    """What an engine does between the tiers of a device, and with a store if there is one. `tier`: for the scheduler,
    which is then to be attached. `tiers`: the names of those of somebody else."""

    def __init__(self, caches, store=None, mover=None, tiers=()):
        self.tier, self.store = store and StoreTier(caches.specs), store
        self.movers = dict.fromkeys((DEVICE, HOST, *tiers), mover) if mover else {}

    def attach(self, scheduler):
        times = StoreTimes(ask_s=20.0, save_s=50.0, full_s=20.0)
        self.stored = self.store and Stored(scheduler, self.store, self.tier, times)
        if self.stored:
            self.movers[STORE] = self.stored
        self.copies = Copies(scheduler, self.movers, self.stored)
        scheduler.asking.patience_s, scheduler.fetching.least_s = 4.0, 8.0

    def turn(self, now):
        """One turn of the engine. Returns the sequences that wait again or go elsewhere."""
        lost = self.copies.turn(now)
        self.copies.begin(now)
        return lost

    def computed(self, batch):
        """The device has computed a batch: it has waited for the copies that this reads."""
        seqs = [item.seq for item in batch.work]
        for copy in self.copies._running:
            if copy.ahead and copy.shift.seq in seqs:
                copy.completion.waited = True

    @property
    def busy(self):
        """Whether blocks are held for copies, or wait to be saved."""
        return self.copies.holding or bool(self.stored and self.stored.waiting)
