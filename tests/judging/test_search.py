"""The search for goodput against queues whose truth is known, and against the plainest of servers."""

import random

import numpy as np
import pytest

from benchmarks.queues import CAPACITY, QUEUES, limit_s, searched, sojourns
from hydrainfer.config import Slo
from hydrainfer.core import ConfigError
from hydrainfer.judging import Ask, Search, Series, delay_limit_s, effective_n, steady_state, wilson

pytestmark = pytest.mark.unit


def test_intervals_hold_the_truth_of_queues():
    """The short form of `benchmarks/b22_intervals.py`. Where runs begin with empty queues, share their luck and are
    looked at again and again, nine of ten intervals have to hold all the same."""
    n, covered, ratios = 0, 0, []
    for queue in QUEUES:
        for load in (0.5, 0.9):
            truth, limit = load * CAPACITY, limit_s(queue, load * CAPACITY)
            for seed in range(4):
                found, _ = searched(queue, limit, seed, 800, 4)
                n, covered = n + 1, covered + ((found.low or 0.0) <= truth <= (found.high or np.inf))
                ratios.append(found.rate_per_s / truth)
                assert found.low < found.high and found.rate_per_s <= CAPACITY
    assert covered >= 0.9 * n and np.mean(ratios) == pytest.approx(1.0, abs=0.03)


def run_at(rate, n, limit, seed=0, queue="M/M/1"):
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1 / rate, n))
    took_s = sojourns(queue, at_s, rng)
    return Series(at_s, took_s, took_s <= limit, limit)


@pytest.mark.parametrize(
    ("load", "n", "carried"),
    [(0.5, 4000, True), (0.9, 40_000, True), (0.97, 2000, None), (1.0, 10_000, None), (1.2, 4000, False)],
)
def test_a_rate_is_carried_if_it_would_be_for_ever(load, n, carried):
    """Under a limit that a short run of any of these keeps."""
    state = steady_state([run_at(load * CAPACITY, n, 1.0)])
    assert state.carried(0.9) is carried and state.grows == (carried is False)
    if carried is None:
        assert not state.settled and state.n_wanted > n


@pytest.mark.parametrize("ttft_s", [None, 9.0])
def test_a_queue_beyond_an_e2e_limit_is_not_carried_by_chance(ttft_s):
    """A short run may meet it. Such a run would count if only a limit on the first token were known, which is far
    beyond the delays, or not set."""
    limit = limit_s("M/M/1", 0.85 * CAPACITY)
    allowed = delay_limit_s(Slo(ttft_s=ttft_s, e2e_s=1.7 + limit), [1.6, 1.7, 9.0])
    assert allowed == pytest.approx(limit)
    for seed in range(20):
        run = run_at(0.88 * CAPACITY, 1600, allowed, seed)
        assert steady_state([run]).carried(0.9) is not True, seed


def test_the_limit_on_the_first_token():
    assert delay_limit_s(Slo(ttft_s=1.0, e2e_s=2.0), [0.5, 0.7, 9.0]) == 1.0
    assert delay_limit_s(Slo(tpot_s=1.0), []) == np.inf


def test_a_queue_that_grows_is_not_carried_though_all_have_met():
    state = steady_state([run_at(1.2 * CAPACITY, 4000, 1e9)])
    assert state.met.share == 1.0 and state.carried(0.9) is False


def test_runs_that_could_not_tell_are_not_asked_for():
    """At the edge of its capacity a queue needs more requests than any run that is left; far beyond, it shows."""
    for load, n, again in ((0.99, 1000, False), (1.1, 500, True), (0.7, 150, True)):
        search = Search(load * CAPACITY, bound=2 * CAPACITY)
        run = run_at(load * CAPACITY, n, 0.15)
        assert steady_state([run]).carried(0.9) is None, load
        search.tell(load * CAPACITY, run)
        assert (search.next() == Ask(load * CAPACITY, 2)) is again, load


def test_a_short_run_below_a_rate_that_is_certainly_carried_lowers_nothing():
    search, alone = Search(30.0, max_runs=1), Search(30.0, max_runs=1)
    for s in (search, alone):
        s.tell(30.0, run_at(30.0, 8000, 0.5))
    search.tell(29.0, run_at(0.99 * CAPACITY, 300, 0.5))  # a run that says nothing
    assert search.result().low == alone.result().low == 30.0
    assert search.result().rate_per_s == alone.result().rate_per_s


def test_the_beginning_is_left_out():
    """A queue that begins full and drains."""
    run = run_at(0.6 * CAPACITY, 6000, 0.2)
    late = Series(run.at_s, [*np.linspace(20.0, 0.0, 1000), *run.delay_s[1000:]], [*[False] * 1000, *run.met[1000:]])
    state = steady_state([late])
    assert 900 <= state.n_warmup <= 3000 and state.met.share > 0.95
    assert steady_state([run]).n_warmup < 1500


def plain(rate, met, n=400):
    """Requests that wait for nobody."""
    return Series(np.arange(n) / rate, [0.1] * n, [i / n < met for i in range(n)])


