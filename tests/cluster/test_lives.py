"""What the server does with a live request when an instance dies, is silent, or says things in the wrong order."""

import itertools

import pytest

from hydrainfer.cluster import Pulse, ServerSide
from hydrainfer.cluster.messages import Cancel, Hello, Members, Moved, Peer, Report, Submit
from hydrainfer.core import (
    ErrorInfo,
    EventKind,
    InstanceStats,
    InternalError,
    LifecycleEvent,
    Output,
    Role,
    Stage,
    Unavailable,
)
from tests.scheduler.fakes import make_request

pytestmark = pytest.mark.unit
PULSE = Pulse(beat_s=1.0, suspect_s=5.0, dead_s=20.0, gap_s=3.0, patience_s=10.0, grace_s=4.0)
ANSWER = [7, 8, 9, 10]
incarnations = itertools.count(1)


class Rig:
    """A census and lives, with what they say and tell."""

    def __init__(self, *names, stall_s=float("inf"), record=None):
        self.told, self.events, self.now, self.incarnation = [], [], 0.0, {}
        roles = {name: Role.parse(name[:-1]) for name in names}
        self.side = ServerSide(roles, self.told.extend, record or self.events.append, PULSE, stall_s)
        for name in names:
            self.hello(name)
        self.orders()

    def hello(self, name):
        self.incarnation[name] = next(incarnations)
        peer = Peer(name, name[:-1], self.incarnation[name], "-")
        self.side.hear(Hello(peer, "host", 1, {}), self.now)

    def who(self, name):
        return name, self.incarnation[name]

    def die(self, name):
        self.side.census.gone(*self.who(name), self.now)

    def submit(self, name="r", **kw):
        self.side.lives.submit(make_request(name, max_tokens=len(ANSWER), **kw), self.now)

    def says(self, name, *outputs, moved=(), stats=None):
        self.side.hear(Report(*self.who(name), self.now, outputs, moved=moved, stats=stats), self.now)

    def gives(self, giver, taker, hops, of="r"):
        return Moved(of, *self.who(taker), hops)

    def wait(self, seconds):
        """All instances go on speaking."""
        end = self.now + seconds
        while self.now < end:
            self.now += PULSE.beat_s / 2
            for name in self.side.census.members:
                self.says(name)
            self.side.tick(self.now)

    def orders(self):
        """What has been posted to each instance since the last time."""
        messages = {name: link.message(self.now) for name, link in self.side.links.items()}
        return {name: message.orders for name, message in messages.items() if message is not None}

    def submitted(self):
        """(instance, name of the life, tokens told before) of each `Submit` since the last time."""
        orders = [(name, o) for name, told in self.orders().items() for o in told]
        self.cancelled = {n for _, o in orders if isinstance(o, Cancel) for n in o.request_ids}
        return [(name, o.request.id, list(o.produced)) for name, o in orders if isinstance(o, Submit)]

    def tokens(self, name="r"):
        return [t for o in self.told if o.request_id == name for t in o.token_ids]

    def end(self, name="r"):
        mine = [o for o in self.told if o.request_id == name]
        ends = [o for o in mine if o.finish_reason]
        assert len(ends) <= 1 and (not ends or mine[-1] is ends[0]), self.told
        return ends[0] if ends else None


def out(start, *tokens, life="r", finish=None):
    return Output(life, tokens, finish_reason=finish, start=start)


def test_a_stage_of_the_layout_that_no_instance_runs_is_dark():
    rig = Rig("E0", "P0", "D0")
    assert rig.side.census.dark() == []
    rig.die("E0")
    rig.die("P0")
    assert rig.side.census.dark() == [Stage.ENCODE, Stage.PREFILL]
    assert Rig("P0", "D0").side.census.dark() == []  # it never had an encoder


def test_one_whose_instance_dies_goes_on_from_what_was_told():
    rig = Rig("EPD0", "EPD1")
    rig.submit()
    ((first, life, produced),) = rig.submitted()
    assert (life, produced) == ("r", [])
    rig.says(first, out(0, 7), out(1, 8))
    rig.die(first)
    ((second, life, produced),) = rig.submitted()
    assert second != first and (life, produced) == ("r~1", [7, 8]) and rig.cancelled == {"r"}
    rig.says(second, out(2, 9, life="r~1"), out(3, 10, life="r~1", finish="length"))
    assert rig.tokens() == ANSWER and rig.end().finish_reason == "length"
    assert rig.side.lives.n_live == 0 and rig.side.lives.n_recovered == 1
    assert [e.kind for e in rig.events].count(EventKind.RECOVERED) == 1
    assert [e.kind for e in rig.events].count(EventKind.TOKEN) == 4


