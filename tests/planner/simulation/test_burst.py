"""The burst that once starved: 100 requests at once, every fifth with a picture, to llava-small on two cores."""

from pathlib import Path

import msgspec
import pytest
import yaml

from hydrainfer.cache import EmbedSpec, FullSpec
from hydrainfer.core import CostModel, Role
from hydrainfer.planner.simulation.simulator import InstanceModel, Simulator
from hydrainfer.planner.simulation.trace import TraceRequest, as_requests
from hydrainfer.scheduler import STEP_S, Budgets, Policy

pytestmark = pytest.mark.unit
KV = FullSpec.of(layers=12, kv_heads=4, head_dim=64, dtype="float32", block_tokens=16)
EMBED = EmbedSpec.of(width=768, dtype="float32", block_tokens=16)
COSTS = Path(__file__).parents[3] / "configs/costs/llava-small-cpu.yaml"


def burst(n_output, order="rank", running=64, step_s=STEP_S):
    """The 90th percentile of the texts' times to first token, and when all is done."""
    instance = InstanceModel(
        name="EPD0",
        role=Role.parse("EPD"),
        cost=msgspec.convert(yaml.safe_load(COSTS.read_text()), CostModel),
        blocks={KV: 4096, EMBED: 64 * 36},
        budgets=Budgets(tokens=2048, images=4, running=running, step_s=step_s),
        policy=Policy(order=order),
        overlap="off",
    )
    trace = [
        TraceRequest(arrival_s=0.001 * i, n_text=10, pictures=(576,) * (i % 5 == 0), n_output=n_output)
        for i in range(100)
    ]
    served = Simulator([instance]).run(as_requests(trace))
    texts = sorted(r.token_s[0] - r.arrival_s for r in served if not r.request.media)
    return texts[len(texts) * 9 // 10], max(r.token_s[-1] for r in served)


@pytest.mark.parametrize("n_output", [8, 16, 32])
def test_pictures_do_not_starve_text(n_output):
    """The first 64 decode `n_output` tokens, 71 ms each, before the others find a place; where there are places, nobody
    waits for that."""
    starved_s, before_s = burst(n_output, "fcfs", step_s=float("inf"))
    texts_s, end_s = burst(n_output)
    assert texts_s < 2.0 + 0.071 * n_output < 20.0 < starved_s
    assert end_s < 1.025 * before_s
    texts_s, end_s = burst(n_output, running=128)
    assert texts_s < 1.5 and end_s < 1.025 * before_s
