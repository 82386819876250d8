"""A deployment on a virtual clock: the engines, schedulers, caches, migrations and rosters that serve in production,
around devices and links that take the time their models say.

    arrival ─hub roster─> Submit ─> instance: hear, step, report, post ─> parcels ─> instance …

A message between them takes `Link.message_s`, and the latency of the route if they are in two clusters. Loads reach
the rosters as in production: the hub's with each report, the instances' with each parcel and each heartbeat.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from hydrainfer.cache import DEVICE, HOST, STORE, CacheSet, CacheSpec, Pulls, Split, StoreTier
from hydrainfer.cluster.instance import Instance, Pulse
from hydrainfer.cluster.messages import Beat, Learned, Peer, Submit
from hydrainfer.cluster.offload import Offload
from hydrainfer.cluster.placing import Placer
from hydrainfer.cluster.roster import Roster
from hydrainfer.core import (
    Cached,
    CostModel,
    DeviceTime,
    EventKind,
    ExportHandle,
    Guessing,
    Lane,
    LifecycleEvent,
    LiveSequence,
    Load,
    Output,
    Parcel,
    Request,
    Role,
    SlicedTime,
    Stage,
    StepBatch,
    StepResult,
    TokenWork,
    owner_of,
)
from hydrainfer.engine import Copies, CopyTicket, Engine, EventSink, Mover, Moves, Overlap, Stored, tier_movers
from hydrainfer.planner.nouns import Link, Route
from hydrainfer.planner.simulation.leap import TOKEN, Leap, ModelledTicket
from hydrainfer.planner.simulation.links import HostLink, LinkEnds, ModelledCopy
from hydrainfer.planner.simulation.routes import Clusters, Timer
from hydrainfer.planner.simulation.stores import ModelledStore, Shelf, StoreModel
from hydrainfer.scheduler import Budgets, Drafting, Policy, Scheduler

_INCARNATION = 1
_BEAT_S = Pulse().beat_s


class InstanceModel(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of a deployment. `blocks`: the number of blocks per cache that its memory holds; `split`: how the
    caches share that memory; `host`: the number of blocks of each cache in host memory. `drafts`: the guesses that come
    with its results. `cluster`: where it is."""

    name: str
    role: Role
    cost: CostModel
    blocks: Mapping[CacheSpec, int]
    budgets: Budgets = Budgets()
    policy: Policy = Policy()
    overlap: Overlap = "free"
    host: Mapping[CacheSpec, int] = {}
    split: Split | None = None
    drafts: Guessing | None = None
    cluster: str = ""


@dataclass(slots=True)
class ServedRequest:
    """One request, its tokens, and when they were made, in seconds of the virtual clock."""

    request: Request
    token_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: str = ""

    @property
    def arrival_s(self) -> float:
        assert self.request.arrival_s is not None
        return self.request.arrival_s