def test_reports_of_dead_instances_and_of_earlier_lives_are_ignored():
    rig = Rig("EPD0", "EPD1")
    rig.submit()
    ((first, *_),) = rig.submitted()
    dead = rig.who(first)
    rig.die(first)
    rig.side.hear(Report(*dead, 1.0, (out(0, 66),), moved=(Moved("r~1", *dead, 9),)), 1.0)
    rig.hello(first)
    rig.side.hear(Report(*dead, 1.0, (out(0, 66),)), 1.0)
    ((second, *_),) = rig.submitted()
    rig.says(second, out(0, 66), out(0, 66, life="r", finish="length"))  # of the old life
    rig.says(first, out(0, 7, life="r~1"))  # whoever says it: the life is the right one
    assert rig.tokens() == [7] and rig.end() is None


def test_a_hello_that_comes_after_its_death_is_known_is_not_heard():
    rig = Rig("EPD0")
    hello = rig.side.census.members["EPD0"].hello
    rig.die("EPD0")
    rig.side.hear(hello, 0.0)
    assert not rig.side.census.members


def test_a_new_incarnation_means_that_the_old_one_is_dead():
    rig = Rig("EPD0")
    rig.submit()
    rig.submitted()
    rig.hello("EPD0")
    rig.side.tick(0.0)
    assert rig.submitted() == [("EPD0", "r~1", [])]
    rig.side.census.gone("EPD0", rig.incarnation["EPD0"] - 1, 0.0)  # known already
    assert rig.submitted() == [] and "EPD0" in rig.side.census.members


@pytest.mark.parametrize("order", itertools.permutations(range(4)))
def test_reports_of_moves_come_in_any_order(order):
    """E0 gives it to P0, P0 to D0; each of them and of the takers says so. Who has it in the end is D0."""
    rig = Rig("E0", "P0", "D0", "D1")
    rig.submit(pictures=[1])
    rig.submitted()
    reports = [
        ("E0", rig.gives("E0", "P0", 1)),
        ("P0", rig.gives("E0", "P0", 1)),
        ("P0", rig.gives("P0", "D0", 2)),
        ("D0", rig.gives("P0", "D0", 2)),
    ]
    for i in order:
        name, moved = reports[i]
        rig.says(name, moved=(moved,))
    for name in ("E0", "P0", "D1"):
        rig.die(name)
    assert rig.submitted() == [] and rig.side.lives.n_recovered == 0
    rig.hello("E0")
    rig.die("D0")
    assert rig.submitted() == [("E0", "r~1", [])]


@pytest.mark.parametrize("dies", ["P0", "D0"])
def test_until_the_taker_has_it_the_death_of_either_loses_it(dies):
    rig = Rig("P0", "D0", "P1", "D1")
    rig.submit()
    ((giver, *_),) = rig.submitted()
    rig.says(giver, out(0, 7), moved=(rig.gives(giver, "D0", 1),))
    rig.die(giver if dies == "P0" else "D0")
    ((_, life, produced),) = rig.submitted()
    assert (life, produced) == ("r~1", [7])


def test_given_to_one_that_is_already_known_to_be_dead():
    rig = Rig("P0", "D0", "D1")
    rig.submit()
    rig.submitted()
    rig.die("D0")
    assert rig.submitted() == []
    rig.says("P0", moved=(rig.gives("P0", "D0", 1),))
    assert rig.submitted() == [("P0", "r~1", [])]


def test_outputs_that_overtake_each_other_are_told_in_order_and_once():
    rig = Rig("P0", "D0")
    rig.submit()
    rig.says("D0", out(2, 9), out(3, 10, finish="length"), out(1, 8))
    assert rig.told == []
    rig.says("P0", out(0, 7))
    assert rig.tokens() == ANSWER and rig.end().finish_reason == "length"
    rig.says("D0", out(3, 10, finish="length"))
    assert len(rig.told) == 4


def test_tokens_that_the_client_has_are_cut_off_repeated_outputs():
    rig = Rig("EPD0")
    rig.submit()
    rig.says("EPD0", out(0, 7, 8))
    rig.says("EPD0", out(0, 7, 8, 9))
    rig.says("EPD0", out(1, 8))
    rig.says("EPD0", out(2, 9, 10, finish="length"))
    assert [o.token_ids for o in rig.told] == [(7, 8), (9,), (10,)]


