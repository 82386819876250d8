"""Hub and nodes on real threads, fake devices: requests move, engines break, messages are garbage, all of it ends."""

import errno
import gc
import os
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace

import msgspec
import pytest
import zmq

from hydrainfer.cache import CacheSet
from hydrainfer.cluster import Hub, InProcess, Mesh, Pulse
from hydrainfer.cluster.messages import Close, Hello, Moved, Orders, Peer, Report, encode
from hydrainfer.core import ConfigError, ExportHandle, InternalError, Output, Role, Stage, Unavailable, owner_of
from hydrainfer.engine import Engine, Moves, Timing
from hydrainfer.scheduler import Budgets, Policy, Scheduler
from tests.cluster.rig import Rig
from tests.cluster.virtual import FakeCopy
from tests.engine.rig import Immediate
from tests.scheduler.fakes import EMBED, KV, FakeDevice, expected_tokens, make_request
from tests.waiting import wait_until

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]


class Breaking(FakeDevice):
    def run(self, batch):
        raise RuntimeError("a bug in the runner")


class World:
    """What the instances of a process share: each other's memory. `breaking`: devices that raise; `refusing`: name ->
    error at start; `slow`: name -> seconds that it takes to start."""

    def __init__(self, breaking=(), refusing=None, slow=None):
        self.breaking, self.refusing, self.slow = breaking, refusing or {}, slow or {}
        self.devices, self.caches, self.built = {}, {}, []

    def __call__(self, plan):
        return lambda node: (self.build(plan, node), {})

    def build(self, plan, node):
        time.sleep(self.slow.get(plan.name, 0.0))
        if plan.name in self.refusing:
            raise self.refusing[plan.name]
        role, owner = Role.parse(plan.role), owner_of(node.name, node.incarnation)
        sizes = {}
        if role.runs(Stage.ENCODE) or role.runs(Stage.PREFILL):
            sizes[EMBED] = 8
        if role.runs(Stage.PREFILL) or role.runs(Stage.DECODE):
            sizes[KV] = 64
        device = self.devices[owner] = Breaking() if plan.name in self.breaking else FakeDevice()
        caches = self.caches[plan.name] = CacheSet(sizes)
        scheduler = Scheduler(role, caches, Budgets(tokens=16, images=2), Policy())
        runners = {lane: Immediate(device, node.wake) for lane in role.lanes}
        timing, copies = Timing(patience_s=plan.pulse.patience_s), CopyNow(self, owner, node.wake)
        moves = Moves(node.name, node.incarnation, scheduler, node.placer, node, copies, timing)
        self.built.append(plan.name)
        return Engine(scheduler, runners, node.sink, node.record, moves=moves, moved=node.moved)

    def check_whole(self):
        for caches in self.caches.values():
            caches.check(idle=True)


class CopyNow:
    def __init__(self, world, owner, wake):
        self.world, self.owner, self.wake = world, owner, wake
        self.exports = {spec: ExportHandle(owner) for spec in ("kv", "embed")}

    def pull(self, sources, pulls):
        mine = self.world.devices[self.owner]
        for spec, (source_ids, ids) in pulls.blocks.items():
            theirs = self.world.devices[sources[spec].owner]
            for a, b in zip(source_ids, ids, strict=True):
                if spec == "embed":
                    mine.embed[b] = theirs.embed.get(a)
                else:
                    mine.kv.update({(b, i): theirs.kv.get((a, i)) for i in range(4)})
        self.wake()
        return FakeCopy(0.0, True)

    def offer(self, name, host):
        return self.exports

    def end_offer(self, name):
        return False

    def forget(self, owner):
        pass

    def close(self):
        pass


def traces():
    threads = sorted(t.name for t in threading.enumerate() if t.name.startswith(("hub", "instance")))
    return threads, len(os.listdir("/proc/self/fd"))


@contextmanager
def nothing_left():
    gc.collect()  # what other tests left
    threads, n_files = traces()
    yield
    wait_until(lambda: traces()[0] == threads and traces()[1] <= n_files)


