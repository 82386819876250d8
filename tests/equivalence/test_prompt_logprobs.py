"""A prompt's log-probabilities are those of transformers: in every layout, in chunks, where its KV could be found."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import openai
import pytest
import torch
from rich.console import Console

from hydrainfer import LLM, SamplingParams
from hydrainfer.config import load
from hydrainfer.processor import parse_messages
from hydrainfer.serving import serve_in_background
from tests.equivalence.mixed import CHATS, CHUNKED
from tests.equivalence.reference import Reference
from tests.equivalence.test_layouts import KV_BLOCK, check_whole
from tests.parts import parts

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]

N_TOP = 3
ASKED = SamplingParams(temperature=0.0, max_tokens=20, prompt_logprobs=N_TOP)
ENGINES = {
    "1EPD": {},
    "1EPD, chunks of 7": {"token_budget": 7},
    "1EPD, chunks of 1": {"token_budget": 1},
    "1EPD, few blocks": {"kv_cache_gib": 40 * KV_BLOCK / 2**30, "headroom_tokens": 0},
    "1E1P1D": {},
    "1EP1D": {},
    "2E1P2D": {"transport": "tcp"},
    "1ED1P": {},
}
OPTIONS = CHUNKED | {"image_backend": "pillow"}


@pytest.fixture(scope="module")
def likely(tiny):
    """transformers' log-probabilities [prompt - 1, vocab] of what follows each token but the last, by chat."""
    reference, tables = Reference(tiny), []
    for chat in CHATS:
        inputs = reference.inputs(chat)
        with torch.inference_mode():
            table = reference.model(**inputs).logits[0, :-1].float().log_softmax(-1)
        tables.append((inputs["input_ids"][0].tolist(), table))
    return tables


def check(out, ids, table):
    assert list(out.prompt_token_ids) == ids and len(out.prompt_logprobs) == len(ids)
    assert out.prompt_logprobs[0] is None
    for token, row, said in zip(ids[1:], table, out.prompt_logprobs[1:], strict=True):
        assert said.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert abs(said.rank - 1 - int((row > row[token]).sum())) <= 1
        best = row.topk(N_TOP).values.tolist()
        assert [value for _, value in said.top] == pytest.approx(best, abs=1e-4)
        assert [float(row[i]) for i, _ in said.top] == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_offline(tiny, likely, engine):
    layout = engine.split(",")[0]
    plain = SamplingParams(temperature=0.0, max_tokens=20)
    with LLM(tiny, layout=layout, launcher="inproc", **OPTIONS | ENGINES[engine]) as llm:
        first = llm.chat(CHATS, plain, use_tqdm=False)  # their KV is there to be found
        copies = 4 if engine.endswith("few blocks") else 2
        again = llm.chat(CHATS * copies, ASKED, use_tqdm=False)
        for out, before, (ids, table) in zip(again, first * copies, likely * copies, strict=True):
            check(out, ids, table)
            assert out.outputs[0].token_ids == before.outputs[0].token_ids and not before.prompt_logprobs
        if engine.endswith("few blocks"):
            assert parts(llm).engine.stats().n_preemptions > 0
        check_whole(llm)


def test_a_lost_instance_changes_nothing(tiny, likely):
    """The next life computes all of the prompt again; nothing of the first one's comes twice."""

    def broken(now):
        raise RuntimeError("broken by a test")

    async def ask_while_one_dies(llm):
        streams = [await parts(llm).intake.chat(parse_messages(CHATS[4]), ASKED) for _ in range(6)]
        parts(llm).engine.launcher.nodes["P0"].engine.step = broken
        for stream in streams:
            await stream.result()
        return streams

    with LLM(tiny, layout="1E2P1D", launcher="inproc", **OPTIONS | {"token_budget": 8}) as llm:
        for stream in asyncio.run(ask_while_one_dies(llm)):
            told = (None, *stream.prompt_logprobs[0])
            check(SimpleNamespace(prompt_token_ids=stream.prepared.prompts[0], prompt_logprobs=told), *likely[4])


def loglikelihood(choice, n_context):
    """What lm-eval's `local-completions` makes of an echoed answer: of the continuation, and whether it is greedy."""
    own = choice.logprobs.token_logprobs[n_context:-1]
    tops = choice.logprobs.top_logprobs[n_context:-1]
    return sum(own), all(p == max(top.values()) for p, top in zip(own, tops, strict=True))


def test_multiple_choice_over_http(tiny):
    """Contexts with their continuations as ids, many in one request, scored as lm-eval does."""
    contexts, endings = [[1, 30, 40, 50, 60], [1, 70, 80]], [[90, 91], [92], [93, 94, 95]]
    pairs = list(itertools.product(contexts, endings))
    reference = Reference(tiny)
    loaded = load({"model": str(tiny), "port": 0, "layout": "1E1P1D", "launcher": "inproc", **CHUNKED})
    with (
        serve_in_background(loaded, Console(quiet=True)) as (url, _),
        openai.OpenAI(base_url=url + "/v1", api_key="none") as client,
    ):
        prompts = [c + e for c, e in pairs]
        answer = client.completions.create(
            model=tiny.name, prompt=prompts, max_tokens=1, logprobs=1, seed=1, temperature=0, extra_body={"echo": True}
        )
        for choice, (context, ending) in zip(answer.choices, pairs, strict=True):
            with torch.inference_mode():
                table = reference.model(input_ids=torch.tensor([context + ending])).logits[0].log_softmax(-1)
            rows = table[len(context) - 1 : -1]
            want = sum(float(row[token]) for row, token in zip(rows, ending, strict=True))
            found, greedy = loglikelihood(choice, len(context))
            assert found == pytest.approx(want, abs=1e-3)
            assert greedy == (rows.argmax(-1).tolist() == ending)
            assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
