"""Layers that keep little of a request, windows and states, in every layout: reuse, preemption, few blocks."""

from __future__ import annotations

from functools import partial

import pytest

from hydrainfer import LLM, SamplingParams
from hydrainfer.core import Role, TokenWork
from hydrainfer.families import read_config
from hydrainfer.models import cache_specs
from hydrainfer.scheduler import Scheduler
from tests.checkpoints_gemma import make_gemma
from tests.checkpoints_qwen import make_qwen
from tests.equivalence.mixed import CHUNKED, Logprob, ask, image, parkings, settled_stats
from tests.equivalence.oracle import drafts_of, key
from tests.equivalence.test_layouts import check_whole
from tests.equivalence.test_prefix import converse
from tests.parts import parts

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]

LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
LAYOUTS = ["1EPD", "1EP1D", "1ED1P", "1E1P1D", "2E1P2D"]


MAKE = {"gemma3": make_gemma, "qwen3.5": partial(make_qwen, "qwen3_5"), "lfm3": partial(make_qwen, "lfm3_vl")}


@pytest.fixture(scope="module", params=MAKE)
def path(request, tmp_path_factory):
    return MAKE[request.param](tmp_path_factory.mktemp("small"), seed=3)


@pytest.fixture(scope="module")
def wanted(path):
    """Answers to the mixed batch, and to conversations, where nothing is chunked and nothing found again."""
    with LLM(path, launcher="inproc", prefix_cache=False, **CHUNKED | {"token_budget": 2048}) as llm:
        return ask(llm), converse(llm), write(llm)


def write(llm):
    """Long answers side by side, to a prompt each."""
    prompts = [{"prompt_token_ids": [1, 9 + i, 8, 7] * 4} for i in range(6)]
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, LONG, use_tqdm=False)]


def n_lent(llm):
    """Extents that went from one cache to another."""
    arenas = [caches.arena for caches in parts(llm).pools().values()]
    return sum(arena.n_lent for arena in arenas if arena is not None)


def few(path):
    """GiB of caches that hold one request while it decodes, and one while it is prefilled."""
    config = read_config(path)
    n_tokens = 140 if config.text.recurrence is None else 100  # few states let few begin: these few must want more
    specs = cache_specs(config, Role.parse("PD"), "float32", CHUNKED["block_tokens"])
    kv = [s for s in specs if s.size_option == "kv_cache_gib"]
    return sum(s.block_bytes * (s.held_by(n_tokens) + len(s.span(0, n_tokens))) for s in kv) / 2**30


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_one_instance_without_reuse(path, wanted, layout):
    with LLM(path, layout=layout, launcher="inproc", **CHUNKED) as llm:
        assert ask(llm) == wanted[0]
        assert converse(llm) == wanted[1]
        check_whole(llm)
        stats = settled_stats(llm)
        assert stats.tokens_found > 0.3 * stats.tokens_wanted or layout != "1EPD"


@pytest.mark.parametrize(
    ("layout", "landing", "elastic"),
    [("1EPD", 0, True), ("1EPD", 0, False), ("1E1P1D", 0, True), ("1E1P1D", 4, True), ("1E1P1D", 4, False)],
)
def test_few_blocks(path, wanted, layout, landing, elastic, monkeypatch):
    """`landing`: host memory, in such caches. `elastic`: they lend each other memory."""
    entered = parkings(monkeypatch)
    options = {"kv_cache_gib": few(path), "host_cache_gib": landing * few(path), "elastic_memory": elastic}
    options |= {"headroom_tokens": 0, "max_model_len": 140}
    with LLM(path, layout=layout, launcher="inproc", **options, **CHUNKED) as llm:
        assert ask(llm) == wanted[0]
        assert write(llm) == wanted[2]
        check_whole(llm)
        assert settled_stats(llm).n_preemptions > 0
        assert (n_lent(llm) > 0) == elastic
    assert bool(entered) == bool(landing)