class Simulator:
    """One run of a deployment. `record` gets the lifecycle events; `watch`, if given, is asked at every heartbeat
    whether to stop. With `leaps`, decode steps that change nothing but counts are computed at once (`leap.py`).
    `answer(request, n)`: the token after the first `n` tokens of an answer. `store`: one that all instances share.
    `routes`: between clusters; the server is in the cluster `home`; `offload` chooses which one prefills a prompt.
    `pixel_bytes`: of the pixels behind an embedding token, which an encoder in another cluster gets from home."""

    def __init__(
        self,
        instances: Sequence[InstanceModel],
        link: Link | None = None,
        *,
        balancing: str = "least_load",
        record: EventSink | None = None,
        watch: Callable[[float], bool] | None = None,
        leaps: bool = True,
        answer: Callable[[Request, int], int] = lambda *_: TOKEN,
        store: StoreModel | None = None,
        routes: Sequence[Route] = (),
        home: str = "",
        offload: Offload | None = None,
        pixel_bytes: float = 0.0,
    ) -> None:
        self.answer = answer
        self.pixel_bytes = pixel_bytes
        self.shelf = None if store is None else Shelf(store)
        self.link = link or Link()
        self.now = 0.0
        self.served: dict[str, ServedRequest] = {}
        self.n_done = 0
        self.n_turns = 0
        self.leaps = leaps
        self._watch = watch
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._n_events = 0
        self._due: list[tuple[float, int, ModelledNode]] = []
        peers = [Peer(i.name, str(Role(i.role.stages)), _INCARNATION, i.name, cluster=i.cluster) for i in instances]
        self._roster = Roster()
        self._roster.update(peers)
        self._placer = Placer(self._roster, balancing)
        self._listeners = self._roster.listeners()
        self.copies = LinkEnds(self.link)
        of = {i.name: i.cluster for i in instances}
        n_places = max(i.budgets.running for i in instances)
        timer = Timer(lambda: self.now, self.at)
        self.clusters = Clusters(of, home, routes, offload, self.link, timer, n_places)
        self.nodes: dict[str, ModelledNode] = {}
        for n, instance in enumerate(instances):
            placer = Placer(Roster(), balancing)
            placer.roster.update(peers)
            self.nodes[instance.name] = ModelledNode(self, n, instance, placer, record)
        self._said: dict[str, deque[tuple[float, Load, Cached | None]]] = {name: deque() for name in self.nodes}
        self._beat_at = 0.0
        self.shares = False

    def run(self, requests: Iterable[Request], ready_s: Mapping[str, float] | None = None) -> list[ServedRequest]:
        """Serve all requests in order of arrival, or until `watch` says to stop. Returns all requests, unfinished ones
        too. `ready_s`: when the server has prepared each request, by id; None: on arrival."""
        arrivals = sorted(requests, key=lambda r: r.arrival_s or 0.0)
        self.served.update((r.id, ServedRequest(r)) for r in arrivals)
        self.shares = any(r.keys for r in arrivals)
        for request in arrivals:
            at_s = request.arrival_s or 0.0
            self.at(at_s if ready_s is None else ready_s[request.id], partial(self._arrive, request))
        for node in self.nodes.values():
            self._wake(node, 0.0)
        events = self._events
        due = self._due
        while self.n_done < len(self.served):
            now = min(events[0][0], due[0][0]) if events else due[0][0]
            self.now = now = min(now, self._beat_at)
            while events and events[0][0] <= now:
                heapq.heappop(events)[2]()
            if self._beat_at <= now:
                if self._watch is not None and self._watch(now):
                    break
                self._beat(now)
            if due[0][0] <= now:
                for node in self._pop_due(now):
                    self._wake(node, node.turn(now))
        return list(self.served.values())

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        self._n_events += 1
        heapq.heappush(self._events, (time_s, self._n_events, call))

    # ---- what nodes ask

    def hear(self, outputs: list[Output]) -> None:
        now = self.now
        served = self.served
        for output in outputs:
            mine = served[output.request_id]
            mine.token_s += [now] * len(output.token_ids)
            mine.tokens += output.token_ids
            if output.finish_reason is not None:
                mine.finish = output.finish_reason
                self.n_done += 1

    def report(self, name: str, load: Load, at_s: float, cached: Cached | None = None) -> None:
        """Store the load that instance `name` sent at `at_s`, which may be in the past, until the roster reads
        loads."""
        to_hub_s = self.clusters.message_s(name, "")
        self._said[name].append((at_s + to_hub_s, load, cached))
        if cached is None or not self._roster.roles[name].runs(Stage.PREFILL):
            return
        learned = Learned(name, cached)
        for other in self.nodes:
            if (other, _INCARNATION) in self._listeners:
                at = at_s + (to_hub_s + self.clusters.message_s("", other))
                self.at(at, partial(self.nodes[other].hear, learned, at))

    def post(self, name: str, peer: str, parcel: Parcel) -> None:
        self.at(self.now + self.clusters.message_s(name, peer), partial(self._deliver, self.nodes[peer], parcel))

    def copy(self, source: str, node: ModelledNode, n_bytes: int) -> CopyTicket:
        """Begin to copy from the instance `source` to `node`."""
        route = self.clusters.between(source, node.name)
        if route is None:
            return ModelledCopy(self.copies.begin(source, node.name, n_bytes, self.now))
        return route.begin(n_bytes, partial(self._copied, node))

    # ---- inside

    def _pop_due(self, now: float) -> list[ModelledNode]:
        due: list[ModelledNode] = []
        while self._due and self._due[0][0] <= now:
            at_s, _, node = heapq.heappop(self._due)
            if node.wake_at == at_s and node not in due:
                due.append(node)
        if len(due) > 1:
            due.sort(key=lambda node: node.number)
        return due

    def _wake(self, node: ModelledNode, at_s: float) -> None:
        node.wake_at = at_s
        heapq.heappush(self._due, (at_s, node.number, node))

    def _copied(self, node: ModelledNode) -> None:
        node.has_news = True
        if node.wake_at > self.now:
            self._wake(node, self.now)

    def _hear_reports(self) -> None:
        """Take in the loads that have arrived, those of nodes in a leap included."""
        roster = self._roster
        for name, node in self.nodes.items():
            said = self._said[name]
            while said and said[0][0] <= self.now:
                _, load, cached = said.popleft()
                roster.hear(name, load)
                if cached is not None:
                    roster.locator.learn(name, cached)
            leapt = None
            if node.leap is not None:
                leapt = node.leap.reported(self.now - self.clusters.message_s(name, ""))
            if leapt is not None:
                roster.hear(name, leapt)

    def _arrive(self, request: Request) -> None:
        self._hear_reports()
        request, elsewhere = self.clusters.placed(request, self._roster)
        name = self._placer.choose(request, request.plan()[0], elsewhere)
        assert name is not None, "the layout lacks a stage"
        submit = partial(self._deliver, self.nodes[name], Submit(request))
        n_bytes = self.pixel_bytes * sum(m.n_tokens for m in request.media)
        route = self.clusters.between("", name) if n_bytes else None
        if route is not None and self.nodes[name].engine.scheduler.duties.runs(Stage.ENCODE):
            route.begin(n_bytes, submit)
        else:
            self.at(self.now + self.clusters.message_s("", name), submit)

    def _deliver(self, node: ModelledNode, message: Parcel | Submit) -> None:
        node.inbox.append(message)
        if node.wake_at > self.now:
            self._wake(node, self.now)

    def _beat(self, now: float) -> None:
        self._beat_at = now + _BEAT_S
        self._hear_reports()
        self.clusters.observe(now, self._roster, self.n_done)
        beat = Beat(dict(self._roster.loads))
        at_s: dict[float, list[ModelledNode]] = {}
        for node in self.nodes.values():
            at_s.setdefault(now + self.clusters.message_s("", node.name), []).append(node)

        def deliver(nodes: list[ModelledNode]) -> None:  # wakes none: loads are only read when a request is placed
            for node in nodes:
                node.hear(beat, self.now)

        for time_s, nodes in at_s.items():
            self.at(time_s, partial(deliver, nodes))


