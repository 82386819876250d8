"""A cluster on a virtual clock: real engines, nodes, census, lives, roster and codec; fake devices; messages between
instances that may be late, repeated, out of order or lost; copies that take their time and may fail; instances that
crash."""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial

import msgspec

from hydrainfer.cache import DEVICE, HOST, STORE, CacheSet
from hydrainfer.cluster import Node, NodePlan, Placer, Pulse, Roster, ServerSide
from hydrainfer.cluster.messages import decode_to_hub, encode
from hydrainfer.core import ExportHandle, Lane, Layout, Stage, StepResult
from hydrainfer.engine import Copies, Engine, Moves, Timing, tier_movers
from hydrainfer.machine import host_identity
from hydrainfer.scheduler import Budgets, Policy, Scheduler
from tests.cache.other_kinds import STATE
from tests.engine.rig import TimedRunner
from tests.scheduler.fakes import EMBED, KV, DictTier, FakeDevice, contents_of
from tests.scheduler.store import FakeStore, Shelf, StoreRig

HANDSHAKE_S = 2.0
TIMING = Timing(lease_s=12.0, renew_s=3.0, resend_s=2.0, patience_s=60.0, cut_s=10.0)
PULSE = Pulse(beat_s=2.0, suspect_s=15.0, dead_s=1e9, gap_s=5.0, patience_s=60.0, handover_s=20.0, grace_s=10.0)


def name_of(address):
    return address.split("/")[0]


class FakeCopy:
    wait_for = None

    def __init__(self, at, ok, cut=False):
        self.at, self.ok, self.cut = at, ok, cut

    def poll(self, now):
        return self.ok if now >= self.at else None

    def ready_at(self):
        return self.at


class FakePuller:
    """Copies what the peer's slots hold when the copy is *done*, as a one-sided read may; memory outlives its owner."""

    def __init__(self, name, incarnation, cluster):
        self.cluster, self.me = cluster, f"{name}/{incarnation}"
        self.exports = {spec: ExportHandle(self.me) for spec in cluster.caches[name].specs}
        self.n_blocks = Counter()

    def pull(self, sources, pulls):
        rng, now = self.cluster.rng, self.cluster.now
        mine = self.cluster.memory[self.me]
        end = now + rng.uniform(0.0, self.cluster.copy_s)
        (owner,) = {sources[spec].owner for spec in pulls.blocks}
        if self.cluster.apart(self.me, owner):
            return FakeCopy(now + HANDSHAKE_S, False, cut=True)
        if self.cluster.chaos and rng.random() < 0.1:
            return FakeCopy(end, False)

        ticket = FakeCopy(end, True)

        def copy():
            offers = {sources[spec].offer for spec in pulls.blocks} - {""}
            if self.cluster.apart(self.me, owner) or not offers <= self.cluster.offers[owner]:
                ticket.ok = False  # the connection broke, or the read was refused
                return
            for spec, (source_ids, ids) in pulls.blocks.items():
                theirs = self.cluster.memory[sources[spec].owner]
                self.n_blocks[spec] += len(ids)
                for a, b in zip(source_ids, ids, strict=True):
                    mine.copy(spec, pulls.tier, theirs, sources[spec].ways.get("tier", DEVICE), a, b)

        self.cluster.at(end, copy)
        return ticket

    def offer(self, name, host):
        """Over sockets, whose reads can be refused; without them as memory that the peer maps."""
        if not self.cluster.sockets:
            return self.exports
        self.cluster.offers[self.me].add(name)
        return {spec: msgspec.structs.replace(handle, offer=name) for spec, handle in self.exports.items()}

    def end_offer(self, name):
        self.cluster.offers[self.me].discard(name)
        return True

    def forget(self, owner):
        self.cluster.forgotten.append((self.me, owner))

    def close(self):
        pass


class OwnPuller(FakePuller):
    """The same between an instance's own tiers, which have `exports`."""

    def __init__(self, name, incarnation, cluster, tiers):
        super().__init__(name, incarnation, cluster)
        self.exports = {
            tier: {spec: ExportHandle(self.me, ways={"tier": tier}) for spec in self.exports} for tier in tiers
        }


class CheckedDevice(FakeDevice):
    """Fails if a batch holds what its role does not run, or would wait for a grammar that is not `compiled`."""

    def __init__(self, role, compiled):
        super().__init__()
        self.role, self.compiled = role, compiled

    def run(self, batch) -> StepResult:
        for item in batch.work:
            assert self.role.runs(item.seq.stage), f"{item.seq} on {self.role}"
            if batch.lane is Lane.LANGUAGE and (grammar := item.seq.request.sampling.grammar) is not None:
                assert self.compiled(grammar), f"{item.seq} would wait for its grammar"
            for spec, ids in item.seq.hold.blocks.items():
                assert all(b is not None for b in ids), spec
        return super().run(batch)