def test_a_missing_token_is_made_again():
    rig = Rig("P0", "D0")
    rig.submit()
    rig.submitted()
    rig.says("D0", out(1, 8), moved=(rig.gives("P0", "D0", 1),))
    rig.wait(PULSE.gap_s - 1.0)
    assert rig.submitted() == []
    rig.wait(2.5)
    assert rig.submitted() == [("P0", "r~1", [])] and rig.cancelled == {"r"}
    rig.says("P0", out(0, 7, life="r~1"), out(1, 8, life="r~1"))
    rig.wait(PULSE.gap_s + 2.0)
    assert rig.tokens() == [7, 8] and rig.side.lives.n_recovered == 1


def test_the_wait_for_a_missing_token_begins_anew_with_each_gap():
    rig = Rig("EPD0")
    rig.submit()
    rig.says("EPD0", out(1, 8))
    rig.wait(PULSE.gap_s - 1.0)
    rig.says("EPD0", out(0, 7))
    rig.wait(5 * PULSE.gap_s)
    rig.says("EPD0", out(3, 10, finish="length"))
    rig.wait(PULSE.gap_s - 1.0)
    rig.says("EPD0", out(2, 9))
    assert rig.tokens() == ANSWER and rig.side.lives.n_recovered == 0


def test_a_request_that_is_cancelled_and_then_lost_ends_without_another_life():
    rig = Rig("EPD0", "EPD1")
    rig.submit()
    ((first, *_),) = rig.submitted()
    rig.side.lives.cancel(["r"], rig.now)
    assert rig.end() is None, "the instance's own word is waited for"
    assert rig.submitted() == [] and rig.cancelled == {"r"}
    rig.die(first)
    assert rig.end().finish_reason == "abort" and rig.submitted() == []
    assert rig.side.lives.n_recovered == 0


def test_a_cancel_names_the_life():
    rig = Rig("EPD0", "EPD1")
    rig.submit()
    ((first, *_),) = rig.submitted()
    rig.die(first)
    ((second, *_),) = rig.submitted()
    rig.side.lives.cancel(["r"], rig.now)
    assert rig.submitted() == [] and rig.cancelled == {"r~1"}
    rig.says(second, Output("r~1", finish_reason="abort"))
    assert rig.end().finish_reason == "abort"


@pytest.mark.parametrize("heard", [True, False])
def test_a_request_that_kills_four_instances_in_a_row_ends_with_500(heard):
    """An instance that has said nothing of a request is unlikely to have died of it."""
    rig = Rig("EPD0", "EPD1")
    rig.submit()
    lives = []
    while rig.end() is None:
        ((name, life, _),) = rig.submitted()
        lives.append(life)
        if heard:
            queued = LifecycleEvent(life, EventKind.QUEUED, rig.now, "prefill")
            rig.side.hear(Report(*rig.who(name), rig.now, events=(queued,)), rig.now)
        rig.die(name)
        rig.hello(name)
    assert lives == ["r", *(f"r~{i}" for i in range(1, 4 if heard else 32))]
    assert (rig.end().error.status, rig.end().error.code) == (500, "lost")


def test_a_long_answer_outlives_any_number_of_deaths():
    rig = Rig("EPD0", "EPD1")
    rig.side.lives.submit(make_request("r", max_tokens=1000), 0.0)
    told = 0
    for _ in range(9):
        ((name, life, produced),) = rig.submitted()
        assert len(produced) == told
        rig.says(name, out(told, *range(16), life=life))
        told += 16
        rig.die(name)
        rig.hello(name)
    assert rig.end() is None and len(rig.tokens()) == told


def test_an_instance_whose_report_was_lost_is_killed():
    rig = Rig("EPD0")
    for n in (1, 2):
        rig.side.hear(Report(*rig.who("EPD0"), 0.0, n=n), 0.0)
    assert rig.side.census.kills == []
    rig.submit()
    rig.side.hear(Report(*rig.who("EPD0"), 0.0, (out(0, 5),), n=4), 0.0)
    assert rig.side.census.kills == [rig.who("EPD0")] and rig.tokens() == []


def test_an_instance_that_has_it_may_be_late_with_its_504_but_not_for_ever():
    rig = Rig("EPD0")
    rig.submit(deadline_s=2.0)
    rig.submitted()
    rig.wait(2.0 + PULSE.grace_s - 0.5)
    assert rig.end() is None
    rig.wait(2.0)
    assert rig.end().error.status == 504 and rig.submitted() == [] and rig.cancelled == {"r"}


def test_the_deadline_of_an_orphan_is_kept_to_the_beat():
    rig = Rig("EPD0")
    rig.submit(deadline_s=2.0)
    rig.die("EPD0")
    rig.wait(2.0 + PULSE.beat_s)
    assert rig.end().error.status == 504


