"""Checks how the number of threads of a batch is found."""

import pytest

from hydrainfer.core import Lane, StepBatch
from hydrainfer.runtime import ThreadCount


def batch(n_items: int = 1, lane: Lane = Lane.LANGUAGE) -> StepBatch:
    return StepBatch(1, lane, [None] * n_items, n_items, n_decodes=n_items)


def run(threads: ThreadCount, seconds, n: int = 400, of: StepBatch | None = None) -> list[int]:
    """The numbers of the last half of `n` batches that take `seconds(n_threads)`."""
    chosen = []
    for _ in range(n):
        team = threads.choose(of or batch())
        team.took(seconds(team.n))
        chosen.append(team.n)
    return chosen[n // 2 :]


def mostly(chosen: list[int]) -> int:
    return max(set(chosen), key=chosen.count)


@pytest.mark.parametrize(
    ("limit", "seconds", "want"),
    [
        (2, lambda n: 0.01 / n, 2),
        (2, lambda n: 0.01 - 0.001 * n, 1),  # 11 % less is not worth it
        (2, lambda n: 0.01 * n, 1),
        (16, lambda n: 0.01 / n, 16),
        (16, lambda n: 0.01 / min(n, 4), 4),
        (12, lambda n: 0.01 / n, 12),
        (12, lambda n: 0.001 * n, 1),
        (1, lambda n: 0.01, 1),
    ],
)
def test_as_many_threads_as_pay(limit, seconds, want):
    chosen = run(ThreadCount(lambda: limit), seconds)
    assert mostly(chosen) == want
    assert chosen.count(want) >= 0.9 * len(chosen)


def test_the_number_of_threads_follows_the_load():
    threads = ThreadCount(lambda: 2)
    assert mostly(run(threads, lambda n: 0.01 / n)) == 2
    assert mostly(run(threads, lambda n: 0.01 * n, n=1600)) == 1
    assert mostly(run(threads, lambda n: 0.01 / n, n=1600)) == 2


def test_numbers_of_threads_that_are_far_slower_are_seldom_tried():
    threads = ThreadCount(lambda: 2)
    first = run(threads, lambda n: 0.02 / n, n=200)  # the last 100
    assert first.count(1) <= 2


def test_long_batches_are_never_tried_with_fewer_threads():
    threads = ThreadCount(lambda: 4)
    assert set(run(threads, lambda n: 0.3)) == {4}
    assert mostly(run(threads, lambda n: 0.001)) == 1
    assert mostly(run(threads, lambda n: 0.3 / n, n=1600)) == 4


def test_batches_of_other_sizes_lanes_and_limits_are_judged_apart():
    limit, short, long = 2, (lambda n: 0.01 * n), (lambda n: 0.01 / n)
    threads = ThreadCount(lambda: limit)
    for _ in range(2):
        assert mostly(run(threads, short)) == 1
        assert mostly(run(threads, long, of=batch(64))) == 2
        assert mostly(run(threads, long, of=batch(1, Lane.VISION))) == 2
    limit = 1
    assert set(run(threads, short)) == {1}
    limit = 2
    assert mostly(run(threads, short)) == 1


def test_a_fixed_number_is_never_changed():
    assert set(run(ThreadCount(lambda: 4, fixed=True), lambda n: 0.01 * n)) == {4}


def test_a_single_slow_batch_changes_nothing():
    threads = ThreadCount(lambda: 2)
    times = iter([0.005] * 150 + [90.0] + [0.005] * 1000)
    chosen = run(threads, lambda n: next(times) if n == 2 else 0.01, n=600)
    assert mostly(chosen) == 2
    assert chosen.count(2) >= 0.9 * len(chosen)
