"""A cluster on a virtual clock: real engines, scheduler, router and codec; fake devices; messages that may be late,
repeated, out of order or lost; copies that take their time and may fail."""

from __future__ import annotations

import heapq
import random
import threading

from hydrainfer.cache import CacheSet
from hydrainfer.cluster import Member, Router
from hydrainfer.core import (
    ExportHandle,
    Lane,
    Layout,
    Stage,
    StepResult,
    decode_parcel,
    encode_parcel,
)
from hydrainfer.engine import Engine, Moves, Timing
from hydrainfer.scheduler import Budgets, Policy, Scheduler
from tests.engine.test_engine import TimedRunner
from tests.scheduler.fakes import EMBED, KV, FakeDevice

TIMING = Timing(lease_s=12.0, renew_s=3.0, resend_s=2.0)


class FakeCopy:
    def __init__(self, at, ok):
        self.at, self.ok = at, ok

    def poll(self, now):
        return self.ok if now >= self.at else None

    def ready_at(self):
        return self.at


class FakePuller:
    """Copies what the peer's slots hold when the copy is *done*, as a one-sided read may."""

    def __init__(self, name, cluster):
        self.name, self.cluster = name, cluster
        self.exports = {spec: ExportHandle(name) for spec in ("kv", "embed")}
        self.n_blocks = {"kv": 0, "embed": 0}

    def pull(self, sources, pulls):
        rng, now = self.cluster.rng, self.cluster.now
        mine = self.cluster.devices[self.name]
        end = now + rng.uniform(0.0, self.cluster.copy_s)
        if self.cluster.chaos and rng.random() < 0.1:
            return FakeCopy(end, False)

        def copy():
            for spec, (source_ids, ids) in pulls.items():
                theirs = self.cluster.devices[sources[spec].owner]
                self.n_blocks[spec] += len(ids)
                for a, b in zip(source_ids, ids, strict=True):
                    if spec == "embed":
                        mine.embed[b] = theirs.embed.get(a)
                    else:
                        mine.kv.update({(b, i): theirs.kv.get((a, i)) for i in range(KV.block_tokens)})

        self.cluster.at(end, copy)
        return FakeCopy(end, True)

    def forget(self, owner):
        self.cluster.forgotten.append((self.name, owner))

    def close(self):
        pass


class CheckedDevice(FakeDevice):
    """Fails if a batch holds what its role does not run."""

    def __init__(self, role, fail):
        super().__init__()
        self.role, self.fail = role, fail

    def run(self, batch) -> StepResult:
        for item in batch.work:
            assert self.role.runs(item.seq.stage), f"{item.seq} on {self.role}"
            for spec, ids in item.seq.blocks.items():
                assert all(b is not None for b in ids), spec
        return super().run(batch)


class Handle:
    def __init__(self, cluster, name):
        self.cluster, self.name = cluster, name
        self.alive = True

    def submit(self, request):
        self.cluster.engines[self.name].submit(request, self.cluster.now)

    def cancel(self, ids):
        self.cluster.engines[self.name].cancel(ids, self.cluster.now)

    def stats(self):
        return self.cluster.engines[self.name].stats(self.cluster.now)


class Cluster:
    """`chaos`: messages are lost, doubled and reordered, copies fail."""

    def __init__(
        self, layout, kv_blocks, embed_blocks, seed=0, chaos=False, headroom=0, balancing="least_load", tokens=16
    ):
        self.rng, self.chaos, self.now, self.copy_s = random.Random(seed), chaos, 0.0, 2.0
        self.events, self.n_events = [], 0
        self.outputs, self.lifecycle, self.forgotten = [], [], []
        self.engines, self.caches, self.devices, self.pullers, members = {}, {}, {}, {}, []
        for i, role in enumerate(Layout.parse(layout).instances):
            name = f"{role}{i}"
            members.append(Member(name, role, Handle(self, name)))
        self.router = Router(members, threading.Lock(), balancing, random.Random(seed))
        for name, role, _, _ in members:
            sizes = {}
            if role.runs(Stage.ENCODE) or role.runs(Stage.PREFILL):
                sizes[EMBED] = embed_blocks
            if role.runs(Stage.PREFILL) or role.runs(Stage.DECODE):
                sizes[KV] = kv_blocks
            self.caches[name] = CacheSet(sizes)
            self.devices[name] = CheckedDevice(role, self)
            self.pullers[name] = FakePuller(name, self)
            policy = Policy(encode_wait_s=2.0, headroom_tokens=headroom)
            s = Scheduler(role, self.caches[name], Budgets(tokens=tokens, images=2, running=6), policy)
            runners = {
                lane: TimedRunner(self.devices[name], lambda: self.now, 3.0 if lane is Lane.VISION else 1.0)
                for lane in role.lanes
            }
            moves = Moves(name, 0, s, self.router, self, self.pullers[name], TIMING)
            self.engines[name] = Engine(
                s, runners, self.outputs.extend, lambda e: self.lifecycle.append((self.now, e)), moves=moves
            )
        self.wakes = dict.fromkeys(self.engines, 0.0)

    # a PeerLink
    def send(self, peer, parcel):
        data = encode_parcel(parcel)
        if self.chaos and self.rng.random() < 0.15:
            return
        for _ in range(2 if self.chaos and self.rng.random() < 0.15 else 1):
            late = self.rng.uniform(0.0, 4.0) if self.chaos else 0.01
            self.at(self.now + late, lambda: self._deliver(peer, data))

    def _deliver(self, peer, data):
        self.engines[peer].deliver(decode_parcel(data))
        self.wakes[peer] = self.now

    def at(self, time, call):
        self.n_events += 1
        heapq.heappush(self.events, (time, self.n_events, call))

    def submit(self, request):
        self.router.submit(request)
        self.wakes.update(dict.fromkeys(self.wakes, self.now))

    def cancel(self, request_id):
        self.router.cancel([request_id])
        self.wakes.update(dict.fromkeys(self.wakes, self.now))

    def run(self, until=20_000.0):
        """Until nothing is left to do."""
        while True:
            times = [t for t in self.wakes.values() if t is not None] + [t for t, _, _ in self.events[:1]]
            if not times or min(times) > until:
                return
            self.now = max(self.now, min(times))
            while self.events and self.events[0][0] <= self.now:
                heapq.heappop(self.events)[2]()
            names = [n for n, t in self.wakes.items() if t is not None and t <= self.now]
            self.rng.shuffle(names)
            for name in names:
                wake = self.engines[name].step(self.now)
                self.wakes[name] = None if wake is None else max(wake, self.now)
                self.engines[name].scheduler.check()

    def tokens(self, request_id):
        return [t for o in self.outputs if o.request_id == request_id for t in o.token_ids]

    def end(self, request_id):
        mine = [o for o in self.outputs if o.request_id == request_id]
        assert [o.finish_reason is not None for o in mine] == [False] * (len(mine) - 1) + [True], (request_id, mine)
        return mine[-1]

    def check_whole(self):
        for name, engine in self.engines.items():
            assert engine.idle, (name, engine.stats(self.now), engine._moves._out, engine._moves._target._offers)
            assert engine._moves._source.idle, (name, engine._moves._source._offers)
            engine.scheduler.check()
            self.caches[name].check(idle=True)