def test_an_error_of_the_instance_is_the_requests_end():
    rig = Rig("EPD0")
    rig.submit()
    error = ErrorInfo.of(InternalError("the step failed"))
    rig.says("EPD0", out(2, 9), Output("r", finish_reason="error", error=error))
    assert rig.end().error == error and rig.side.lives.n_live == 0


def test_the_end_of_the_server_ends_everybody_once():
    rig = Rig("EPD0")
    rig.submit("a")
    rig.submit("b")
    rig.side.lives.end_all(Unavailable("the server is shutting down"), 0.0)
    rig.says("EPD0", out(0, 7, life="a", finish="length"))
    rig.die("EPD0")
    assert [(o.request_id, o.error.status) for o in rig.told] == [("a", 503), ("b", 503)]


def test_silence_makes_a_suspect_and_then_a_kill_but_no_death():
    rig = Rig("EPD0", "EPD1")

    def silent(until, who="EPD0"):
        while rig.now < until:
            rig.now += PULSE.beat_s
            rig.says("EPD1" if who == "EPD0" else "EPD0")
            rig.side.tick(rig.now)

    rig.submit()
    ((first, *_),) = rig.submitted()
    silent(PULSE.suspect_s + 1.0, first)
    members = [o for o in rig.orders()["EPD1"] if isinstance(o, Members)]
    assert {p.name: p.suspect for p in members[-1].peers} == {"EPD0": first == "EPD0", "EPD1": first == "EPD1"}
    rig.submit("other")
    ((second, *_),) = rig.submitted()
    assert second != first and rig.side.census.kills == []
    silent(PULSE.dead_s + 1.5, first)
    assert set(rig.side.census.kills) == {rig.who(first)} and rig.submitted() == [], "it may still write"
    rig.says(first, out(0, 7))
    assert rig.tokens() == [7]
    rig.side.tick(rig.now + PULSE.beat_s)
    assert not rig.side.census.members[first].hello.peer.suspect


def test_silence_while_the_server_itself_was_stopped_does_not_count():
    rig = Rig("EPD0", "EPD1")
    rig.wait(3 * PULSE.beat_s)
    rig.now += 2 * PULSE.dead_s
    rig.side.tick(rig.now)
    rig.says("EPD0")
    assert rig.side.census.kills == [] and not any(m.hello.peer.suspect for m in rig.side.census.members.values())
    for _ in range(int(PULSE.dead_s / PULSE.beat_s) + 2):
        rig.now += PULSE.beat_s
        rig.says("EPD0")
        rig.side.tick(rig.now)
    assert rig.side.census.kills == [rig.who("EPD1")], "it goes on being silent"


def test_a_batch_that_does_not_end_is_a_kill():
    rig = Rig("EPD0", stall_s=30.0)
    stats = InstanceStats("EPD", 0, 1, 0, 0, 1, {}, 0, 0, 0, 0, stalled_s=99.0, hung_s=29.0)
    rig.says("EPD0", stats=stats)
    rig.side.tick(1.0)
    assert rig.side.census.kills == []
    rig.says("EPD0", stats=InstanceStats("EPD", 0, 1, 0, 0, 1, {}, 0, 0, 0, 0, stalled_s=31.0, hung_s=31.0))
    rig.side.tick(3.0)
    assert rig.side.census.kills == [rig.who("EPD0")]


def test_a_failing_event_recorder_does_not_stop_serving(caplog):
    def fails(event):
        raise ValueError("no such metric")

    rig = Rig("EPD0", record=fails)
    rig.submit()
    rig.says("EPD0", out(0, *ANSWER, finish="length"))
    assert rig.tokens() == ANSWER and "no such metric" in caplog.text


def test_members_are_told_on_which_machine_each_one_is():
    """Whoever offers blocks to a peer must know whether it can map this machine's memory."""
    rig = Rig("P0", "D0")
    rig.hello("D0")
    (members,) = [o for o in rig.orders()["P0"] if isinstance(o, Members)][-1:]
    assert {p.host for p in members.peers} == {"host"}


def test_a_handover_that_the_taker_never_confirms_is_begun_again():
    rig = Rig("P0", "D0")
    rig.submit()
    rig.says("P0", moved=[rig.gives("P0", "D0", 1)])
    rig.submitted()
    rig.wait(PULSE.handover_s - 1.0)
    assert rig.submitted() == []
    rig.wait(2.0)
    assert rig.submitted() == [("P0", "r~1", [])] and "r" in rig.cancelled
    rig.says("D0", moved=[rig.gives("P0", "D0", 1)])
    assert rig.tokens() == [], "the old life is not heard any more"
