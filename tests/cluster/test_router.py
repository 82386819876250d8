"""The router: who gets a request, who keeps a picture; engines on threads, and what they do when one of them breaks."""

import random
import threading
import time

import pytest

from hydrainfer.cluster import HashRing, LocalLink, Member, Router
from hydrainfer.core import ExportHandle, Role, Stage, Unavailable
from hydrainfer.engine import Engine, EngineThread, Moves, Timing
from hydrainfer.scheduler import Budgets, Policy, Scheduler
from tests.cluster.virtual import Cluster, FakeCopy
from tests.engine.test_engine import Immediate, wait_for
from tests.scheduler.fakes import EMBED, KV, CacheSet, FakeDevice, expected_tokens, make_request

pytestmark = pytest.mark.unit


def test_a_ring_moves_only_the_keys_of_who_left():
    names = [f"E{i}" for i in range(5)]
    ring, keys = HashRing(names), [b"picture%d" % i for i in range(500)]
    before = {k: ring.owner(k, names) for k in keys}
    after = {k: ring.owner(k, names[1:]) for k in keys}
    assert all(after[k] == before[k] for k in keys if before[k] != "E0")
    shares = [list(before.values()).count(n) for n in names]
    assert min(shares) > 40, shares
    assert ring.owner(b"x", []) is None


@pytest.mark.parametrize("balancing", ["least_load", "round_robin", "random"])
def test_a_burst_is_spread(balancing):
    cluster = Cluster("3EPD", 64, 32, balancing=balancing)
    for i in range(30):
        cluster.submit(make_request(f"r{i}"))
    waiting = [e.stats(0.0).n_waiting for e in cluster.engines.values()]
    assert sum(waiting) == 30 and (min(waiting) >= 4 if balancing == "random" else waiting == [10, 10, 10])


def test_the_least_loaded_is_chosen_and_the_dead_and_the_excluded_are_not():
    cluster = Cluster("1E1P2D+1PD", 64, 32)
    router, request = cluster.router, make_request("x")
    cluster.engines["PD4"].submit(make_request("busy"), 0.0)
    assert {router.choose(request, Stage.DECODE, ()) for _ in range(4)} == {"D2", "D3"}
    assert router.choose(request, Stage.DECODE, {"D2", "D3"}) == "PD4"
    router.members["D2"].handle.alive = False
    assert router.choose(request, Stage.DECODE, {"D3", "PD4"}) is None
    router.members["P1"].handle.alive = router.members["PD4"].handle.alive = False
    with pytest.raises(Unavailable, match="prefill"):
        router.submit(make_request("y"))


class Threads:
    """1P2D on real threads over fake devices."""

    def __init__(self, break_on=None):
        self.outputs, self.devices, self.caches = [], {}, {}
        roles = {"P": "P", "D0": "D", "D1": "D"}
        self.threads = {name: EngineThread(name=name) for name in roles}
        lock = threading.Lock()
        members = [Member(n, Role.parse(r), self.threads[n]) for n, r in roles.items()]
        self.router = Router(members, lock, "round_robin", random.Random(0))
        for name, role, thread, _ in members:
            self.caches[name] = CacheSet({KV: 64, EMBED: 8} if name == "P" else {KV: 64})
            self.devices[name] = Breaking() if name == break_on else FakeDevice()
            s = Scheduler(role, self.caches[name], Budgets(tokens=16, images=2), Policy())
            runners = {lane: Immediate(self.devices[name], thread.wake) for lane in role.lanes}
            moves = Moves(name, 0, s, self.router, LocalLink(self.threads, lock), CopyNow(self, name), Timing())
            thread.on_death = lambda name=name: self.router.lost(name)
            thread.start(Engine(s, runners, self.outputs.extend, moves=moves))

    def end(self, request_id):
        return next((o for o in list(self.outputs) if o.request_id == request_id and o.finish_reason), None)

    def tokens(self, request_id):
        return [t for o in self.outputs if o.request_id == request_id for t in o.token_ids]


class CopyNow:
    def __init__(self, rig, name):
        self.rig, self.name = rig, name
        self.exports = {spec: ExportHandle(name) for spec in ("kv", "embed")}

    def pull(self, sources, pulls):
        source = self.rig.devices[sources["kv"].owner].kv
        for a, b in zip(*pulls["kv"]):
            self.rig.devices[self.name].kv.update({(b, i): source.get((a, i)) for i in range(4)})
        self.rig.threads[self.name].wake()
        return FakeCopy(0.0, True)

    def forget(self, owner):
        pass

    def close(self):
        pass


class Breaking(FakeDevice):
    def run(self, batch):
        raise RuntimeError("a bug in the runner")


def test_requests_move_between_threads_and_close_leaves_nothing():
    rig = Threads()
    requests = [make_request(f"r{i}", n_text=4 + i, max_tokens=6) for i in range(12)]
    for r in requests:
        rig.router.submit(r)
    wait_for(lambda: all(rig.end(r.id) for r in requests))
    assert all(rig.tokens(r.id) == expected_tokens(r) for r in requests)
    assert rig.router.stats().n_landed == 12 and rig.router.stats().role == "1P+2D"
    for i in range(6):
        rig.router.submit(make_request(f"s{i}", max_tokens=200))
    time.sleep(0.01)
    rig.router.close()
    for caches in rig.caches.values():
        caches.check(idle=True)
    with pytest.raises(Unavailable):
        rig.router.submit(make_request("late"))


def test_when_one_engine_breaks_the_others_go_on():
    rig = Threads(break_on="D0")
    requests = [make_request(f"r{i}", max_tokens=6) for i in range(10)]
    for r in requests:
        rig.router.submit(r)
    wait_for(lambda: all(rig.end(r.id) for r in requests))
    ends = {r.id: rig.end(r.id) for r in requests}
    assert any(e.error is not None and e.error.status == 500 for e in ends.values())
    for r in requests:
        assert ends[r.id].error is not None or rig.tokens(r.id) == expected_tokens(r)
    rig.router.submit(make_request("after", max_tokens=6))
    wait_for(lambda: rig.end("after"))
    assert rig.end("after").finish_reason == "length"
    assert rig.router.stats().stalled_s == float("inf")
    rig.router.close()
    rig.caches["P"].check(idle=True)
    rig.caches["D1"].check(idle=True)