def check_published(room, device):
    """A state is published only where it was computed or copied to."""
    publish = room._publish

    def checking(seq, spec, numbers, *, computed=True):
        publish(seq, spec, numbers, computed=computed)
        if spec is STATE and numbers.start not in seq.hold.absent.get(spec.name, ()):
            keys = room.finder.keys_of(seq)[spec.name][numbers.start : numbers.stop]
            n_tokens = numbers.start * spec.block_tokens
            block = seq.hold.blocks[spec.name][numbers.start - seq.hold.first_block[spec.name]]
            assert not keys or device.state.get(block) == (n_tokens, contents_of(seq.request, seq.tokens)[n_tokens - 1])

    room._publish = checking


class Wire:
    """A node's sockets. To and from the hub messages keep their order; between instances anything may happen."""

    def __init__(self, cluster, name, incarnation):
        self.cluster, self.name, self.address = cluster, name, f"{name}/{incarnation}"
        self.inbox, self.known = [], {}

    def connect(self, name, address):
        self.known[name] = address

    def forget(self, name):
        self.known.pop(name, None)

    def send(self, name, data):
        if name in self.known:
            self.cluster.post(self.address, self.known[name], data)

    def receive(self):
        inbox, self.inbox = self.inbox, []
        return inbox

    def wake(self):
        self.cluster.wakes[self.address] = self.cluster.now


