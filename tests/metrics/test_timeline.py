"""Whatever order the events of a request come in, they give one breakdown, and it adds up."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydrainfer.core import EventKind, LifecycleEvent
from hydrainfer.metrics import INTERVALS, Timelines

pytestmark = pytest.mark.unit
E, P, D = "encode", "prefill", "decode"
A, Q, S, M = EventKind.ARRIVED, EventKind.QUEUED, EventKind.STARTED, EventKind.MIGRATING
X, N, T, R, F = EventKind.ENDED, EventKind.PREEMPTED, EventKind.TOKEN, EventKind.RECOVERED, EventKind.FINISHED

# As instances tell it, each in its own order; the hub tells tokens, recoveries and the end. Seconds.
MOVED = {
    "E0": [(A, 0, ""), (Q, 1, E), (S, 3, E), (X, 6, E), (M, 6, P)],
    "P0": [(Q, 10, P), (S, 15, P), (X, 21, P), (M, 21, D)],
    "D0": [(Q, 28, D), (S, 28, D), (N, 36, ""), (Q, 36, D), (S, 45, D)],
    "hub": [(T, 21, ""), (T, 30, ""), (T, 55, ""), (F, 55, "")],
}
MOVED_S = dict(zip(INTERVALS, (3, 3, 4, 5, 6, 7, 9, 18)))
RECOVERED = {
    "P0": [(A, 0, ""), (Q, 0, P), (S, 2, P), (X, 5, P), (M, 5, D)],
    "D0": [(Q, 6, D), (S, 8, D)],
    "hub": [(T, 5, ""), (T, 9, ""), (R, 14, ""), (T, 40, ""), (F, 40, "")],
    "P1": [(A, 15, ""), (Q, 15, P), (S, 18, P), (X, 25, P), (M, 25, D)],
    "D1": [(Q, 27, D), (S, 32, D)],
}
RECOVERED_S = {"prefill_queue": 5, "prefill": 10, "pd_migration": 3, "decode_queue": 7, "decode": 15}


def tell(told, request_id="r"):
    """The timeline of these events in this order."""
    done = {}
    timelines = Timelines(lambda request_id, t: done.update({request_id: t}))
    for kind, at_s, stage in told:
        timelines.record(LifecycleEvent(request_id, kind, float(at_s), stage, "stop" if kind is F else "", 7))
    assert len(timelines) == 0
    return done[request_id]


def interleaved(lives, rng):
    """Each instance's events in its own order, otherwise any; the end is the last."""
    queues = [[e for e in events if e[0] is not F] for events in lives.values()]
    while any(queues):
        yield rng.choice([q for q in queues if q]).pop(0)
    yield next(e for events in lives.values() for e in events if e[0] is F)


@pytest.mark.parametrize(("lives", "seconds"), [(MOVED, MOVED_S), (RECOVERED, RECOVERED_S)], ids=["moved", "recovered"])
def test_events_in_order_of_time(lives, seconds):
    told = sorted((e for events in lives.values() for e in events), key=lambda e: e[1])
    t = tell(told)
    assert t.intervals_s == seconds and sum(seconds.values()) == t.e2e_s
    assert (t.n_migrations, t.n_preemptions, t.n_recoveries) == ((2, 1, 0) if lives is MOVED else (2, 0, 1))
    assert t.ttft_s == (21 if lives is MOVED else 5)


@given(st.randoms(use_true_random=False), st.sampled_from([(MOVED, MOVED_S), (RECOVERED, RECOVERED_S)]))
def test_instances_may_overtake_each_other(rng: random.Random, case):
    lives, seconds = case
    if lives is RECOVERED:  # the server hears no ARRIVED of a second life
        lives = {**lives, "P1": lives["P1"][1:]}
    t = tell(interleaved(lives, rng))
    assert t.intervals_s == seconds and t.arrived_s == 0 and t.token_s == sorted(t.token_s)


kinds = st.one_of(st.tuples(st.sampled_from([Q, S, X, M]), st.sampled_from([E, P, D])), st.sampled_from([N, T, R, A]))


@given(
    st.lists(st.tuples(kinds, st.integers(-50, 500)), max_size=20, unique_by=lambda e: e[1]),
    st.integers(-60, 400),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_any_events_in_any_order_add_up(events, end_s, arrives, rng):
    told = [(k[0], at, k[1]) if isinstance(k, tuple) else (k, at, "") for k, at in events if k is not A]
    if arrives:
        told.append((A, 0, ""))
    shuffled = rng.sample(told, len(told))
    t, same = tell([*told, (F, end_s, "")]), tell([*shuffled, (F, end_s, "")])
    assert (t.intervals_s, t.token_s, t.e2e_s) == (same.intervals_s, same.token_s, same.e2e_s)
    assert set(t.intervals_s) <= set(INTERVALS) and all(s >= 0 for s in t.intervals_s.values())
    assert sum(t.intervals_s.values()) == t.e2e_s >= 0  # whole seconds: exact
    assert t.ttft_s is None or t.ttft_s >= 0
    assert t.n_migrations == sum(k is M for k, _, _ in told) and t.n_recoveries == sum(k is R for k, _, _ in told)


def test_the_first_arrival_counts():
    t = tell([(A, 1, ""), (Q, 2, P), (A, 5, ""), (S, 6, P), (F, 9, "")])
    assert (t.arrived_s, t.e2e_s) == (1, 8) and t.intervals_s == {"prefill_queue": 5, "prefill": 3}


def test_a_request_that_no_instance_ever_spoke_of():
    assert tell([(F, 9, "")]).e2e_s == 0
    t = tell([(R, 4, ""), (Q, 5, E), (F, 9, "")])
    assert t.intervals_s == {"encode_queue": 4} and t.e2e_s == 4 and t.ttft_s is None


def test_says_what_a_live_request_does():
    """The cut that was told last counts among those at the same time: a stage may start in the step that queues it."""
    lives = Timelines(lambda *_: None)
    assert lives.doing("r") == ""
    for kind, at_s, stage, doing in (
        *((A, 0, "", ""), (Q, 1, E, "encode_queue"), (S, 1, E, "encode"), (M, 2, P, "ep_migration")),
        *((Q, 3, P, "prefill_queue"), (S, 3, P, "prefill"), (T, 4, "", "prefill")),
    ):
        lives.record(LifecycleEvent("r", kind, at_s, stage))
        assert lives.doing("r") == doing
    lives.record(LifecycleEvent("r", F, 5))
    assert lives.doing("r") == ""
