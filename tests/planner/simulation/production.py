"""What production runs, on a virtual clock: hub ledger, nodes, message codec, block stores, the `local` transport and
emulated devices. Messages take a fixed time, copies what a link says; everything else is the code that serves."""

from __future__ import annotations

import heapq
import time

import msgspec

from hydrainfer.cache import DEVICE, HOST, CacheSet
from hydrainfer.cluster import Node, NodePlan, Pulse, ServerSide
from hydrainfer.cluster.messages import decode_to_hub, encode
from hydrainfer.core import owner_of
from hydrainfer.engine import Copies, Engine, Moves, tier_movers
from hydrainfer.machine import host_identity
from hydrainfer.planner.simulation.links import HostLink, LinkEnds, ModelledCopy
from hydrainfer.planner.simulation.routes import Clusters, Timer
from hydrainfer.runtime import EmulatedDevice, EmulatedRunner
from hydrainfer.scheduler import Drafting, Scheduler
from hydrainfer.storage import BlockStore, Exports, LocalExports, Routes, StorePuller, between_tiers


class Wire:
    def __init__(self, cluster, name):
        self.cluster, self.name, self.address = cluster, name, name
        self.inbox, self.known = [], set()

    def connect(self, name, _address):
        self.known.add(name)

    def forget(self, name):
        self.known.discard(name)

    def send(self, name, data):
        assert name in self.known
        self.cluster.post(self.name, name, data)

    def receive(self):
        inbox, self.inbox = self.inbox, []
        return inbox

    def wake(self):
        """Called by the copying thread, whose copy is awaited."""


class TimedPuller:
    """Copies at once, for real, and says so when the modelled copy would be done."""

    def __init__(self, cluster, name, inner):
        self.cluster, self.name, self.inner = cluster, name, inner
        self.exports = inner.exports
        self.offer, self.end_offer = inner.offer, inner.end_offer
        self.forget, self.close = inner.forget, inner.close

    def pull(self, sources, pulls):
        _done(self.inner.pull(sources, pulls))
        n_bytes = sum(len(ids) * self.cluster.block_bytes[spec] for spec, (_, ids) in pulls.blocks.items())
        source = next(iter(sources.values())).owner.partition(":")[0]
        route = self.cluster.clusters.between(source, self.name)
        if route is not None:
            return route.begin(n_bytes, lambda: self.cluster.wake(self.name))
        return ModelledCopy(self.cluster.copies.begin(source, self.name, n_bytes, self.cluster.now))


class TimedHost:
    """The same between the device and the host of one instance."""

    def __init__(self, cluster, inner, link):
        self.cluster, self.inner, self.link = cluster, inner, link
        self.exports, self.close = inner.exports, inner.close

    def pull(self, sources, pulls):
        _done(self.inner.pull(sources, pulls))
        return self.link.pull(sources, pulls)


def _done(copy):
    while (ok := copy.poll(0.0)) is None:
        time.sleep(1e-4)
    assert ok


