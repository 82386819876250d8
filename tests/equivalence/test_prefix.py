"""Tokens are the same whether prefixes are shared or not: conversations in every layout, under preemption too."""

from __future__ import annotations

import pytest

from hydrainfer import LLM, SamplingParams
from tests.equivalence.mixed import CHUNKED, LAYOUTS, image, settled_stats
from tests.equivalence.test_layouts import FEW_PICTURES, KV_BLOCK, PICTURE, check_whole
from tests.parts import parts

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]

N_TURNS, N_NEW = 4, 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=N_NEW, ignore_eos=True)
OPENINGS = [[1, 9, 8, 7] * 3, [1, 9, 8, 7] * 3, [1, 9, 8, 6] * 3]


def converse(llm, sampling=(GREEDY,) * 3):
    """Several conversations side by side, each turn with the answer of the one before; the first two show the same
    picture, the third has other ids before another. `sampling`: of each."""
    placeholder = parts(llm).intake.processor.model.images.token_id
    shown = [image(1)["image"], image(1)["image"], image(2)["image"]]
    histories = [[*ids, placeholder, 5 + min(i, 1), 11, 12] for i, ids in enumerate(OPENINGS)]
    said = []
    for turn in range(N_TURNS):
        prompts = [
            {"prompt_token_ids": h, "multi_modal_data": {"image": one}} for h, one in zip(histories, shown, strict=True)
        ]
        for history, out in zip(histories, llm.generate(prompts, list(sampling), use_tqdm=False)):
            tokens = list(out.outputs[0].token_ids)
            said.append(tokens)
            history += [t for t in tokens if t != placeholder] + [20 + turn, 21, 22]
    return said


@pytest.fixture(scope="module")
def without(tiny):
    with LLM(tiny, launcher="inproc", prefix_cache=False, **CHUNKED) as llm:
        said = converse(llm)
        stats = parts(llm).engine.stats()
        assert (stats.tokens_wanted, stats.cache_blocks["kv"][2]) == (0, 0)
    return said


@pytest.mark.parametrize("layout", ["1EPD", *LAYOUTS])
def test_tokens_are_those_without_reuse(tiny, without, layout):
    with LLM(tiny, layout=layout, launcher="inproc", **CHUNKED) as llm:
        assert converse(llm) == without
        check_whole(llm)
        stats = settled_stats(llm)
        assert stats.tokens_found > 0.5 * stats.tokens_wanted or len(parts(llm).pools()) > 3


@pytest.mark.parametrize("layout", ["1EPD", "1EP1D", "1E1P1D"])
def test_tokens_are_the_same_where_blocks_are_few(tiny, without, layout):
    sizes = {"kv_cache_gib": 70 * KV_BLOCK / 2**30, "image_cache_gib": FEW_PICTURES * PICTURE / 2**30}
    with LLM(tiny, layout=layout, launcher="inproc", headroom_tokens=0, **sizes, **CHUNKED) as llm:
        assert converse(llm) == without
        check_whole(llm)
