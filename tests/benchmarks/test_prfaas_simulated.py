"""What the simulated parts of Prefill-as-a-Service read off a run, and tiny runs of them."""

import json
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.prfaas import sim_far, sim_hits, sim_rates, sim_step
from benchmarks.prfaas.report import at_most, simulated, write_readme
from benchmarks.prfaas.served import far_share, gb_per_request, saturated, sustained
from benchmarks.prfaas.setting import BATCH, PAPERS, lengths, prfaas
from hydrainfer.planner.clusters import throughput
from hydrainfer.planner.clusters.simulated import Run, Setup, simulate, trace_at
from hydrainfer.planner.nouns import TraceRequest
from hydrainfer.planner.simulation import ServedRequest, as_requests

pytestmark = pytest.mark.unit


def run_of(*served):
    """A run of (arrival, tokens of the prompt, end)."""
    trace = [TraceRequest(arrival_s=float(at_s), n_text=n, n_output=1) for at_s, n, _ in served]
    ends = [end_s for *_, end_s in served]
    pairs = zip(as_requests(trace), ends, strict=True)
    return Run([ServedRequest(request, [float(end_s)]) for request, end_s in pairs], [], Counter(), 0.0, 0.0, [])


def test_a_rate_is_sustained_by_the_prompts_that_have_least_room():
    """One short and one long prompt a second; of the long ones, every other one ends in time."""
    short = [(i, 10, i + 0.5) for i in range(101)]
    long = [(i, 1000, i + 0.5 + 1000 * (i % 2)) for i in range(101)]
    assert sustained(run_of(*sorted(short + long)), 100) == pytest.approx(1.0, rel=0.05)
    assert sustained(run_of(*short), 100) == pytest.approx(1.0, rel=0.05)


def test_a_simulated_cell_says_what_it_was_expected_to_be(tmp_path):
    rows = [simulated("rate", 2.0, 2.02), simulated("other rate", 2.0, 3.0), at_most("ratio", 0.5, 0.4)]
    document = {"results": {"rows": [*rows, at_most("other ratio", 0.5, 0.6)]}, "revision": "abc"}
    (tmp_path / "sim_rates.json").write_text(json.dumps(document))
    page = write_readme(tmp_path, {"sim_rates": sim_rates}).read_text()
    assert "| rate | 2 | 2.02 | 1.010 | holds |" in page
    assert "| other rate | 2 | 3 | 1.500 | **does not hold** (beyond 5.0%) |" in page
    assert "| ratio | ≤ 0.5 | 0.4 |  | holds |" in page
    assert "| other ratio | ≤ 0.5 | 0.6 |  | **does not hold** |" in page


def test_the_threshold_is_back_when_it_is_within_a_tenth_of_its_base():
    base = float(PAPERS.threshold)
    changes = [(0.0, base), (310.0, 2 * base), (400.0, 4 * base), (490.0, 1.5 * base), (495.0, 1.05 * base)]
    assert sim_step.thresholds_at(changes, [0.0, 309.0, 310.0, 600.0]) == [base, base, 2 * base, 1.05 * base]
    assert sim_step.back_s(changes) == pytest.approx(15.0)
    assert sim_step.back_s(changes[:2]) == float("inf")
    assert sim_step.back_s(changes[:1]) == 0.0


def test_changes_of_the_threshold_are_counted_within_ten_seconds():
    changes = [(0.0, 1.0), (5.0, 2.0), (14.0, 3.0), (16.0, 4.0), (301.0, 5.0)]
    assert sim_step.most_changes(changes, 300.0) == 2
    assert sim_step.most_changes(changes, 5.0) == 0


@pytest.mark.parametrize("hit", [0.5, 0.9])
def test_a_turn_and_its_answer_are_the_given_share_of_the_next_prompt(hit):
    prompts = sim_hits.turns(60_000, hit)
    assert len(prompts) == 4 and prompts[-1] == 60_000
    for n, following in pairwise(prompts):
        assert (n + 1024) / following == pytest.approx(hit, rel=1e-3)


def test_a_conversation_that_shares_nothing_has_the_same_prompts_at_the_same_times():
    shared = list(sim_hits.talk("a", [4000, 10_000], 3.0, True, random.Random(1)))
    alone = list(sim_hits.talk("a", [4000, 10_000], 3.0, False, random.Random(1)))
    assert [(one.arrival_s, one.n_prompt) for one in shared] == [(one.arrival_s, one.n_prompt) for one in alone]
    assert not alone[1].parts
    assert [part.n_tokens for part in shared[1].parts] == [4000, 1024, 4976]
    assert shared[1].parts[:1] == shared[0].parts


def test_several_far_clusters_have_the_devices_and_the_bandwidth_of_one():
    one, four = sim_far.several(1), sim_far.several(4)
    assert sum(cluster.instances for cluster in four.far) == one.far[0].instances
    assert sum(link.bytes_per_s for link in four.links) == pytest.approx(one.links[0].bytes_per_s)
    slow = sim_far.several(4, slow=0.25)
    assert [link.bytes_per_s / four.links[0].bytes_per_s for link in slow.links] == [0.25, 1.0, 1.0, 1.0]


def test_a_few_requests_are_served_in_both_clusters_and_cross_the_link():
    run = simulate(prfaas(), PAPERS, Setup(batch=BATCH, n_output=16), trace_at(lengths(), 16, 1.0, 60, even=True))
    assert len(run.served) == 60 and np.all(run.ttft_s > 0.0) and np.all(run.second_s > run.ttft_s)
    assert far_share(run) == pytest.approx(0.496, abs=0.05)
    assert gb_per_request(run) == pytest.approx(throughput(prfaas(), PAPERS).bytes_per_request / 1e9, rel=0.1)


def test_a_link_that_limits_is_full_and_the_rate_is_the_model_s():
    setup = Setup(batch=BATCH, n_output=16, adapts=False)
    _, rate = saturated(prfaas(1.0), PAPERS, setup, 150)
    assert rate == pytest.approx(throughput(prfaas(1.0), PAPERS).rate, rel=0.15)
