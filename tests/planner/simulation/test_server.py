"""The server in front of the engines takes time, and cores."""

import math
from itertools import pairwise

import pytest

from hydrainfer.planner.simulation import ServerCost, TraceRequest

pytestmark = pytest.mark.unit


def trace(n, gap_s, megapixels=1.0, n_output=10):
    return [TraceRequest(arrival_s=i * gap_s, n_text=5, megapixels=megapixels, n_output=n_output) for i in range(n)]


def test_a_server_that_takes_nothing_changes_nothing():
    server, requests = ServerCost(), trace(5, 0.1)
    assert server.ready_s(requests, 8) == [t.arrival_s for t in requests]
    assert server.most(requests, 8, 50.0) == 50.0 and server.slowdown(requests, 8, 50.0) == 1.0


def test_with_cores_enough_a_request_waits_for_its_own_work_only():
    server = ServerCost(request_s=0.01, megapixel_s=0.1)
    assert [s - t.arrival_s for s, t in zip(server.ready_s(trace(3, 1.0), 1), trace(3, 1.0))] == pytest.approx(
        [0.11] * 3
    )


def test_one_core_makes_a_queue():
    """Work of 0.11 s every 0.1 s: each request waits 10 ms longer than the one before it."""
    server, requests = ServerCost(request_s=0.01, megapixel_s=0.1, cores=1.0), trace(20, 0.1)
    waits = [s - t.arrival_s for s, t in zip(server.ready_s(requests, 1), requests)]
    assert all(b - a == pytest.approx(0.01) for a, b in pairwise(waits))
    assert server.most(requests, 1, 50.0) == pytest.approx(0.95 / 0.11)


def test_answers_take_the_cores_of_pictures():
    idle, busy = (ServerCost(request_s=0.02, token_s=s, cores=1.0) for s in (0.0, 5e-3))
    requests = trace(50, 0.1)
    assert busy.ready_s(requests, 1)[-1] > idle.ready_s(requests, 1)[-1]
    assert busy.most(requests, 1, math.inf) < idle.most(requests, 1, math.inf)


def test_shared_cores_are_divided():
    """Two threads on two cores carry 100/s alone: 20 ms of both for each; with 5 ms for the server, 25 ms."""
    server, requests = ServerCost(request_s=5e-3, cores=2.0, threads=1), trace(10, 0.1)
    assert server.most(requests, 2, 100.0) == pytest.approx(2 / 0.025)
    assert server.slowdown(requests, 2, 80.0) == pytest.approx(2 / (2 - 0.4))
    assert server.slowdown(requests, 1, 80.0) == 1.0, "one core is free"
