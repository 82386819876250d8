"""Conversations that come back after a minute, with room on the device for few of them: host memory and a store keep
the others."""

import random
import statistics

import msgspec
import pytest

from benchmarks.record import ROOT
from hydrainfer.cache import FullSpec
from hydrainfer.core import CostModel, Role
from hydrainfer.planner.nouns import Link, PromptPart, TraceRequest
from hydrainfer.planner.simulation import InstanceModel, Simulator, StoreModel, as_requests

COST = msgspec.yaml.decode((ROOT / "configs/costs/illustrative-h100-llava-7b.yaml").read_bytes(), type=CostModel)
pytestmark = pytest.mark.unit
KV = FullSpec.of(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")
N, N_TURNS, FIRST, NEXT, OUTPUT = 48, 3, 1600, 80, 20


def conversations():
    """Each turn's prompt is the one before and something new."""
    draw = random.Random(0)
    for i in range(N):
        at_s, parts = draw.uniform(0.0, 60.0), [PromptPart(f"{i}", FIRST)]
        for turn in range(N_TURNS):
            n = sum(part.n_tokens for part in parts)
            yield TraceRequest(arrival_s=at_s + 60.0 * turn, n_text=n, n_output=OUTPUT, parts=tuple(parts))
            parts.append(PromptPart(f"{i}.{turn}", NEXT))


def later_ttft_s(host=0, store=None, layout=("EPD",)):
    room = 16 * (FIRST + N_TURNS * NEXT) // KV.block_tokens
    instances = [
        InstanceModel(
            name=f"{role}{i}",
            role=Role.parse(role),
            cost=COST,
            blocks={KV: room},
            host={KV: host * room // 16} if host else {},
        )
        for i, role in enumerate(layout)
    ]
    simulator = Simulator(instances, Link(host_bytes_per_s=25e9), store=store)
    served = simulator.run(as_requests(conversations()))
    assert all(one.finish == "length" for one in served)
    for node in simulator.nodes.values():
        node.caches.check()
    later = [one for one in served if one.arrival_s >= 60.0]
    return statistics.median(one.token_s[0] - one.arrival_s for one in later)


@pytest.mark.parametrize("layout", [("EPD",), ("P", "D")])
def test_later_turns_begin_sooner(layout):
    without = later_ttft_s(layout=layout)
    assert later_ttft_s(host=64, layout=layout) <= 0.4 * without
    fast = StoreModel(read_bytes_per_s=10e9, write_bytes_per_s=5e9)
    assert later_ttft_s(store=fast, layout=layout) <= 0.6 * without
    assert later_ttft_s(store=StoreModel(), layout=layout) <= 1.05 * without, "loaded though computing is sooner"
    assert later_ttft_s(store=StoreModel(n_bytes=1e6), layout=layout) <= 1.1 * without