def rig(layout, folder, world, **options):
    return Rig(layout, InProcess(world), folder, **options)


def ended(r, request):
    return next((o for o in list(r.outputs) if o.request_id == request.id and o.finish_reason), None)


def tokens(r, request):
    return [t for o in r.outputs if o.request_id == request.id for t in o.token_ids]


def test_requests_move_between_threads_and_close_leaves_nothing(tmp_path):
    world = World()
    with nothing_left(), rig("1E1P2D", tmp_path, world) as r:
        requests = [r.submit(f"r{i}", n_text=4 + i, pictures=[i % 3] * (i % 2), max_tokens=6) for i in range(12)]
        assert [r.tokens(q) for q in requests] == [expected_tokens(q) for q in requests]
        r.wait(lambda: r.hub.stats().n_landed == 18)  # 12 to decode, 6 pictures before that
        assert r.hub.stats().role == "1E1P2D"
        assert {(i.name, i.state, i.pid) for i in r.hub.instances()} == {
            (name, "alive", os.getpid()) for name in ("E0", "P0", "D0", "D1")
        }
        world.check_whole()


def test_close_ends_what_runs_and_what_comes_later(tmp_path):
    world = World()
    with nothing_left():
        with rig("1E1P2D", tmp_path, world) as r:
            requests = [r.submit(f"r{i}", pictures=[i], max_tokens=200) for i in range(6)]
            r.wait(lambda: len(r.outputs) > 4)
        for q in requests:
            end = ended(r, q)
            assert end.finish_reason == "length" or end.error.status == 503
            assert tokens(r, q) == expected_tokens(q)[: len(tokens(r, q))]
        world.check_whole()
        with pytest.raises(Unavailable, match="shutting down"):
            r.submit("late")
        r.hub.cancel(["r0"])
        r.hub.close()
        assert r.close_s < 5


def test_a_request_that_no_message_can_carry_is_refused_alone(tmp_path):
    with nothing_left(), rig("1E1P1D", tmp_path, World()) as r:
        good = r.submit("r0", max_tokens=6)
        with pytest.raises(OverflowError):
            r.hub.submit(msgspec.structs.replace(make_request("r1"), prompt_ids=(2**70,)))
        assert r.tokens(good) == expected_tokens(good)


def test_when_one_engine_breaks_its_requests_go_on_elsewhere(tmp_path):
    world = World(breaking=["D0"])
    with nothing_left(), rig("1E1P2D", tmp_path, world) as r:
        requests = [r.submit(f"r{i}", max_tokens=6) for i in range(10)]
        assert [r.tokens(q) for q in requests] == [expected_tokens(q) for q in requests]
        assert r.side.lives.n_recovered > 0
        got, wanted = r.answer("after", max_tokens=6)
        assert got == wanted
        assert {i.name: i.state for i in r.hub.instances()} == {
            "E0": "alive",
            "P0": "alive",
            "D0": "dead",
            "D1": "alive",
        }
        r.wait(lambda: not any(leased for _, leased, _ in r.hub.stats().cache_blocks.values()))
        r.wait(lambda: whole(world.caches["P0"]))  # what it reports is older than what it hears
        r.wait(lambda: whole(world.caches["D1"]))  # what it reports is older than what it hears


def test_when_the_only_engine_of_a_stage_breaks_requests_end_with_what_was_wrong(tmp_path):
    pulse = Pulse(beat_s=0.05, patience_s=0.3)
    world = World(breaking=["D0"])
    with nothing_left(), rig("1E1P1D", tmp_path, world, pulse=pulse) as r:
        requests = [r.submit(f"r{i}", max_tokens=6) for i in range(4)] + [r.submit("one", max_tokens=1)]
        r.wait(lambda: all(ended(r, q) for q in requests))
        for q in requests[:4]:
            error = ended(r, q).error
            assert (error.status, error.code, "decode" in error.message) == (503, "stage_lost", True), error
            assert tokens(r, q) == expected_tokens(q)[: len(tokens(r, q))]
        assert tokens(r, requests[4]) == expected_tokens(requests[4])
        assert r.side.census.dark() == [Stage.DECODE]
        died = "D0 has died, and nothing starts it again"
        assert r.hub.lost() == f"no instance can decode any more: {died}" and r.info("D0").trouble == died
        r.wait(lambda: not any(leased for _, leased, _ in r.hub.stats().cache_blocks.values()))
        r.wait(lambda: whole(world.caches["P0"]))  # what it reports is older than what it hears


