"""The migration machines against a network that loses, repeats and reorders, copies that fail, and nodes that die at
any transition: a request lands once or is recomputed, and blocks are freed only when nobody who matters reads them."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from hydrainfer.cluster.messages import decode_to_instance, encode
from hydrainfer.core import Admit, Handoff, Landed, Reject, Release, Renew
from hydrainfer.core.handoff import ExportHandle, Parcel
from hydrainfer.engine.migration import Drop, Free, HandedOver, Land, Retry, Send, Source, State, Target, Timing
from tests.scheduler.fakes import make_request

pytestmark = pytest.mark.unit

TIMING = Timing(lease_s=10.0, renew_s=3.0, resend_s=2.0)
HANDOVER_S = 15.0


def make_handoff(name, attempt=0, source="A"):
    exports = {"kv": ExportHandle(f"{source}:0", n_blocks=8, block_bytes=64, ways={"local": f"{source}/kv"})}
    return Handoff(
        request=make_request(name, pictures=[1]),
        cursor=2,
        produced=(7, 8),
        n_computed=12,
        attempt=attempt,
        order=(1.5, 3),
        source=source,
        incarnation=4,
        hops=0,
        blocks={"kv": (3, 1, 2)},
        exports=exports,
    )


class Node:
    def __init__(self, name):
        self.name, self.alive = name, True
        self.source, self.target = Source(TIMING), Target(TIMING)
        self.holds = {}  # hold -> request
        self.arriving = {}  # key -> whether its copy, once terminal, read what was held throughout
        self.copying = {}  # key -> hold it reads, or None if that was free when the copy began


class World(RuleBasedStateMachine):
    @initialize(n=st.integers(1, 3))
    def begin(self, n):
        self.now, self.wire = 0.0, []
        self.nodes = {name: Node(name) for name in "ABC"}
        self.owner, self.attempt, self.landed, self.recomputed, self.cancelled = {}, {}, [], set(), set()
        self.handed_s = {}
        self.hold_of = {}  # (source node, request) -> hold, while not freed
        for i in range(n):
            r = f"r{i}"
            self.owner[r], self.attempt[r] = "A", 0
            self.nodes["A"].holds[i], self.hold_of["A", r] = r, i
            self.offer(r, "B")

    def offer(self, r, peer):
        if not self.nodes[peer].alive:
            peer = "C" if peer == "B" else "B"
        if not self.nodes[peer].alive:
            self.cancel(r)  # no instance of its stage is left
            return
        source = self.nodes["A"].source
        self.do("A", source.offer(make_handoff(r, self.attempt[r]), peer, self.hold_of["A", r], self.now))
        self.attempt[r] += 1

    def do(self, at, effects):
        node = self.nodes[at]
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self.wire.append((at, peer, message))
                case HandedOver(r):
                    assert self.owner[r] == at
                    self.owner[r], self.handed_s[r] = None, self.now
                case Retry(r, peer):
                    assert self.owner[r] == at
                    self.offer(r, "C" if peer == "B" else "B")
                case Free(hold):
                    del self.hold_of[at, node.holds.pop(hold)]
                case Land(key):
                    assert node.arriving.pop(key), "landed with blocks that were freed under the copy"
                    assert self.owner[key[0]] is None
                    self.owner[key[0]] = at
                    self.landed.append(key[0])
                case Drop(key):
                    del node.arriving[key]
                    assert key not in node.copying, "dropped under a copy"

    def deliver(self, i):
        at, to, message = self.wire[i]
        node = self.nodes[to]
        if not (node.alive and self.nodes[at].alive):
            return  # membership: who is known to be dead is not listened to
        (message,) = decode_to_instance(encode(Parcel(at, 0, (message,)))).messages
        side = node.source if isinstance(message, Admit | Reject | Landed | Release | Renew) else node.target
        self.do(to, side.handle(at, message, self.now))

    def targets(self, state):
        return [
            (n, h.key)
            for n in self.nodes.values()
            if n.alive
            for h in ([o.handoff for o in n.target._offers.values() if o.state is state])
        ]

    @rule(data=st.data(), again=st.booleans())
    @precondition(lambda self: self.wire)
    def message_arrives(self, data, again):
        i = data.draw(st.integers(0, len(self.wire) - 1))
        self.deliver(i)
        if not again:
            self.wire.pop(i)

    @rule(data=st.data())
    @precondition(lambda self: self.wire)
    def message_is_lost(self, data):
        self.wire.pop(data.draw(st.integers(0, len(self.wire) - 1)))

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.0, 11.0]))
    def time_passes(self, seconds):
        self.now += seconds
        for node in self.nodes.values():
            if node.alive:
                self.do(node.name, node.source.tick(self.now))
                self.do(node.name, node.target.tick(self.now))
        for r, handed_s in self.handed_s.items():  # as the server: nobody has said that it arrived
            if self.owner[r] is None and self.now > handed_s + HANDOVER_S:
                self.recomputed.add(r)
                self.owner[r] = "gone"

    @rule(data=st.data())
    @precondition(lambda self: self.targets(State.OFFERED))
    def room_is_found(self, data):
        self.admit(*data.draw(st.sampled_from(self.targets(State.OFFERED))))

    def admit(self, node, key):
        self.do(node.name, node.target.admit(key))
        node.arriving[key] = False
        node.copying[key] = self.hold_of.get(("A", key[0]))

    @rule(data=st.data())
    @precondition(lambda self: self.targets(State.OFFERED))
    def offer_is_rejected(self, data):
        node, key = data.draw(st.sampled_from(self.targets(State.OFFERED)))
        self.do(node.name, node.target.reject(key, None))

    @rule(data=st.data(), ok=st.booleans())
    @precondition(lambda self: any(n.copying for n in self.nodes.values() if n.alive))
    def copy_ends(self, data, ok):
        copies = [(n, key) for n in self.nodes.values() if n.alive for key in n.copying]
        self.finish(*data.draw(st.sampled_from(copies)), ok)

    def finish(self, node, key, ok):
        hold = node.copying.pop(key)
        node.arriving[key] = hold is not None and hold in self.nodes["A"].holds
        self.do(node.name, node.target.pulled(key, ok, self.now))

    @rule(data=st.data())
    @precondition(lambda self: "A" in self.owner.values())
    def client_leaves(self, data):
        self.cancel(data.draw(st.sampled_from([r for r, o in self.owner.items() if o == "A"])))

    def cancel(self, r):
        self.owner[r] = "gone"
        self.cancelled.add(r)
        self.do("A", self.nodes["A"].source.close(r, self.hold_of["A", r], self.now))

    def expected(self, r):
        return any(key[0] == r for n in self.nodes.values() if n.alive for key in n.target._offers)

    @rule(name=st.sampled_from("ABC"))
    def node_dies(self, name):
        node = self.nodes[name]
        if not node.alive or sum(n.alive for n in self.nodes.values()) == 1:
            return
        node.alive = False
        node.copying.clear()
        for other in self.nodes.values():
            if other.alive:
                self.do(other.name, [*other.source.peer_dead(name), *other.target.peer_dead(name)])
        for r, owner in self.owner.items():  # the supervisor: who is not at a living instance starts again
            if owner == name or (owner is None and name == "A") or (owner is None and not self.expected(r)):
                self.recomputed.add(r)
                self.owner[r] = "gone"

    def teardown(self):
        """From now on the network is good: everything comes to rest."""
        if not hasattr(self, "nodes"):
            return
        for _ in range(300):
            while self.wire:
                self.deliver(0)
                self.wire.pop(0)
            for state_node, key in self.targets(State.OFFERED):
                if key not in state_node.arriving:
                    self.admit(state_node, key)
            for node in self.nodes.values():
                for key in list(node.copying) if node.alive else []:
                    self.finish(node, key, True)
            self.time_passes(2.0)
            idle = all(n.source.idle and not len(n.target) for n in self.nodes.values() if n.alive)
            if idle and not self.wire and None not in self.owner.values():  # else the server will start some again
                break
        else:
            raise AssertionError("it never came to rest")
        assert len(set(self.landed)) == len(self.landed), "landed twice"
        for r in self.owner:
            ends = (r in self.landed and r not in self.recomputed, r in self.recomputed, r in self.cancelled)
            assert sum(ends) == 1, (r, ends)
        for node in self.nodes.values():
            assert not node.alive or not (node.holds or node.arriving), "blocks left behind"


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_schedules():
    run_state_machine_as_test(World, settings=settings(max_examples=10_000, stateful_step_count=50, deadline=None))


def test_messages_survive_the_codec():
    from hydrainfer.core import Confirm, ErrorInfo, InvalidRequest, Offer, Withdraw

    key = ("a", 3)
    messages = (
        Offer(make_handoff("a", 3)),
        Admit(key),
        Reject(key, ErrorInfo.of(InvalidRequest("no"))),
        Landed(key, 1),
        Confirm(key, 1, True),
        Release(key, 1),
        Withdraw(key),
        Renew((key, ("b", 0))),
    )
    parcel = Parcel("P0", 7, messages)
    assert decode_to_instance(encode(parcel)) == parcel
    with pytest.raises(Exception, match=r"Expected|malformed|truncated"):
        decode_to_instance(b"\x93garbage")


def test_a_handoff_is_a_sequence_again():
    handoff = make_handoff("a", 2)
    seq = handoff.sequence(now=5.0)
    assert (seq.cursor, seq.attempt, seq.n_computed, seq.n_produced, seq.order) == (2, 2, 12, 2, (1.5, 3))
    blocks = {"kv": (3, 1, 2)}
    assert Handoff.of(seq, blocks, "A", 4, handoff.exports) == msgspec.structs.replace(handoff, hops=1)


def test_a_quarantined_hold_is_freed_only_by_the_peers_word():
    s = Source(TIMING)
    s.offer(make_handoff("a"), "B", 0, 0.0)
    effects = s.tick(10.0)
    assert Retry("a", "B", cut=True) in effects and not any(isinstance(e, Free) for e in effects)
    assert not any(isinstance(e, Free) for e in s.close("a", 0, 11.0))
    assert not any(isinstance(e, Free) for e in s.tick(100.0))
    assert Free(0) in s.handle("B", Release(("a", 0), 1), 101.0) and s.idle


def test_blocks_offered_over_a_socket_come_back_with_the_lease():
    """Once no read is running; the peer need not say anything."""
    reading, ended = [True], []

    def end_reads(key):
        ended.append(key)
        return not reading

    s, handoff = Source(TIMING, end_reads), make_handoff("a")
    named = {spec: msgspec.structs.replace(handle, offer="a/0") for spec, handle in handoff.exports.items()}
    s.offer(msgspec.structs.replace(handoff, exports=named), "B", 0, 0.0)
    assert Retry("a", "B", cut=True) in s.tick(10.0) and ended == [("a", 0)]
    assert not any(isinstance(e, Free) for e in s.close("a", 0, 10.5))
    reading.clear()
    assert Free(0) in s.tick(12.0) and s.idle


def test_a_cancelled_offer_keeps_its_blocks_until_the_peer_answers_or_the_lease_ends():
    s, handoff = Source(TIMING), make_handoff("a")
    named = {spec: msgspec.structs.replace(handle, offer="a/0") for spec, handle in handoff.exports.items()}
    s.offer(msgspec.structs.replace(handoff, exports=named), "B", 0, 0.0)
    assert not any(isinstance(e, Free) for e in (*s.close("a", 0, 1.0), *s.tick(3.0), *s.tick(9.0)))
    assert Free(0) in s.tick(10.0) and s.idle


def test_a_peer_that_does_not_answer_for_a_lease_is_forgotten():
    """The source after it has let go, the target after it has copied."""
    s, t = Source(TIMING), Target(TIMING)
    (send,) = s.offer(make_handoff("a"), "B", 0, 0.0)
    t.handle("A", send.message, 0.0)
    t.admit(("a", 0))
    (landed,) = t.pulled(("a", 0), True, 1.0)
    assert HandedOver("a", "B") in s.handle("B", landed.message, 1.0)
    assert not any(isinstance(e, Drop) for e in t.tick(10.5)) and not s.idle
    assert Drop(("a", 0)) in t.tick(11.0) and not len(t)
    s.tick(11.0)
    assert s.idle


def test_long_back_pressure_is_not_failure():
    s, t = Source(TIMING), Target(TIMING)
    (send,) = s.offer(make_handoff("a"), "B", 0, 0.0)
    replies = t.handle("A", send.message, 0.0)
    for now in range(1, 200):
        for e in replies:
            assert not s.handle("B", e.message, float(now))
        assert not s.tick(float(now))
        replies = t.tick(float(now))