def told(search, met, n=400):
    """The rates that were asked for; `met`: the share at each."""
    rates = []
    while (ask := search.next()) is not None:
        assert len(rates) < 60
        rates.append(ask.rate)
        search.tell(ask.rate, plain(ask.rate, met(ask.rate), n * ask.times))
    return rates


def test_a_clear_case_needs_one_run_a_rate():
    search = Search(1.0, tolerance=0.1)
    rates = told(search, lambda rate: rate <= 5)
    found = search.result()
    assert len(set(rates)) == len(rates) and not found.note
    assert 4.5 < found.low <= 5 < found.high <= found.low * 1.1 and found.low <= found.rate_per_s <= found.high


def test_nothing_can_be_met():
    search = Search(1.0)
    told(search, lambda _: 0.0)
    found = search.result()
    assert found.rate_per_s == 0 and "not reached at any rate" in found.note and found.low is None


def test_everything_is_met():
    search = Search(1.0, max_rate=20)
    told(search, lambda _: 1.0)
    found = search.result()
    assert found.rate_per_s == 20 and "still reached at 20" in found.note and found.high is None


def test_an_undecided_range_of_rates_is_named_in_the_note():
    search = Search(1.0, max_runs=2)
    told(search, lambda rate: 1.0 if rate < 4 else 0.9 if rate < 9 else 0.0, n=100)
    found = search.result()
    assert found.low < 4 and found.high >= 9 and "undecided in between: runs of 200 requests" in found.note


def test_a_bound_is_never_passed():
    search = Search(1.0, bound=6.0)
    assert max(told(search, lambda _: 1.0)) < 6.0
    assert search.result().high == 6.0 and search.result().rate_per_s < 6.0


def test_the_estimate_lies_within_its_interval():
    """Also where a lower rate fails and higher ones pass, so that neighbours are given their mean."""
    search = Search(0.5, max_runs=1)
    for rate, met in ((0.5, 8), (2.0, 10), (8.0, 10), (16.0, 3)):
        search.tell(rate, Series(np.arange(400) / rate, [0.1] * 400, [i % 10 < met for i in range(400)]))
    found = search.result()
    assert found.high == 0.5 and found.rate_per_s <= 0.5


def test_a_client_that_cannot_keep_up_is_a_limit():
    search = Search(8.0)
    assert search.next() == Ask(8, 1)
    search.tell(8, plain(8, 1.0))
    search.give_up_above(search.next().rate, "the client was late")
    rates = told(search, lambda _: 1.0)
    found = search.result()
    assert all(8 < r < 16 for r in rates) and found.note == "the client was late" and 15 < found.rate_per_s < 16


def test_a_rate_without_more_requests_stays_undecided():
    """The search goes on with other rates, and does not ask for a longer run again."""
    search, asked = Search(4.0, tolerance=0.2), []
    while (ask := search.next()) is not None:
        asked.append(ask)
        assert len(asked) < 30
        n = 100 * ask.times
        if n > 150 or ask.rate > 30:
            search.leave(ask.rate, f"{n} are too many")
        else:
            search.tell(ask.rate, plain(ask.rate, 1.0 if ask.rate < 12 else 0.9, n))
    found = search.result()
    assert len(set(asked)) == len(asked) and {a.times for a in asked} == {1, 2}
    assert 8.0 <= found.low < 12 and found.high is None and found.note.endswith("200 are too many")
    nothing = Search(4.0)
    for _ in range(30):
        if (ask := nothing.next()) is not None:
            nothing.leave(ask.rate, "none")
    assert nothing.next() is None and nothing.result().rate_per_s == 0.0


def test_a_rate_at_which_the_client_was_late_is_not_run_again():
    search = Search(8.0)
    search.tell(8.0, plain(8.0, 0.9, 100))
    assert search.next() == Ask(8.0, 2)
    search.give_up_above(8.0, "the client was late")
    assert search.next() == Ask(4.0, 1)


@pytest.mark.parametrize("wrong", [{"first": 0.0}, {"first": 1.0, "target": 0}, {"first": 1.0, "max_runs": 0}])
def test_impossible_searches_are_refused(wrong):
    with pytest.raises(ConfigError):
        Search(**wrong)


@pytest.mark.parametrize(
    ("k", "n", "low", "high"), [(90, 100, 0.8256, 0.9448), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0)]
)
def test_wilson(k, n, low, high):
    assert wilson(k / n, n) == pytest.approx((low, high), abs=1e-4)


def test_wilson_covers():
    rng, hits = random.Random(2), 0
    for _ in range(1000):
        low, high = wilson(sum(rng.random() < 0.9 for _ in range(150)) / 150, 150)
        hits += low <= 0.9 <= high
    assert hits >= 930


def test_requests_that_share_their_luck_count_less():
    rng = random.Random(3)
    alone = [rng.random() < 0.9 for _ in range(1200)]
    together = [x for _ in range(60) for x in [rng.random() < 0.9] * 20]
    assert 400 < effective_n(alone) <= 1200 and 20 < effective_n(together) < 150
    assert effective_n([True] * 100) == 100 and effective_n([True, False]) == 2 and effective_n([]) == 0
    assert effective_n([0.1] * 1945) == 1945, "equal numbers, whose mean is rounded"


def test_no_limit_is_refused():
    with pytest.raises(ConfigError, match="at least one limit"):
        Slo()