def test_an_instance_for_which_there_is_no_file_descriptor_left_is_killed_and_the_hub_goes_on(tmp_path, monkeypatch):
    def full(name, address):
        raise zmq.ZMQError(errno.EMFILE)

    killed = []
    with nothing_left(), rig("2EPD", tmp_path, World()) as r:
        monkeypatch.setattr(r.launcher, "kill", lambda *who: killed.append(who))
        monkeypatch.setattr(r.hub._mesh, "connect", full)
        with closing(Mesh(f"ipc://{tmp_path}/other")) as other:
            other.connect("hub", r.hub.address)
            other.send(
                "hub", encode(Hello(Peer("EPD1", "EPD", 2, other.address), r.hub._keeper._host, os.getpid(), {}))
            )
            r.wait(lambda: killed == [("EPD1", 2)])
        r.hub._keeper._report_gone("EPD1", 2)
        r.launcher.nodes["EPD1"].closing = True  # incarnation 1, which the hub believes dead
        r.wait(lambda: r.info("EPD1").state == "dead")
        got, wanted = r.answer("after", max_tokens=6)
        assert got == wanted


GARBAGE = [
    b"",
    b"\x00",
    b"not msgpack at all",
    b"\xa1\xff",
    msgspec.msgpack.encode({"type": "Report"}),
    msgspec.msgpack.encode({"type": "Report", "name": "P0", "incarnation": "one", "at_s": 0.0}),
    msgspec.msgpack.encode({"type": "Shutdown"}),
    encode(Hello(Peer("P0", "P", 1, "-"), "h", 1, {})).replace(b"P0", b"\xff\xff"),
    b"\x81\xa1x" + b"\x91" * 100_000,
    encode(Orders(1, 0.0, (Close(),))),
    encode(Hello(Peer("X9", "EPD", 1, "nowhere"), "h", 1, {})),
    encode(Report("X9", 1, 0.0, (Output("r", (1,)),), (), (Moved("r", "X9", 1, 1),))),
    encode(Report("D0", 1, 0.0, (Output("r", (1,), finish_reason="length"),))),  # of an incarnation that never was
]


def test_garbage_is_refused_and_nobody_stops(tmp_path):
    with nothing_left(), zmq.Context() as context, rig("1E1P1D", tmp_path, World()) as r:
        addresses = [r.hub.address, *(m.hello.peer.address for m in r.side.census.members.values())]
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(r.hub.pixels_at)
            for frames in ([b"one"], [b"a", b"b", b"c"], [b"\xff\xfe"], [b"px0" * 1000]):
                dealer.send_multipart(frames)
            request = r.submit("r", max_tokens=60)
            for address in addresses:
                with context.socket(zmq.PUSH) as push:
                    push.connect(address)
                    for data in GARBAGE:
                        push.send(data)
                    push.send_multipart([b"several", b"frames"])
                    push.close(linger=1000)
            assert r.tokens(request) == expected_tokens(request)
            got, wanted = r.answer("after", max_tokens=6)
            assert got == wanted
            dealer.close(linger=0)
        assert [i.name for i in r.hub.instances() if i.state == "alive"] == ["E0", "P0", "D0"]
        assert r.hub.stats().stalled_s < 5


