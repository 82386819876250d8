"""Block tables: whatever a row had before, it names no block but those of its request."""

from __future__ import annotations

import random

import pytest

from hydrainfer.cache import FullSpec
from hydrainfer.core import LiveSequence, Request, SamplingParams
from hydrainfer.runtime.tables import BlockTables
from tests.cache.other_kinds import WINDOW

pytestmark = pytest.mark.cpu
KV = FullSpec.of(layers=1, kv_heads=1, head_dim=1, dtype="float32", block_tokens=4)


@pytest.mark.parametrize("spec", [KV, WINDOW])
def test_rows_name_only_blocks_that_their_request_holds(spec):
    draw, live, tables = random.Random(3), [], BlockTables(spec, n_rows=2, n_blocks=2)
    for step in range(200):
        if live and draw.random() < 0.2:
            live.pop(draw.randrange(len(live)))
        if len(live) < 5:
            request = Request(id=f"r{step}", prompt_ids=(1,), sampling=SamplingParams(), max_tokens=1, seed=0)
            live.append(LiveSequence(request, (0.0, step), 0.0))
            live[-1].hold.blocks = {spec.name: [draw.randrange(1000) for _ in range(draw.randint(1, 4))]}
            live[-1].hold.first_block = {spec.name: 0}
        for seq in live:
            blocks = seq.hold.blocks[spec.name]
            blocks += [draw.randrange(1000) for _ in range(draw.randint(0, 2))]
            if spec.slides and len(blocks) > 1 and draw.random() < 0.5:
                del blocks[0]
                seq.hold.first_block[spec.name] += 1
        for seq, row in zip(live, tables.gather(live).tolist(), strict=True):
            held = seq.hold.blocks[spec.name]
            assert row[: len(held)] == held and set(row) == set(held)
