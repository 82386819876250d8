"""Answers follow their grammars wherever they are computed: in chunks, after a move, a preemption, a lost instance."""

from __future__ import annotations

import asyncio
import json
import random
import re

import jsonschema
import pytest

from hydrainfer import LLM, SamplingParams
from hydrainfer.core import Grammar, Reasoning
from hydrainfer.processor import parse_messages
from tests.equivalence.mixed import CHUNKED, image, settled_stats, user
from tests.equivalence.oracle import drafted_by
from tests.equivalence.test_layouts import check_whole, start
from tests.grammar.schemas import random_schema
from tests.parts import parts

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]

SCHEMAS = [random_schema(random.Random(seed)) for seed in range(24)]
CHATS = [user("Say it as JSON."), user(image(1), "What is this?"), user("in chunks: " + "seven eight nine " * 9)]
HOW = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1, "n": 2},
    {"temperature": 1.3, "seed": 2, "top_p": 0.95, "logprobs": 2, "repetition_penalty": 1.1},
    {"temperature": 1.0, "seed": 3, "min_tokens": 30, "presence_penalty": 1.0},
]
PARAMS = [
    SamplingParams(max_tokens=70, grammar=Grammar("json", json.dumps(schema)), **HOW[i % len(HOW)])
    for i, schema in enumerate(SCHEMAS)
]
CODE = SamplingParams(max_tokens=60, temperature=1.0, seed=4, grammar=Grammar("regex", "([a-f]{3}-){8}[0-9]"))


def outputs_of(llm):
    return llm.chat([CHATS[i % len(CHATS)] for i in range(len(PARAMS))], PARAMS, use_tqdm=False)


def told(outputs):
    return [[(c.text, c.token_ids, c.finish_reason) for c in out.outputs] for out in outputs]


def ask(llm):
    return told(outputs_of(llm))


@pytest.fixture(scope="module")
def outputs(tiny):
    with LLM(tiny, layout="1EPD", **CHUNKED | {"token_budget": 2048, "drafts": "off"}) as llm:
        answers = outputs_of(llm)
        check_whole(llm)
    return answers


@pytest.fixture(scope="module")
def said(outputs):
    return told(outputs)


def test_every_finished_answer_is_valid(said):
    n_finished, n = 0, 0
    for schema, answer in zip(SCHEMAS, said):
        for text, _, finish in answer:
            n += 1
            if finish == "stop":
                n_finished += 1
                jsonschema.validate(json.loads(text), schema)
    assert n_finished >= 0.7 * n, (n_finished, n)


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D", "1EP1D", "1E2PD+1EPD"])
def test_few_blocks_and_moves_change_nothing(tiny, said, layout):
    with start(tiny, layout, few=True) as llm:
        assert ask(llm) == said
        check_whole(llm)
        if layout == "1EPD":
            assert parts(llm).engine.stats().n_preemptions > 0
        else:
            assert settled_stats(llm).n_landed > 0


@pytest.mark.parametrize(
    ("layout", "drafts", "right", "few"),
    [
        ("1EPD", "grammar,oracle", 1.0, False),
        ("1EPD", "oracle,grammar", 0.5, True),
        ("1EPD", "oracle", 0.0, False),
        ("1E1P1D", "oracle,grammar,ngram", 0.9, True),
    ],
)
def test_drafts_change_no_token(tiny, outputs, layout, drafts, right, few, monkeypatch):
    """What a grammar forces is always right, what it forbids is not verified, and rejected drafts leave no trace."""
    with (
        drafted_by(monkeypatch, outputs, PARAMS, right),
        start(tiny, layout, few, drafts=drafts, token_budget=99) as llm,
    ):
        assert ask(llm) == told(outputs)
        check_whole(llm)
        if layout == "1EPD":
            counts = settled_stats(llm).drafts
            if drafts == "grammar,oracle":
                assert counts["grammar"].n_accepted == counts["grammar"].n_tokens > 20
                assert counts["oracle"].n_accepted == counts["oracle"].n_tokens > 20
            if right > 0:
                assert counts["oracle"].n_accepted > 20
            else:  # a grammar leaves few wrong guesses to verify, under load perhaps none
                assert "oracle" not in counts or counts["oracle"].n_accepted == 0


def test_a_lost_instance_changes_nothing(tiny):
    """The tokens so far are all that is left of the place in the grammar."""

    def broken(now):
        raise RuntimeError("broken by a test")

    async def ask_while_they_die(llm):
        hub = parts(llm).engine
        streams = [await parts(llm).intake.chat(parse_messages(CHATS[0]), CODE) for _ in range(6)]
        while not any(max(s.n_tokens) > 4 for s in streams):
            await asyncio.sleep(0.002)
        hub.launcher.nodes["D0"].engine.step = broken
        return [(await s.result())[0] for s in streams]

    with LLM(tiny, layout="1EP2D", launcher="inproc", **CHUNKED) as llm:
        (want,) = llm.chat(CHATS[0], CODE, use_tqdm=False)
        assert re.fullmatch("([a-f]{3}-){8}[0-9]", want.outputs[0].text)
        answers = asyncio.run(ask_while_they_die(llm))
    assert [c.text for c in answers] == [want.outputs[0].text] * 6


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D"])
def test_a_form_behind_the_reasoning(tiny, layout):
    """A model that is free until it writes token 300, wherever it goes meanwhile."""
    closes = 300
    params = SamplingParams(
        max_tokens=120,
        temperature=1.0,
        seed=8,
        n=4,
        logit_bias=((closes, 4.0),),
        grammar=Grammar("regex", "([a-f]{3}-){3}[0-9]"),
        reasoning=Reasoning(299, closes, begun=True),
    )
    with start(tiny, layout, few=True) as llm:
        (out,) = llm.chat(CHATS[1], params, use_tqdm=False)
        words = parts(llm).intake.processor.model.tokenizer
        check_whole(llm)
    finished = [c for c in out.outputs if c.finish_reason == "stop"]
    assert finished and all(closes in c.token_ids for c in finished)
    for choice in finished:
        answer = choice.token_ids[choice.token_ids.index(closes) + 1 :]
        assert re.fullmatch("([a-f]{3}-){3}[0-9]", words.decode(list(answer)))


def test_stop_strings_min_tokens_and_ignore_eos(tiny):
    """A finished grammar ends its answer, whatever else would go on."""
    grammar = Grammar("regex", "[a-c]{5}-[a-c]{5}")
    with LLM(tiny, **CHUNKED) as llm:
        params = [
            SamplingParams(max_tokens=40, seed=1, stop=("-",), grammar=grammar),
            SamplingParams(max_tokens=40, seed=1, ignore_eos=True, grammar=grammar),
            SamplingParams(max_tokens=40, seed=1, min_tokens=30, grammar=grammar),
            SamplingParams(max_tokens=2, seed=1, grammar=grammar),
        ]
        stopped, endless, least, short = (out.outputs[0] for out in llm.generate(["x"] * 4, params, use_tqdm=False))
    assert re.fullmatch("[a-c]{5}", stopped.text) and (stopped.finish_reason, stopped.stop_reason) == ("stop", "-")
    for finished in (endless, least):
        assert re.fullmatch("[a-c]{5}-[a-c]{5}", finished.text) and finished.finish_reason == "stop"
        assert len(finished.token_ids) <= 12 and len(set(finished.token_ids[:-1]) & {2}) == 0
    assert short.finish_reason == "length"
