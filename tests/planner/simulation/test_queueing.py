"""Queues whose truth is known: an instance that serves one request at a time is M/D/1, several fed by turns are bounded
by theory, a batch of decodes takes what its formula says."""

import math
import random
from statistics import NormalDist, fmean, stdev

import pytest

from hydrainfer.cache import EmbedSpec, FullSpec
from hydrainfer.core import CostModel, Layout
from hydrainfer.planner.nouns import Link, TraceRequest
from hydrainfer.planner.simulation.simulator import InstanceModel, Simulator
from hydrainfer.planner.simulation.trace import as_requests
from hydrainfer.scheduler import Budgets

pytestmark = pytest.mark.unit

KV = FullSpec.of(layers=1, kv_heads=1, head_dim=8, dtype="float32", block_tokens=16)
EMBED = EmbedSpec.of(width=8, dtype="float32", block_tokens=16)
SERVICE_S, N_PROMPT = 0.01, 16
COST = CostModel(encode_image_s=0.1, step_base_s=SERVICE_S, prefill_token_s=0.0, decode_token_s=0.0)
AT_ONCE = Link(message_s=0.0)


def one_by_one(n):
    """Instances that prefill one prompt at a time."""
    more = {"cost": COST, "blocks": {KV: 4000, EMBED: 10}, "budgets": Budgets(tokens=N_PROMPT, running=1)}
    return [InstanceModel(name=f"EPD{i}", role=r, **more) for i, r in enumerate(Layout.parse(f"{n}EPD").instances)]


def poisson(rate, n, seed, n_output=1):
    rng, at = random.Random(seed), 0.0
    for _ in range(n):
        at += rng.expovariate(rate)
        yield TraceRequest(arrival_s=at, n_text=N_PROMPT, n_output=n_output)


def delays(instances, trace, balancing="least_load"):
    served = Simulator(instances, AT_ONCE, balancing=balancing).run(as_requests(trace))
    return [r.token_s[0] - r.arrival_s for r in served]


def interval(means, confidence=0.99):
    """(mean, half-width) of independent runs, by the normal law."""
    half = NormalDist().inv_cdf(0.5 + confidence / 2) * stdev(means) / math.sqrt(len(means))
    return fmean(means), half


def sojourn_s(load):
    """Of M/D/1: service, and waiting by Pollaczek and Khinchine."""
    return SERVICE_S * (1 + load / (2 * (1 - load)))


def check(load, n_runs, n, within):
    means = []
    for seed in range(n_runs):
        times = delays(one_by_one(1), poisson(load / SERVICE_S, n, seed))
        means.append(fmean(times[n // 10 :]))
    mean, half = interval(means)
    assert abs(mean - sojourn_s(load)) <= half, (mean, sojourn_s(load), half)
    assert half <= within * mean, f"the interval of {mean} is as wide as {half}"


def test_one_server_is_m_d_1_at_half_load():
    check(0.5, n_runs=20, n=1500, within=0.03)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("load", [0.5, 0.7])
def test_one_server_is_m_d_1(load):
    check(load, n_runs=40, n=6000, within=0.03)


def test_several_servers_lie_between_the_queues_that_bound_them():
    """Joining the least busy of c servers is better than splitting the stream in c (M/D/1 each) and no better than one
    server c times as fast, but for the service itself."""
    load, c = 0.7, 3
    waits = []
    for seed in range(8):
        times = delays(one_by_one(c), poisson(c * load / SERVICE_S, 3000, seed))
        waits.append(fmean(times[300:]) - SERVICE_S)
    mean, half = interval(waits)
    split = sojourn_s(load) - SERVICE_S
    assert mean + half < split
    assert mean - half > split / c / 2, "work that is not conserved"


def test_a_batch_takes_its_formula():
    """n requests at once, prefilled in one batch, then decoded together: each step is the cost model's."""
    cost = CostModel(
        encode_image_s=0.1, step_base_s=0.003, prefill_token_s=1e-4, prefill_attention_s=1e-7,
        decode_token_s=2e-4, decode_context_s=3e-6, weights_s=0.001, context_s=5e-6,
    )  # fmt: skip
    n, n_output = 5, 30
    instance = InstanceModel(
        name="EPD0", role=Layout.parse("1EPD").instances[0], cost=cost, blocks={KV: 4000, EMBED: 10},
        budgets=Budgets(tokens=4096),
    )  # fmt: skip
    trace = [TraceRequest(arrival_s=0.0, n_text=N_PROMPT, n_output=n_output)] * n
    for served in Simulator([instance], AT_ONCE).run(as_requests(trace)):
        at = cost.language_s(n * N_PROMPT, n * N_PROMPT**2, 0, 0)
        for k, token_s in enumerate(served.token_s):
            assert token_s == pytest.approx(at, rel=1e-9), k
            at += cost.language_s(0, 0, n, n * (N_PROMPT + k + 1))
