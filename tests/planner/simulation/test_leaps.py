"""Fast forward changes nothing: the same tokens at the same times, batch for batch, message for message."""

import random

import pytest

from hydrainfer.cache import EmbedSpec, FullSpec
from hydrainfer.core import CostModel, Layout
from hydrainfer.planner.nouns import ANSWER, Link, PromptPart, TraceRequest
from hydrainfer.planner.simulation.simulator import InstanceModel, Simulator
from hydrainfer.planner.simulation.trace import as_requests
from hydrainfer.scheduler import Budgets
from tests.cache.other_kinds import STATE, WINDOW

pytestmark = pytest.mark.unit

KV = FullSpec.of(layers=2, kv_heads=2, head_dim=32, dtype="float32", block_tokens=4)
EMBED = EmbedSpec.of(width=64, dtype="float32", block_tokens=8)
COST = CostModel(
    encode_image_s=0.02, step_base_s=0.004, prefill_token_s=2e-4, decode_token_s=3e-4, decode_context_s=1e-6,
    weights_s=0.002, context_s=2e-6, overlap_slowdown=1.3,
)  # fmt: skip


INF = float("inf")


def deployment(
    layout, kv_blocks=400, embed_blocks=40, kinds=(), step_s=INF, enough_s=INF, gap_s=None, landing=0, **more
):
    sizes = {EMBED: embed_blocks, KV: kv_blocks, **dict(kinds)}
    budgets = Budgets(tokens=64, step_s=step_s, enough_s=enough_s, gap_s=gap_s, wait_s=5 * (gap_s or 0.0))
    for n, role in enumerate(Layout.parse(layout).instances):
        blocks = {spec: n for spec, n in sizes.items() if any(role.runs(stage) for stage in spec.stages)}
        hosted = {spec: landing for spec in blocks if landing and spec is not EMBED}
        same = {"cost": COST, "blocks": blocks, "budgets": budgets, "host": hosted}
        yield InstanceModel(name=f"{role}{n}", role=role, **same, **more)


def trace(seed, n=60, rate=12.0, pictured=0.6):
    rng, at = random.Random(seed), 0.0
    for _ in range(n):
        at += rng.expovariate(rate)
        pictures = (
            tuple(rng.choice((8, 20, 33)) for _ in range(rng.choice((1, 1, 2)))) if rng.random() < pictured else ()
        )
        yield TraceRequest(
            arrival_s=at,
            n_text=rng.randint(1, 60),
            pictures=pictures,
            n_output=rng.choice((1, 2, 9, 40, 120)),
            content=rng.choice(("", "", "known")),
        )


def dialogues(seed, n=60, rate=12.0):
    """Turns of conversations that share system prompts and pictures."""
    rng, at, begun = random.Random(seed), 0.0, []
    for i in range(n):
        at += rng.expovariate(rate)
        parts = rng.choice([*begun[-12:], (PromptPart("system", 21),), (PromptPart("another", 9),)])
        if rng.random() < 0.3:
            parts = (*parts, PromptPart(f"picture {rng.randint(0, 5)}", 20, True))
        parts = (*parts, PromptPart(f"text {i}", rng.randint(1, 30)))
        n_output, n_seen = rng.choice((1, 2, 9, 40, 120)), tuple(p.n_tokens for p in parts if p.picture)
        n_text = sum(p.n_tokens for p in parts) - sum(n_seen)
        yield TraceRequest(arrival_s=at, n_text=n_text, pictures=n_seen, n_output=n_output, parts=parts)
        begun += [(*parts, PromptPart(ANSWER, n_output))] * (sum(p.n_tokens for p in parts) < 60 and len(n_seen) < 3)


TRACES = {"alone": trace, "dialogues": dialogues}


def outcome(layout, seed, leaps, requests=trace, **more):
    events = []
    s = Simulator(list(deployment(layout, **more)), Link(bytes_per_s=1e8), record=events.append, leaps=leaps)
    served = s.run(as_requests(requests(seed), KV.block_tokens))
    end_s = s.now
    for node in s.nodes.values():
        while not node.engine.idle:  # what was published goes to host memory
            s.now += 1.0
            node.engine.step(s.now)
        node.caches.check(idle=True)
        node.engine.scheduler.check()
    counts = {name: node.engine.stats(end_s) for name, node in s.nodes.items()}
    steps = {name: (c.n_steps, c.n_preemptions, c.n_landed, c.blocks_pulled) for name, c in counts.items()}
    return [(r.request.id, r.token_s, r.finish) for r in served], steps, sorted(events), s.n_turns


@pytest.mark.parametrize("layout", ["1EPD", "4EPD", "1E1P1D", "1EP2D", "2ED1P", "1E1PD+1EPD"])
@pytest.mark.parametrize(
    ("kv_blocks", "more"),
    [
        (90, {}),
        (90, {"landing": 200}),
        (400, {}),
        (400, {"kinds": ((WINDOW, 30), (STATE, 20))}),
        (400, {"overlap": "slice", "gap_s": 0.0}),
        (400, {"overlap": "slice", "gap_s": 0.02}),
    ],
    ids=["90", "90-landing", "400", "more-kinds", "sliced", "limited"],
)
@pytest.mark.parametrize("requests", TRACES)
def test_the_same_with_and_without(layout, kv_blocks, more, requests):
    n_turns = [0, 0]
    for seed in range(3):
        plain = outcome(layout, seed, False, TRACES[requests], kv_blocks=kv_blocks, **more)
        fast = outcome(layout, seed, True, TRACES[requests], kv_blocks=kv_blocks, **more)
        for (name, at, end), (_, at_fast, end_fast) in zip(plain[0], fast[0], strict=True):
            assert end == end_fast == "length"
            assert at == pytest.approx(at_fast, abs=1e-12), name
        assert plain[1] == fast[1]
        assert [e[:2] for e in plain[2]] == [e[:2] for e in fast[2]]
        n_turns[0] += plain[3]
        n_turns[1] += fast[3]
    assert n_turns[1] < n_turns[0] or (
        "kinds" in more and requests == "dialogues"
    )  # a window is slid too often to leap