class Cluster:
    """`chaos`: messages between instances are lost, doubled and reordered, copies fail. `more`: blocks of caches beside
    KV and embeddings. `landing`: blocks in host memory of every cache that decoding requests hold, where some run.
    `compile_s`: time for a grammar, on each instance. `sockets`: instances read each other's blocks over sockets, which
    a cut pair does not have. `keeps_evicted`: each instance has a `DictTier`. `store`: None, "good" or
    "bad": a store that they share, on a `shelf` that outlives them. `two_clusters`: those that do not decode are in one
    of their own."""

    def __init__(
        self,
        layout,
        kv_blocks,
        embed_blocks,
        seed=0,
        chaos=False,
        headroom=0,
        balancing="least_load",
        tokens=16,
        more=None,
        landing=0,
        compile_s=0.0,
        sockets=False,
        keeps_evicted=False,
        store=None,
        two_clusters=False,
    ):
        self.sizes = {EMBED: embed_blocks, KV: kv_blocks, **(more or {})}
        self.rng, self.chaos, self.now, self.copy_s = random.Random(seed), chaos, 0.0, 2.0
        self.headroom, self.tokens_budget, self.landing = headroom, tokens, landing
        self.compile_s, self.compiled_at = compile_s, {}
        self.keeps_evicted, self.tiers = keeps_evicted, {}
        self.store, self.shelf, self.stored = store, Shelf(), {}
        self.sockets, self.cuts, self.offers = sockets, Counter(), defaultdict(set)
        self.events, self.n_events, self.n_awaited = [], 0, 0
        self.outputs, self.lifecycle, self.forgotten, self.failures = [], [], [], {}
        self.roles = {f"{role}{i}": role for i, role in enumerate(Layout.parse(layout).instances)}
        self.placer = Placer(Roster(), balancing, random.Random(seed))
        record = lambda event: self.lifecycle.append((self.now, event))  # noqa: E731
        self.side = ServerSide(self.roles, self.outputs.extend, record, PULSE, placer=self.placer)
        at = {"hub": "hub/0", "pixels": "", "bind": "", "hub_host": host_identity()}
        at |= {"n_instances": len(self.roles), "balancing": balancing, "pulse": PULSE}
        self.plans = {
            name: NodePlan(name, str(role), **at, cluster="far" * (two_clusters and not role.runs(Stage.DECODE)))
            for name, role in self.roles.items()
        }
        self.engines, self.caches, self.devices, self.nodes, self.wires = {}, {}, {}, {}, {}
        self.pullers, self.hosts = {}, {}
        self.memory = {}  # by address; outlives its instance
        self.wakes, self.links, self.incarnations = {}, {}, dict.fromkeys(self.roles, 0)
        for name in self.roles:
            self.start(name)
        for name in self.roles:
            self.settle(name)

    def start(self, name):
        """A new incarnation."""
        role, incarnation = self.roles[name], self.incarnations[name] + 1
        self.incarnations[name] = incarnation
        sizes = {spec: n for spec, n in self.sizes.items() if any(role.runs(stage) for stage in spec.stages)}
        self.caches[name] = CacheSet(sizes)
        ready = partial(self.ready, f"{name}/{incarnation}" if Lane.LANGUAGE in role.lanes else "")
        self.devices[name] = self.memory[f"{name}/{incarnation}"] = CheckedDevice(role, ready)
        self.pullers[name] = FakePuller(name, incarnation, self)
        policy = Policy(encode_wait_s=2.0, headroom_tokens=self.headroom, shared_tokens=8)
        budgets = Budgets(tokens=self.tokens_budget, images=2, running=6)
        decodes = [spec for spec in sizes if role.runs(Stage.DECODE) and Stage.DECODE in spec.stages]
        hosted = CacheSet({spec: self.landing for spec in decodes if self.landing})
        self.tiers[name] = [DictTier(self.devices[name])] if self.keeps_evicted else []
        rig = None
        if self.store:
            client = FakeStore(self.devices[name], lambda: self.now, self.rng, self.store == "bad", self.shelf)
            rig = StoreRig(self.caches[name], client)
        s = Scheduler(role, self.caches[name], budgets, policy, hosted, self.tiers[name], rig and rig.tier)
        check_published(s.room, self.devices[name])
        runners = {
            lane: TimedRunner(self.devices[name], lambda: self.now, 3.0 if lane is Lane.VISION else 1.0)
            for lane in role.lanes
        }
        wire = self.wires[name] = Wire(self, name, incarnation)
        node = self.nodes[name] = Node(self.plans[name], incarnation, wire, lambda: self.now)
        moves = Moves(name, incarnation, s, node.placer, node, self.pullers[name], TIMING)
        own = OwnPuller(name, incarnation, self, [DEVICE, HOST, *(tier.name for tier in self.tiers[name])])
        self.hosts[name] = own
        copies = Copies(s, tier_movers(own, own.exports)) if hosted.specs or self.tiers[name] else None
        if rig is not None:
            rig.attach(s)
            self.stored[name] = rig.stored
            copies = Copies(s, {**tier_movers(own, own.exports), STORE: rig.stored}, rig.stored)
        told = (node.sink, node.record)
        self.engines[name] = Engine(s, runners, *told, moves=moves, moved=node.moved, ready=ready, copies=copies)
        node.start(self.engines[name], {})
        self.wakes[wire.address] = self.now

    def add(self, name, role):
        """One more instance, which joins the layout."""
        self.roles[name], self.incarnations[name] = role, 0
        self.plans[name] = replace(next(iter(self.plans.values())), name=name, role=str(role))
        self.side.census.add(name, role)
        self.start(name)

    def ready(self, address, grammar):
        """Whether an instance has compiled a grammar. An encoder, which has no address here, need not."""
        return not address or self.now >= self.compiled_at.setdefault((address, grammar), self.now + self.compile_s)

    def settle(self, name):
        """Let its `Hello` arrive at once."""
        for link in [link for link in self.links if link[0] == self.wires[name].address]:
            for _, data in self.links.pop(link):
                self._hub_hears(data)

    # ---- messages

    def post(self, source, target, data):
        if target == "hub/0" or source == "hub/0":
            queue = self.links.setdefault((source, target), [])
            last = queue[-1][0] if queue else self.now
            late = self.rng.uniform(0.0, 2.0) if self.chaos else 0.01
            at = max(last, self.now + late)
            queue.append((at, data))
            self.at(at, lambda: self._next(source, target, data))
            return
        if self.cuts[name_of(source), name_of(target)] or (self.chaos and self.rng.random() < 0.15):
            return
        for _ in range(2 if self.chaos and self.rng.random() < 0.15 else 1):
            late = self.rng.uniform(0.0, 4.0) if self.chaos else 0.01
            self.at(self.now + late, lambda: self._deliver(target, data))

    def _next(self, source, target, data):
        queue = self.links.get((source, target))
        if not queue or queue[0][1] is not data:
            return  # lost with its sender
        queue.pop(0)
        if target == "hub/0":
            self._hub_hears(data)
        else:
            self._deliver(target, data)

    def _deliver(self, address, data):
        name = name_of(address)
        if name in self.wires and self.wires[name].address == address:
            self.wires[name].inbox.append(data)
            self.wakes[address] = self.now

    def _hub_hears(self, data):
        message = decode_to_hub(data)
        self.side.hear(message, self.now)
        self.pump()

    def pump(self):
        """Send what waits in the links."""
        for name, link in self.side.links.items():
            message = link.message(self.now)
            if message is not None:
                self.post("hub/0", f"{name}/{link.incarnation}", encode(message))

    # ---- cut pairs

    def cut(self, name, other, at_s, until_s=None, both=True):
        """Nothing that `name` says reaches `other` in this time, nor with `both` the reverse. The hub hears both."""
        for pair in [(name, other), (other, name)][: 1 + both]:
            self.at(at_s, lambda pair=pair: self.cuts.update([pair]), awaited=True)
            if until_s is not None:
                self.at(until_s, lambda pair=pair: self.cuts.subtract([pair]), awaited=True)

    def apart(self, address, other):
        """A connection needs both directions."""
        name, other = name_of(address), name_of(other)
        return self.cuts[name, other] > 0 or self.cuts[other, name] > 0

    # ---- deaths

    def crash(self, name, notice_s=1.0, restart_s=None, failures=()):
        """Its process is gone, with some of what it had said last; the hub learns of it `notice_s` later. `failures`:
        how its next starts end; one more succeeds, if it is tried."""
        if name not in self.wires:
            return
        address, incarnation = self.wires[name].address, self.incarnations[name]
        for held in (self.engines, self.caches, self.devices, self.nodes, self.wires):
            del held[name]
        self.wakes.pop(address, None)
        for link, queue in self.links.items():
            if link[0] == address and self.rng.random() < 0.7:
                del queue[self.rng.randint(0, len(queue)) :]

        def notice():
            self.side.census.gone(name, incarnation, self.now)
            self.pump()

        self.at(self.now + notice_s, notice, awaited=True)
        if restart_s is not None:
            self.failures[name] = list(failures)
            self.at(self.now + restart_s, lambda: self.restart(name), awaited=True)

    def restart(self, name):
        if not self.failures[name]:
            self.start(name)
            return
        self.incarnations[name] += 1
        self.side.census.failed(name, self.incarnations[name], self.failures[name].pop(0), self.now)

    # ---- time

    def at(self, time, call, awaited=False):
        """`awaited`: `run` does not end before it."""
        self.n_events += 1
        self.n_awaited += awaited

        def run():
            self.n_awaited -= awaited
            call()

        heapq.heappush(self.events, (time, self.n_events, run))

    def submit(self, request):
        self.side.lives.submit(request, self.now)
        self.pump()

    def cancel(self, request_id):
        self.side.lives.cancel([request_id], self.now)
        self.pump()

    def run(self, until=20_000.0):
        """Until nothing is left to do."""
        tick_at = self.now
        while not self.quiet:
            times = [*self.wakes.values(), *(t for t, _, _ in self.events[:1]), tick_at]
            if min(times) > until:
                return
            self.now = max(self.now, min(times))
            while self.events and self.events[0][0] <= self.now:
                heapq.heappop(self.events)[2]()
            if tick_at <= self.now:
                tick_at = self.side.tick(self.now)
                self.pump()
                for name in self.side.census.restarts.due(self.now):
                    self.at(self.now + 2.0, lambda name=name: self.restart(name), awaited=True)
            names = [n for n in self.wires if self.wakes[self.wires[n].address] <= self.now]
            self.rng.shuffle(names)
            for name in names:
                self.wakes[self.wires[name].address] = self.now + self.nodes[name].turn()
                self.engines[name].scheduler.check()
                if self.nodes[name].closing:
                    self.leave(name)

    def leave(self, name):
        """It has closed: its process ends, and the hub notices."""
        assert self.engines[name].idle, name
        self.caches[name].check(idle=True)
        self.crash(name)

    @property
    def quiet(self):
        return not (
            self.n_awaited
            or self.side.lives.n_live
            or any(self.links.values())
            or any(w.inbox for w in self.wires.values())
            or not all(e.idle and e.moves.source.idle for e in self.engines.values())
        )

    # ---- what came of it

    def tokens(self, request_id):
        return [t for o in self.outputs if o.request_id == request_id for t in o.token_ids]

    def end(self, request_id):
        mine = [o for o in self.outputs if o.request_id == request_id]
        assert [o.finish_reason is not None for o in mine] == [False] * (len(mine) - 1) + [True], (request_id, mine)
        return mine[-1]

    def check_whole(self):
        for name, engine in self.engines.items():
            assert engine.idle, (name, engine.stats(self.now))
            assert engine.moves.source.idle, name
            engine.scheduler.check()
            self.caches[name].check(idle=True)
            engine.scheduler.parking.caches.check(idle=True)
            for tier in self.tiers[name]:
                tier.check_idle()