class ModelledNode(Instance):
    """One instance of a deployment. Satisfies the engine's `Puller`, too."""

    engine: Engine

    def __init__(self, sim: Simulator, number: int, i: InstanceModel, placer: Placer, record: EventSink | None) -> None:
        super().__init__(i.name, _INCARNATION, placer.roster, _BEAT_S)
        self.placer = placer
        self.number = number
        self._sim = sim
        self._record = record
        self.caches = CacheSet(dict(i.blocks), i.split)
        self.exports = {spec.name: ExportHandle(owner_of(i.name, _INCARNATION)) for spec in i.blocks}
        self._block_bytes = {spec.name: spec.block_bytes for spec in i.blocks}
        self.inbox: list[Parcel | Submit] = []
        self.leap: Leap | None = None
        self.has_news = False  # a copy over a route is done
        self.wake_at = 0.0
        host, drafting = CacheSet(dict(i.host)), i.drafts and Drafting.of_guesses(i.drafts, i.budgets)
        tier = None if sim.shelf is None else StoreTier(self.caches.specs)
        scheduler = Scheduler(i.role, self.caches, i.budgets, i.policy, host=host, drafting=drafting, store=tier)
        self.device = SlicedTime(i.cost) if i.overlap == "slice" else DeviceTime(i.cost)
        self._runners = {lane: _ModelledLane(self.device, sim, i.drafts) for lane in i.role.lanes}
        self._leaps = sim.leaps and i.drafts is None  # no two steps are alike with drafts
        moves = Moves(i.name, _INCARNATION, scheduler, placer, self, self)
        told, copies = (self.sink, record), self._copies(scheduler, tier, bool(i.host))
        self.engine = Engine(scheduler, self._runners, *told, i.overlap, moves, self.moved, copies=copies)

    def _copies(self, scheduler: Scheduler, tier: StoreTier | None, hosted: bool) -> Copies | None:
        """The copies between device and host memory, and from and to the store; None if there is neither."""
        sim, movers, stored = self._sim, dict[str, Mover](), None
        if hosted:
            link = HostLink(sim.link, self._block_bytes, lambda: sim.now)
            movers |= tier_movers(link, dict.fromkeys((DEVICE, HOST), link.exports))
        if tier is not None and sim.shelf is not None:
            tier.byte_s = 1.0 / sim.shelf.model.read_bytes_per_s
            client = ModelledStore(sim.shelf, self.caches.specs, lambda: sim.now)
            movers[STORE] = stored = Stored(scheduler, client, tier, warn=lambda *_: None)
        return Copies(scheduler, movers, stored) if movers else None

    def turn(self, now: float) -> float:
        """Hear, step, report, post. Returns when the next turn is due."""
        if self.leap is not None:
            if not (self.inbox or self.has_news) and now < self.leap.ends_at:  # only a heartbeat is due
                self.beat_at = now + _BEAT_S
                self._sim.report(self.name, self.leap.load_at(now), now)
                return min(self.leap.ends_at, self.beat_at)
            self._land(self.leap, now)
            self.leap = None
        self._sim.n_turns += 1
        self.has_news = False
        inbox = self.inbox
        self.inbox = []
        for message in inbox:
            self.hear(message, now)
        wake_at = self.step(now)
        flying = [self._runners[lane].ticket for lane in self.engine.lanes.in_flight]
        if len(flying) == 1 and self._leaps:
            self.leap = Leap.begin(self.engine, self.device, flying[0], wake_at)
            if self.leap is not None:
                return min(self.leap.ends_at, self.beat_at)
        for ticket in flying:
            wake_at = min(wake_at, ticket.span.end_s)
        return min(wake_at, self.beat_at)

    def report(self, now: float) -> None:
        self._sim.hear(self.outputs)
        self._sim.report(self.name, self.engine.load(), now, self.engine.news() if self._sim.shares else None)

    def post(self, peer: str, parcel: Parcel) -> None:
        self._sim.post(self.name, peer, parcel)

    def _land(self, leap: Leap, now: float) -> None:
        for load, at_s in leap.unreported(now, self._sim.clusters.message_s(self.name, "")):
            self._sim.report(self.name, load, at_s)
        leap.land(now, self._decoded, self._sim.answer)

    def _decoded(self, seq: LiveSequence, at_s: list[float]) -> list[int]:
        """Record a token of `seq` at each of these times. Returns the tokens."""
        served = self._sim.served[seq.id]
        first = seq.n_computed + 1
        tokens = [self._sim.answer(seq.request, first + i) for i in range(len(at_s))]
        served.token_s += at_s
        served.tokens += tokens
        if self._record is not None:
            for t in at_s:
                self._record(LifecycleEvent(seq.id, EventKind.TOKEN, t))
        return tokens

    def pull(self, sources: dict[str, ExportHandle], pulls: Pulls) -> CopyTicket:
        n_bytes = sum(len(ids) * self._block_bytes[spec] for spec, (_, ids) in pulls.blocks.items())
        source = next(iter(sources.values())).owner.partition(":")[0]
        return self._sim.copy(source, self, n_bytes)

    def offer(self, name: str, host: str) -> dict[str, ExportHandle]:  # noqa: ARG002 - all are one machine
        return self.exports

    def end_offer(self, name: str) -> bool:  # noqa: ARG002 - modelled links are never cut
        return False

    def forget(self, owner: str) -> None:
        """Nothing to do: no modelled instance dies."""

    def close(self) -> None:
        """Nothing to do: nothing runs outside the virtual clock."""


