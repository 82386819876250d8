"""Experts, sinks, windows, and values narrower than keys: the same tokens however a batch is made up, in layouts, with
reuse and under preemption."""

from __future__ import annotations

import pytest

from hydrainfer import LLM, SamplingParams
from tests.checkpoints_text import make_text
from tests.equivalence.mixed import settled_stats
from tests.equivalence.test_layouts import check_whole
from tests.equivalence.test_windows import few, n_lent, write

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]

PLAIN = {"threads": 1, "native_kernels": False, "block_tokens": 4, "launcher": "inproc"}


def converse(llm):
    """Two conversations that begin alike, of three turns."""
    greedy, said = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True), []
    histories = [[1, 9, 8, 7] * 8 + [5 + i] for i in range(2)]
    for turn in range(3):
        for history, out in zip(histories, llm.generate([{"prompt_token_ids": h} for h in histories], greedy)):
            said.append(list(out.outputs[0].token_ids))
            history += [*said[-1], 20 + turn, 21, 22]
    return said


@pytest.fixture(scope="module", params=["gpt_oss", "mimo"])
def case(request, tmp_path_factory):
    """A checkpoint, and its answers where nothing is chunked and nothing found again."""
    path = make_text(tmp_path_factory.mktemp("mixture"), request.param, 21)
    with LLM(path, prefix_cache=False, token_budget=2048, **PLAIN) as llm:
        return path, write(llm), converse(llm)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("1EPD", {"token_budget": 1}),
        ("1EPD", {"token_budget": 7}),
        ("1EPD", {"token_budget": 24, "native_kernels": True}),
        ("1P1D", {"token_budget": 24}),
        ("2P2D", {"token_budget": 24}),
    ],
)
def test_tokens_are_the_same(case, layout, options):
    path, written, said = case
    with LLM(path, layout=layout, **PLAIN | options) as llm:
        assert write(llm) == written
        assert converse(llm) == said
        check_whole(llm)
        stats = settled_stats(llm)
        assert stats.tokens_found > 0.2 * stats.tokens_wanted or layout != "1EPD"


@pytest.mark.parametrize(("layout", "elastic"), [("1EPD", True), ("1EPD", False), ("1P1D", True)])
def test_few_blocks(case, layout, elastic):
    path, written, said = case
    options = {"kv_cache_gib": few(path), "headroom_tokens": 0, "max_model_len": 140, "token_budget": 24}
    options["elastic_memory"] = elastic
    with LLM(path, layout=layout, **PLAIN | options) as llm:
        assert write(llm) == written
        assert converse(llm) == said
        check_whole(llm)
        assert settled_stats(llm).n_preemptions > 0
        assert (n_lent(llm) > 0) == elastic
