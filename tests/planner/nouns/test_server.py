"""The server in front of the engines takes time, and cores."""

import math
from itertools import pairwise

import pytest

from hydrainfer.core import ConfigError
from hydrainfer.planner.nouns import CoreTime, ServerCost, TraceRequest

pytestmark = pytest.mark.unit


def trace(n, gap_s, megapixels=1.0, n_output=10):
    return [TraceRequest(arrival_s=i * gap_s, n_text=5, megapixels=megapixels, n_output=n_output) for i in range(n)]


def waits(server, requests, n_instances=1):
    return [s - t.arrival_s for s, t in zip(server.ready_s(requests, n_instances), requests, strict=True)]


def test_a_server_that_takes_nothing_changes_nothing():
    server, requests = ServerCost(), trace(5, 0.1)
    assert server.ready_s(requests, 8) == [t.arrival_s for t in requests]
    assert server.rate_limit(requests, 8, 50.0) == 50.0 and server.slowdown(requests, 8, 50.0) == 1.0


def test_with_cores_enough_a_request_waits_for_its_own_work_only():
    server = ServerCost(process=CoreTime(request_s=0.01), preparing=CoreTime(megapixel_s=0.1), workers=2)
    assert waits(server, trace(3, 0.05)) == pytest.approx([0.11] * 3)


def test_one_core_makes_a_queue():
    """Work of 0.11 s every 0.1 s: each request waits 10 ms longer than the one before it."""
    server, requests = ServerCost(process=CoreTime(request_s=0.01, megapixel_s=0.1), cores=1.0), trace(20, 0.1)
    assert all(b - a == pytest.approx(0.01) for a, b in pairwise(waits(server, requests)))
    assert server.rate_limit(requests, 1, 50.0) == pytest.approx(1 / 0.11)
    assert server.rate_limit(requests, 1, 0.0) == 0.0


@pytest.mark.parametrize("cores", [64.0, math.inf])
@pytest.mark.parametrize(
    ("process_s", "megapixel_s", "workers", "most"),
    [
        (0.04, 0.1, 1, 1 / 0.1),
        (0.04, 0.1, 2, 2 / 0.1),
        (0.04, 0.1, 8, 1 / 0.04),  # one interpreter, however many cores
    ],
)
def test_pictures_wait_for_a_worker_and_all_for_the_server_s_process(process_s, megapixel_s, workers, most, cores):
    process, preparing = CoreTime(request_s=process_s), CoreTime(megapixel_s=megapixel_s)
    server = ServerCost(process=process, preparing=preparing, workers=workers, cores=cores)
    assert server.rate_limit(trace(2, 1.0), 1, 1e3) == pytest.approx(most)
    calm, busy = (waits(server, trace(40, 1.0 / rate)) for rate in (0.9 * most, 1.25 * most))
    assert calm[-1] == pytest.approx(process_s + megapixel_s) and busy[-1] > 1.5 * calm[-1]


def test_a_request_without_pictures_waits_for_the_process_alone():
    server = ServerCost(process=CoreTime(request_s=0.01), preparing=CoreTime(megapixel_s=0.5), workers=1, cores=8.0)
    seeing, blind = trace(1, 1.0)[0], TraceRequest(arrival_s=0.0, n_text=5, n_output=2)
    assert waits(server, [seeing, seeing, blind]) == pytest.approx([0.51, 1.01, 0.03])


def test_answers_take_the_cores_of_pictures():
    idle, busy = (ServerCost(process=CoreTime(request_s=0.02, token_s=s), cores=1.0) for s in (0.0, 5e-3))
    requests = trace(50, 0.1)
    assert busy.ready_s(requests, 1)[-1] > idle.ready_s(requests, 1)[-1]
    assert busy.rate_limit(requests, 1, math.inf) < idle.rate_limit(requests, 1, math.inf)


def test_shared_cores_are_divided():
    """Two threads on two cores carry 100/s alone: 20 ms of both for each; with 5 ms for the server, 25 ms."""
    server, requests = ServerCost(process=CoreTime(request_s=5e-3), cores=2.0, threads=1), trace(10, 0.1)
    assert server.rate_limit(requests, 2, 100.0) == pytest.approx(2 / 0.025)
    assert server.slowdown(requests, 2, 80.0) == pytest.approx(2 / (2 - 0.4))
    assert server.slowdown(requests, 1, 80.0) == 1.0, "one core is free"


def test_instances_in_processes_of_their_own_and_a_client_want_cores_too():
    passing, client = CoreTime(request_s=1e-3, token_s=1e-4), CoreTime(request_s=2e-3)
    server = ServerCost(process=CoreTime(request_s=5e-3), passing=passing, client=client, cores=2.0, threads=1)
    requests = trace(10, 0.1)
    assert server.work_s(requests, 1) == pytest.approx(7e-3) and server.work_s(requests, 2) == pytest.approx(9e-3)
    assert server.rate_limit(requests, 2, 100.0) == pytest.approx(2 / 0.029)
    assert server.slowdown(requests, 2, 80.0) == pytest.approx(2 / (2 - 80 * 9e-3))


def test_messages_are_work_of_the_instances_own_threads():
    """Two threads have a core each; 80 requests of 5 ms take a fifth of each."""
    server, requests = ServerCost(handling=CoreTime(request_s=5e-3), cores=2.0, threads=1), trace(10, 0.1)
    assert server.work_s(requests, 1) == 0.0 and server.work_s(requests, 2) == pytest.approx(5e-3)
    assert server.slowdown(requests, 2, 80.0) == pytest.approx(1 / 0.8)


def test_a_server_s_process_gets_no_more_than_its_turn_beside_threads_that_always_want_a_core():
    """Two cores, of which workers take 0.4: the process and two instances have 0.53 each, 53 requests/s of 10 ms."""
    server = ServerCost(
        process=CoreTime(request_s=10e-3), preparing=CoreTime(request_s=8e-3), workers=2, cores=2.0, threads=1
    )
    assert server.slowdown(trace(10, 1 / 50), 2, 50.0) == pytest.approx(2 / (2 - 50 * 18e-3))
    assert server.slowdown(trace(10, 1 / 90), 2, 90.0) == pytest.approx(3 / (2 - 90 * 8e-3)), "not what is left over"
    calm, busy = (waits(server, trace(400, 1.0 / rate), 2) for rate in (45.0, 60.0))
    assert calm[-1] < 0.05 < 0.5 < busy[-1]


def test_a_server_before_each_of_several_is_so_many_servers():
    own = ServerCost(process=CoreTime(request_s=0.04), preparing=CoreTime(megapixel_s=0.1), workers=2, cores=4.0)
    requests = trace(40, 1.0 / 30)
    assert own.times(3).rate_limit(requests, 1, 1e3) == pytest.approx(3 * own.rate_limit(requests, 1, 1e3))
    assert waits(own.times(3), requests)[-1] < 0.3 < waits(own, requests)[-1]


def test_a_slow_process_does_not_make_instances_slow():
    """It is the cores that are short: 200/s of both threads alone, and 10 ms of the server."""
    server = ServerCost(
        process=CoreTime(request_s=9e-3), client=CoreTime(request_s=1e-3), cores=2.0, threads=1, workers=2
    )
    assert server.rate_limit(trace(10, 0.1), 2, 200.0) == pytest.approx(2 / 0.02)


def test_time_is_never_negative():
    with pytest.raises(ConfigError, match="token_s must not be negative, but is -1"):
        CoreTime(token_s=-1.0)