class _ModelledLane:
    """One lane of a modelled device. `ticket`: that of the latest batch."""

    ticket: ModelledTicket

    def __init__(self, device: DeviceTime, sim: Simulator, drafts: Guessing | None) -> None:
        self._device = device
        self._sim = sim
        self._drafts = drafts

    def launch(self, batch: StepBatch) -> ModelledTicket:
        result = StepResult(batch)
        if batch.lane is Lane.LANGUAGE and self._drafts is not None:
            self._sample(batch, result, self._drafts)
        elif batch.lane is Lane.LANGUAGE:
            answer = self._sim.answer
            result.tokens = [answer(w.seq.request, w.start + w.count) for w in batch.work if w.sample]
        now = self._sim.now
        self.ticket = ModelledTicket(self._device.occupy(batch, now), result, now)
        return self.ticket

    def _sample(self, batch: StepBatch, result: StepResult, guessing: Guessing) -> None:
        """A token for each row, and guesses of what follows the right ones."""
        for place, w in enumerate(batch.work):
            if not isinstance(w, TokenWork) or not w.sample:
                continue
            answer = partial(self._sim.answer, w.seq.request)
            n_drafts = len(w.drafts)
            rows = [answer(w.start + w.count - n_drafts + n) for n in range(1 + n_drafts)]
            n_right = next((n for n, draft in enumerate(w.drafts) if draft != rows[n]), n_drafts)
            result.tokens += rows
            n_tokens = w.start + w.count - n_drafts + n_right + 1
            result.drafts[place] = guessing.after(w.seq.request, n_tokens, answer)

    def close(self) -> None:
        """Nothing to do: nothing runs outside the virtual clock."""
