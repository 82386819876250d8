"""Sequences in their decode stage whose KV waits in host memory, because the device's caches have no room.

    offer without room ─pulled─> parked ─entering─> decoding
    preempted ──────────leaving────^

Parked sequences ask for room by rank like offers, before any that go after them, and hold no device blocks meanwhile.
If there are no caches in host memory, nobody is parked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hydrainfer.cache import DEVICE, HOST, CacheSet, CacheSpec, Hit, Lease, Pulls
from hydrainfer.core import Handoff, LiveSequence, Load, Stage
from hydrainfer.scheduler.pace import Pace
from hydrainfer.scheduler.room import SequenceRoom

_BYTE_S = 1e-10  # of a copy between device and host, until one is measured
_NEWEST = 0.2  # weight of the newest measurement


class Shift(NamedTuple):
    """A copy of all that a sequence needs from the tier `source` of this instance to another. `limit_s`: it is given up
    if it takes longer by itself."""

    seq: LiveSequence
    source: str
    pulls: Pulls
    n_bytes: int
    limit_s: float = float("inf")


class Parking:
    """The sequences parked in host memory. `caches`: those of the host tier, if any. `decoding`: the decoding sequences
    by id, which parked ones enter. `restart(seq, now)` makes a sequence be computed again."""

    def __init__(
        self,
        caches: CacheSet | None,
        room: SequenceRoom,
        decoding: dict[str, LiveSequence],
        pace: Pace,
        restart: Callable[[LiveSequence, float], None],
    ) -> None:
        self.caches = CacheSet({}) if caches is None else caches
        self.landing: dict[str, LiveSequence] = {}  # offered, being pulled to host memory; not live yet
        self.parked: dict[str, LiveSequence] = {}  # wait for room
        self.entering: dict[str, LiveSequence] = {}  # have room, and are copied into it
        self.leaving: dict[str, LiveSequence] = {}  # preempted; their room is free once they are copied
        self._token_s = 0.0  # per token, where preempted ones would be computed again; told by others
        self._room, self._decoding, self._pace, self._restart = room, decoding, pace, restart
        self._leases: dict[str, Lease] = {}
        self._shifts: list[Shift] = []
        self._byte_s = _BYTE_S

    # ---- into host memory

    def land(self, seq: LiveSequence, handoff: Handoff) -> Pulls | None:
        """Reserve host memory for a request offered for decoding. Returns the copies to make; None if there is no
        room."""
        if handoff.stage is not Stage.DECODE or not self._reserve(seq):
            return None
        self.landing[seq.id] = seq
        for spec in self._specs_of(seq):
            self._room.arriving(seq, spec, seq.n_computed, len(handoff.blocks.get(spec.name, ())))
        return self._into(seq, handoff.blocks)

    def landed(self, seq: LiveSequence) -> bool:
        """Note that a sequence's blocks are written. Returns False if they are not in host memory."""
        if self.landing.pop(seq.id, None) is None:
            return False
        self.parked[seq.id] = seq
        return True

    def park(self, seq: LiveSequence) -> bool:
        """Begin to move a decoding sequence to host memory. Returns False if there is none, or if computing the
        sequence again takes less time."""
        if not self.caches.specs or not seq.hold.blocks or seq.stage is not Stage.DECODE:
            return False
        n_bytes = sum(len(spec.moved(seq.request, seq.n_computed)) * spec.block_bytes for spec in self._specs_of(seq))
        again_s = seq.n_computed * (self._token_s or self._pace.token_s())
        if 2 * n_bytes * self._byte_s >= again_s or not self._reserve(seq):
            return False
        self._room.settle(seq)
        self.leaving[seq.id] = seq
        self._shift(Shift(seq, DEVICE, self._into(seq, self._room.offered(seq)), n_bytes))
        return True

    def _into(self, seq: LiveSequence, blocks: Mapping[str, Sequence[int]]) -> Pulls:
        """The copies of `blocks` into the host memory of a sequence. What was left behind on the way has a place there,
        too, to which nothing is copied."""
        leased = {spec: ids for spec, ids in self._leases[seq.id].blocks.items() if ids}
        return Pulls(HOST, {spec: (list(blocks[spec]), ids[-len(blocks[spec]) :]) for spec, ids in leased.items()})

    def _reserve(self, seq: LiveSequence) -> bool:
        need = {spec.name: spec.moved(seq.request, seq.n_computed) for spec in self._specs_of(seq)}
        lease = self.caches.reserve(seq.id, need) if need else None
        if lease is not None:
            self._leases[seq.id] = lease
        return lease is not None

    def _specs_of(self, seq: LiveSequence) -> list[CacheSpec]:
        return [spec for spec in self.caches.specs.values() if spec.used_by(seq.request)]

    def hear(self, load: Load) -> None:
        """Take in another instance's load, for its speed."""
        self._token_s = 0.0 if self._pace.duties.runs(Stage.PREFILL) else load.token_s or self._token_s

    # ---- back to the device

    def enter(self, seq: LiveSequence, hit: Hit) -> None:
        """Bring a parked sequence back to the room reserved for it on the device. Blocks in `hit` need not be
        copied."""
        pulls = self._room.pulls(seq, self._leases[seq.id].blocks, seq.n_computed, hit)
        self._room.remap(seq)
        self.entering[seq.id] = self.parked.pop(seq.id)
        n_bytes = sum(len(ids) * self.caches.specs[spec].block_bytes for spec, (_, ids) in pulls.blocks.items())
        self._shift(Shift(seq, HOST, pulls, n_bytes))

    def _shift(self, shift: Shift) -> None:
        shift.seq.pin()  # its blocks stay until the copy is over, even if it is cancelled
        self._shifts.append(shift)

    def shifts(self) -> list[Shift]:
        """The copies to begin; each is returned once."""
        shifts, self._shifts = self._shifts, []
        return shifts

    def done(self, shift: Shift, seconds: float | None, now: float) -> bool:
        """Note that a copy ended after `seconds`, or failed if that is None. Returns whether its sequence is computed
        again."""
        seq, enters = shift.seq, shift.source == HOST
        seq.unpin()
        self.entering.pop(seq.id, None)
        self.leaving.pop(seq.id, None)
        if seconds is not None and shift.n_bytes:
            self._byte_s += _NEWEST * (seconds / shift.n_bytes - self._byte_s)
        if seq.cancelled or seconds is None:
            self._room.release(seq, landed=not enters)
            self.release(seq.id)
        elif enters:
            self.release(seq.id)
            self._room.landed(seq)
            self._decoding[seq.id] = seq
        else:
            self._room.release(seq)
            self.parked[seq.id] = seq
        if seconds is not None or seq.cancelled:
            return False
        self._restart(seq, now)
        return True

    # ---- giving back

    def forget(self, seq: LiveSequence) -> bool:
        """Note that a sequence is cancelled. Returns whether it was here. Its host memory is given back at once, or
        when its copy is over."""
        groups = (self.parked, self.entering, self.leaving)
        group = next((group for group in groups if seq.id in group), None)
        if group is None:
            return False
        del group[seq.id]
        if not seq.in_flight:
            self.release(seq.id)
        return True

    def release(self, request_id: str) -> None:
        """Give a request's host memory back. Safe if it has none."""
        self.landing.pop(request_id, None)
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            self.caches.release(lease)

    def holds(self, request_id: str) -> bool:
        return request_id in self._leases

    @property
    def n_coming(self) -> int:
        """How many more sequences are about to run than those that arrive: entering ones, less landing ones, which will
        park."""
        return len(self.entering) - len(self.landing)

    @property
    def n_live(self) -> int:
        """The number of sequences that are here and do not decode now."""
        return len(self.parked) + len(self.entering) + len(self.leaving)

    @property
    def live(self) -> list[LiveSequence]:
        return [*self.parked.values(), *self.entering.values(), *self.leaving.values()]

    def check(self) -> None:
        """Check that every sequence with host memory is in one state, and that the pools are consistent. For tests."""
        held = {s.id for s in (*self.landing.values(), *self.live)}
        assert held <= self._leases.keys() and len(held) == len(self.landing) + self.n_live
        assert all(not s.hold.blocks for s in (*self.parked.values(), *self.landing.values())), (
            "parked, with device blocks"
        )
        self.caches.check()
