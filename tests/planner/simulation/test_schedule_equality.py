"""The simulator against what production runs, on one clock: the same batches at the same times, the same migrations,
the same tokens."""

import msgspec
import pytest

from hydrainfer.core import Guessing, Stage
from hydrainfer.planner.nouns import Link, Route
from hydrainfer.planner.simulation.leap import TOKEN
from hydrainfer.planner.simulation.simulator import Simulator
from hydrainfer.planner.simulation.trace import as_requests
from hydrainfer.scheduler import Policy
from tests.cache.other_kinds import STATE
from tests.planner.simulation.production import Production, described
from tests.planner.simulation.test_leaps import KV, TRACES, deployment

pytestmark = pytest.mark.cpu
SLICE = {"overlap": "slice", "step_s": 0.05, "gap_s": 0.0}
LINK = Link(bytes_per_s=1e8, latency_s=2e-4, message_s=3.1e-4)


def logged(simulator):
    """Batches as they are launched, with their times."""
    batches = []

    def tap(name, runner):
        launch = runner.launch

        def logging(batch):
            batches.append((simulator.now, name, *described(batch)))
            return launch(batch)

        runner.launch = logging

    for name, node in simulator.nodes.items():
        for runner in node.engine.lanes.runners.values():
            tap(name, runner)
    return batches


LAYOUTS = ["1EPD", "3EPD", "1E1P1D", "2EP1D", "1ED2P", "1E1PD+1EPD", "2E2P3D"]
CASES = {
    "100-rank": (100, "rank", {}),
    "400-fcfs": (400, "fcfs", {}),
    "400-rank-in-turns": (400, "rank", {"overlap": "off", "step_s": 0.012, "enough_s": 0.006}),
    "400-rank-sliced": (400, "rank", SLICE),
    "400-rank-limited": (400, "rank", SLICE | {"gap_s": 0.02}),
    "200-rank-drafts": (200, "rank", {"drafts": Guessing(0.7, 4)}),
}


def said_by(answer, n):
    """Token `n`; behind the end, where only guesses are asked for, any."""
    return answer[n] if n < len(answer) else 0


@pytest.mark.parametrize(
    ("layout", "kv_blocks", "order", "more"),
    [
        *(pytest.param(layout, *case, id=f"{name}-{layout}") for name, case in CASES.items() for layout in LAYOUTS),
        *(pytest.param(layout, 90, "rank", {"landing": 200}, id=f"landing-{layout}") for layout in ("1EPD", "2EP1D")),
    ],
)
@pytest.mark.parametrize("workload", TRACES)
def test_batches_migrations_and_tokens_are_the_same(layout, kv_blocks, order, more, workload):
    requests = as_requests(TRACES[workload](7, n=50, rate=15.0), KV.block_tokens)
    instances = list(deployment(layout, kv_blocks=kv_blocks, policy=Policy(order=order), **more))
    check_equal(instances, requests, range(10, 90) if workload == "alone" else range(TOKEN, TOKEN + 1))


ROUTES = (
    Route(source="far", target="home", rates=((0.0, 2e6), (0.8, 1e5), (2.0, 2e6)), latency_s=0.004),
    Route(source="home", target="far", rates=((0.0, 1e6),), latency_s=0.004),
)


@pytest.mark.parametrize("more", [{}, {"kinds": {STATE: 60}, "landing": 200}], ids=["", "states-landing"])
@pytest.mark.parametrize("layout", ["1E2P1D", "2EP2D", "1EP+1E1PD"])
@pytest.mark.parametrize("workload", TRACES)
def test_two_clusters_are_the_same_too(layout, more, workload):
    """The first that prefills is in a cluster of its own, and gets the long prompts."""
    requests = as_requests(TRACES[workload](7, n=50, rate=15.0), KV.block_tokens)
    requests = [msgspec.structs.replace(r, prefill_cluster="far" if r.n_prompt > 30 else "home") for r in requests]
    instances = list(deployment(layout, kv_blocks=200, **more))
    abroad = next(i for i in instances if i.role.runs(Stage.PREFILL))
    instances = [msgspec.structs.replace(i, cluster="far" if i is abroad else "home") for i in instances]
    spoken = range(10, 90) if workload == "alone" else range(TOKEN, TOKEN + 1)
    _, batches = check_equal(instances, requests, spoken, routes=ROUTES, home="home")
    assert {batch[1] == abroad.name for batch in batches} == {True, False}


def check_equal(instances, requests, spoken, n_least=100, **clusters):
    real = Production(instances, LINK, spoken, **clusters)
    try:
        real.run(requests)
    finally:
        real.close()
    answers = {r.id: real.tokens[r.id] for r in requests}
    simulator = Simulator(
        instances, LINK, leaps=False, answer=lambda r, n: said_by(answers[r.id], n - r.n_prompt), **clusters
    )
    batches = logged(simulator)
    served = simulator.run(requests)
    assert len(batches) == len(real.batches) > n_least
    for ours, theirs in zip(batches, real.batches, strict=True):
        assert ours[1:] == theirs[1:]
        assert ours[0] == pytest.approx(theirs[0], abs=1e-9)
    for r in served:
        assert r.tokens == answers[r.request.id]
    for name, node in simulator.nodes.items():
        mine, other = node.engine.stats(0.0), real.nodes[name].engine.stats(0.0)
        assert (mine.blocks_pulled, mine.n_landed) == (other.blocks_pulled, other.n_landed)
        assert mine.n_preemptions == other.n_preemptions
        assert (mine.tokens_found, mine.tokens_wanted) == (other.tokens_found, other.tokens_wanted)
        assert (mine.pictures_found, mine.pictures_wanted) == (other.pictures_found, other.pictures_wanted)
    return real, batches