@pytest.mark.parametrize(
    ("refusing", "raises", "says"),
    [
        (ConfigError("no memory for caches of 3 GiB"), ConfigError, "no memory for caches of 3 GiB"),
        (RuntimeError("no such weights"), InternalError, "instance D0 cannot start: RuntimeError: no such weights"),
    ],
)
def test_an_instance_that_cannot_start_ends_the_others_with_its_reason_in_one_line(
    tmp_path, refusing, raises, says, caplog
):
    world = World(refusing={"D0": refusing}, slow={"P0": 0.5})
    with nothing_left(), pytest.raises(raises) as e, rig("1E1P1D", tmp_path, world):
        pass
    assert e.value.message == says
    assert raises is not ConfigError or not caplog.text, "said twice"
    assert sorted(world.built) == ["E0", "P0"]


def test_an_instance_that_takes_too_long_to_start_is_named(tmp_path):
    world = World(slow={"P0": 1.0})
    with (
        nothing_left(),
        pytest.raises(ConfigError, match=r"P0.* did not start within 0\.2 s"),
        rig("1E1P1D", tmp_path, world, timeout_s=0.2),
    ):
        pass


def test_a_layout_that_cannot_be_placed_leaves_no_thread(tmp_path):
    class Nowhere(InProcess):
        def start(self, plans, on_gone):
            raise ConfigError("layout needs 3 GPUs, the cluster has 0")

    with nothing_left(), pytest.raises(ConfigError, match="3 GPUs"), Rig("1E1P1D", Nowhere(World()), tmp_path):
        pass


def test_submit_without_an_instance_of_the_first_stage_that_could_come_back_is_refused(tmp_path):
    world = World(breaking=["P0"])
    with nothing_left(), rig("1E1P1D", tmp_path, world, pulse=Pulse(beat_s=0.05, patience_s=0.2)) as r:
        first = r.submit("first")
        r.wait(lambda: ended(r, first))
        assert ended(r, first).error.status == 503
        with pytest.raises(Unavailable, match="no instance can prefill any more"):
            r.hub.submit(make_request("second"))


def test_an_instance_that_failed_to_start_is_not_reported_dead_as_well(tmp_path, monkeypatch, caplog):
    close = Hub.close

    def close_late(hub):
        time.sleep(0.3)  # the hub hears that its thread has ended
        close(hub)

    monkeypatch.setattr(Hub, "close", close_late)
    world = World(refusing={"P0": ConfigError("too little memory")})
    with nothing_left(), pytest.raises(ConfigError, match="too little"), rig("1E1P1D", tmp_path, world):
        pass
    assert caplog.messages == []


def test_a_launcher_that_is_lost_ends_every_request_and_says_why_once(tmp_path, caplog):
    world = World()
    with nothing_left(), rig("1EPD", tmp_path, world, pulse=Pulse(beat_s=0.05)) as r:
        live = r.submit("live", max_tokens=10**6)
        assert r.hub.lost() is None
        r.launcher.lost = "what starts instances has died"
        r.wait(lambda: ended(r, live))
        assert (ended(r, live).error.status, ended(r, live).error.type) == (503, "service_unavailable")
        with pytest.raises(Unavailable):
            r.hub.submit(make_request("late"))
        assert r.hub.lost() == "what starts instances has died"
        r.wait(lambda: not any(t.name.startswith("instance") for t in threading.enumerate()))
    assert caplog.messages == ["the server ends: what starts instances has died"]


def test_a_launcher_that_is_lost_at_the_start_ends_it(tmp_path):
    class Lost(InProcess):
        def start(self, plans, on_gone):
            self.lost = "what starts instances has died"

    with nothing_left(), pytest.raises(InternalError, match="what starts instances has died"):
        Rig("1E1P1D", Lost(World()), tmp_path, pulse=Pulse(beat_s=0.05))


def whole(caches):
    """Whether nothing is leased. Asked from another thread than the one that uses them."""
    try:
        caches.check(idle=True)
    except (AssertionError, RuntimeError):
        return False
    return True


def test_instances_of_one_process_are_fixed(tmp_path):
    with nothing_left(), rig("1EPD", tmp_path, World()) as r:
        for change in (lambda: r.hub.add(replace(r.hub._plans[0], name="EPD1")), lambda: r.hub.remove("EPD0")):
            with pytest.raises(ConfigError, match="cannot come and go: use --launcher ray"):
                change()