class Production:
    def __init__(self, instances, link, spoken=range(10, 90), routes=(), home=""):
        self.now, self.link, self.copies = 0.0, link, LinkEnds(link)
        self.events, self.n_events = [], 0
        of = {i.name: i.cluster for i in instances}
        self.clusters = Clusters(of, home, routes, None, link, Timer(lambda: self.now, self.at))
        n_changes = self.n_events  # of the routes' rates
        self.batches, self.outputs = [], []
        self.block_bytes = {spec.name: spec.block_bytes for i in instances for spec in i.blocks}
        self.roles = {i.name: i.role for i in instances}
        self.side = ServerSide(self.roles, self.hear, self.hear_event)
        self.tokens_s, self.tokens, self.lifecycle = {}, {}, []
        self.nodes, self.wires, self.caches, self.wakes, self.pullers = {}, {}, {}, {}, []
        local = LocalExports()
        for i in instances:
            plan = NodePlan(i.name, str(i.role), len(self.roles), "hub", "", "", host_identity(), cluster=i.cluster)
            wire = self.wires[i.name] = Wire(self, i.name)
            node = self.nodes[i.name] = Node(plan, 1, wire, lambda: self.now)
            stores = {spec.name: BlockStore(spec, n, "cpu") for spec, n in i.blocks.items()}
            self.caches[i.name] = CacheSet(dict(i.blocks))
            hosted = {spec.name: BlockStore(spec, n) for spec, n in i.host.items()}
            host, drafting = CacheSet(dict(i.host)), i.drafts and Drafting.of_guesses(i.drafts, i.budgets)
            scheduler = Scheduler(i.role, self.caches[i.name], i.budgets, i.policy, host=host, drafting=drafting)
            sliced = i.overlap == "slice"
            device = EmulatedDevice(i.cost, lambda: self.now, stores, spoken, sliced=sliced, guessing=i.drafts)
            runners = {lane: self.logged(i.name, EmulatedRunner(device, lane)) for lane in i.role.lanes}
            exports = Exports(owner_of(i.name, 1), stores, "local", local=local)
            routes = Routes("local", stores[next(iter(stores))].device, local=local)
            puller = StorePuller({DEVICE: stores, HOST: hosted}, exports, routes, wire.wake)
            moves = Moves(i.name, 1, scheduler, node.placer, node, TimedPuller(self, i.name, puller))
            copies = self.between(scheduler, {DEVICE: stores, HOST: hosted}, wire) if hosted else None
            engine = Engine(scheduler, runners, node.sink, node.record, i.overlap, moves, node.moved, copies=copies)
            self.pullers.append(puller)
            self.wakes[i.name] = 0.0
            node.start(engine, {})
        changes = []
        while self.events:  # every Hello arrives before the first request
            event = heapq.heappop(self.events)
            if event[1] <= n_changes:
                changes.append(event)
            else:
                event[2]()
        self.events = changes
        self.pump()

    def between(self, scheduler, tiers, wire):
        puller, exports = between_tiers(tiers, wire.wake)
        self.pullers.append(puller)
        link = HostLink(self.link, self.block_bytes, lambda: self.now)
        return Copies(scheduler, tier_movers(TimedHost(self, puller, link), exports))

    def logged(self, name, runner):
        launch = runner.launch

        def logging(batch):
            self.batches.append((self.now, name, *described(batch)))
            return launch(batch)

        runner.launch = logging
        return runner

    def hear(self, outputs):
        for o in outputs:
            assert o.error is None, o
            self.tokens.setdefault(o.request_id, []).extend(o.token_ids)

    def hear_event(self, event):
        self.lifecycle.append(event)

    def post(self, source, target, data):
        names = ("" if name == "hub" else name for name in (source, target))
        self.at(self.now + self.clusters.message_s(*names), lambda: self.deliver(target, data))

    def wake(self, name):
        self.wakes[name] = self.now

    def deliver(self, target, data):
        if target != "hub":
            self.wires[target].inbox.append(data)
            self.wakes[target] = self.now
            return
        message = decode_to_hub(data)
        self.side.hear(message, self.now)
        self.pump()

    def pump(self):
        for name, link in self.side.links.items():
            message = link.message(self.now)
            if message is not None:
                self.post("hub", name, encode(message))

    def at(self, time_s, call):
        self.n_events += 1
        heapq.heappush(self.events, (time_s, self.n_events, call))

    def arrive(self, request):
        self.side.lives.submit(request, self.now)
        self.pump()

    def run(self, requests):
        for request in sorted(requests, key=lambda r: r.arrival_s):
            self.at(request.arrival_s, lambda r=request: self.arrive(r))
        n_left, beat_at = len(requests), 0.0
        done = set()
        while len(done) < n_left:
            self.now = min([*self.wakes.values(), *(t for t, _, _ in self.events[:1]), beat_at])
            while self.events and self.events[0][0] <= self.now:
                heapq.heappop(self.events)[2]()
            if beat_at <= self.now:
                beat_at = self.side.tick(self.now)
                self.pump()
            for name in self.nodes:
                if self.wakes[name] <= self.now:
                    self.wakes[name] = self.now + self.nodes[name].turn()
            done = {e.request_id for e in self.lifecycle if e.kind == "finished"}

    def close(self):
        for puller in self.pullers:
            puller.close()


def described(batch):
    return batch.lane, [(w.seq.id, *msgspec.structs.astuple(w)[1:]) for w in batch.work]


__all__ = ["Production", "Pulse", "described"]