@pytest.mark.parametrize(
    ("layout", "right", "small"), [("1EPD", 1.0, False), ("1EPD", 0.6, True), ("1E1P1D", 0.8, True)]
)
def test_drafts_change_neither_tokens_nor_hits(path, wanted, layout, right, small, monkeypatch):
    """A rejected draft leaves nothing in a window or a state, and takes no block that is wanted or found again."""
    options = CHUNKED | {"layout": layout, "launcher": "inproc", "token_budget": 99}
    if small:
        options |= {"kv_cache_gib": few(path), "headroom_tokens": 0, "max_model_len": 140}
    answers = {key([1, 9 + i, 8, 7] * 4, LONG, 0): ids for i, ids in enumerate(wanted[2])}
    found = []
    with drafts_of(monkeypatch, answers, right):
        for drafts in ("off", "oracle,ngram"):
            with LLM(path, drafts=drafts, **options) as llm:
                assert small or converse(llm) == wanted[1]
                stats = settled_stats(llm)
                found.append((stats.tokens_found, stats.tokens_wanted))
                assert write(llm) == wanted[2]
                assert ask(llm) == wanted[0]
                check_whole(llm)
                drafted = settled_stats(llm).drafts
    oracle = drafted["oracle"]
    assert found[0] == found[1] and oracle.n_accepted > (0 if small else 200)
    assert not small or oracle.left_out["room"] > 0  # how often depends on who decodes at once


@pytest.mark.parametrize("layout", ["1EPD", "1EP1D"])
def test_ends_that_are_heard_of_late(path, layout, monkeypatch):
    """Each step is launched while the one before is computed, also behind a token that proves to be the last. The next
    turn goes on from what was kept of an answer that ended so."""
    common = {"max_tokens": 40, "stop_token_ids": list(range(0, 2048, 9))}
    penalised = {"presence_penalty": 0.6, "frequency_penalty": 0.4}
    sampling = [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=0.0, **common, **penalised),
        SamplingParams(temperature=1.0, seed=3, **common, **penalised),
    ]
    late, settle = [], Scheduler.apply

    def apply(self, result, now):
        late.extend(w for w in result.batch.work if isinstance(w, TokenWork) and w.seq.cancelled)
        return settle(self, result, now)

    monkeypatch.setattr(Scheduler, "apply", apply)
    with LLM(path, launcher="inproc", prefix_cache=False, async_scheduling=False, **CHUNKED) as llm:
        said = converse(llm, sampling)
    assert not late and any(len(answer) < 40 for answer in said)
    with LLM(path, layout=layout, launcher="inproc", async_scheduling=True, overlap="free", **CHUNKED) as llm:
        assert converse(llm, sampling) == said
        check_whole(llm)
        assert settled_stats(llm).tokens_found > 0
    assert late, "no step was launched behind the last token of an answer"


@pytest.mark.parametrize("native", [False, True])
def test_other_questions_about_a_picture_are_answered_as_without_reuse(tmp_path, native):
    """A prefix may end within a picture whose tokens see each other: its rest still sees all of it."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    path, said = make_gemma(tmp_path, seed=3), []
    for prefix_cache in (False, True):
        with LLM(path, launcher="inproc", prefix_cache=prefix_cache, **CHUNKED | {"native_kernels": native}) as llm:
            placeholder, found = parts(llm).intake.processor.model.images.token_id, []
            for lead in range(4):  # so that the picture ends at every place in a block
                for question in ([5, 11, 12, 13], [6, 30, 31, 32], [7, 40, 41]):
                    ids = [1, *[9] * lead, placeholder, *question]
                    prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": image(1)["image"]}}
                    (one,) = llm.generate([prompt], params, use_tqdm=False)[0].outputs
                    found.append((list(one.token_ids), [Logprob(t.logprob) for t in one.logprobs]))
            assert (parts(llm).engine.stats().tokens_found > 0) == prefix_cache
        said.append(found)
    assert said[1] == said[0]
