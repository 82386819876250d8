"""The burst that once starved: 100 requests at once, every fifth with a picture, to llava-small on two cores."""

from pathlib import Path

import msgspec
import pytest
import yaml

from hydrainfer.cache import EmbedSpec, FullSpec
from hydrainfer.core import CostModel, Role
from hydrainfer.planner.nouns import TraceRequest
from hydrainfer.planner.simulation.simulator import InstanceModel, Simulator
from hydrainfer.planner.simulation.trace import as_requests
from hydrainfer.scheduler import RUNNING, STEP_S, Budgets, Policy

pytestmark = pytest.mark.unit
KV = FullSpec.of(layers=12, kv_heads=4, head_dim=64, dtype="float32", block_tokens=16)
EMBED = EmbedSpec.of(width=768, dtype="float32", block_tokens=16)
COSTS = Path(__file__).parents[3] / "configs/costs/llava-small-cpu.yaml"


def burst(n_output, order="rank", running=RUNNING, step_s=STEP_S):
    """The 90th percentile of the texts' times to first token, when most texts are done, and when all is."""
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
    texts = [r for r in served if not r.request.media]
    first, last = (sorted(r.token_s[k] - r.arrival_s for r in texts) for k in (0, -1))
    return first[len(first) * 9 // 10], last[len(last) * 9 // 10], max(r.token_s[-1] for r in served)


@pytest.mark.parametrize("n_output", [8, 16, 32])
def test_pictures_do_not_starve_text(n_output):
    """Where there are fewer places, the first 64 decode `n_output` tokens, 71 ms each, before the others find one.
    Where there are places for all, the texts do not wait for pictures between any two of their tokens."""
    starved_s, _, before_s = burst(n_output, "fcfs", 64, float("inf"))
    texts_s, done_s, end_s = burst(n_output)
    assert texts_s < 1.5 and starved_s > 20.0 and end_s < 1.025 * before_s
    assert done_s < 4.0 + 0.2 * n_output
    texts_s, _, end_s = burst(n_output, running=64)
    assert texts_s < 2.0 + 0.071 * n_output and end_s < 1.025 * before_s
