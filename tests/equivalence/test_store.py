"""Tokens are the same whatever a shared store has, loads, loses or breaks; and what it has is not computed again."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from hydrainfer import SamplingParams
from hydrainfer.scheduler import Worth
from tests.checkpoints import make_llava
from tests.checkpoints_mtp import add_mtp
from tests.checkpoints_qwen import make_qwen
from tests.checkpoints_text import make_text
from tests.equivalence.stored import (
    GREEDY,
    Faults,
    Turn,
    always_loaded,
    answer,
    ask,
    begin,
    converse,
    counts,
    encoded,
    engines,
    faulty,
    settle,
    start,
    whole,
)

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]
__all__ = ["always_loaded", "faulty"]

MAKE = {
    **{kind: partial(make_text, kind=kind) for kind in ("llama", "gemma3", "qwen3_5", "lfm2", "lfm3", "gpt_oss")},
    "llava": make_llava,
    "qwen2_vl": partial(make_qwen, "qwen2_vl"),
    "qwen3_5 with pictures": partial(make_qwen, "qwen3_5"),
    "lfm3 with pictures": partial(make_qwen, "lfm3_vl"),
}


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    """The checkpoint of a kind."""
    made = {}

    def path(kind):
        if kind not in made:
            made[kind] = MAKE[kind](out=tmp_path_factory.mktemp("stored"), seed=3)
        return made[kind]

    return path


@pytest.fixture(scope="module")
def said_of(path_of):
    """The conversations with a kind, without a store."""
    said = {}

    def talk(kind):
        if kind not in said:
            with start(path_of(kind)) as llm:
                said[kind] = converse(llm)
        return said[kind]

    return talk


def tokens(answers):
    return [one.tokens for one in answers]


# ---- what one instance has computed, another loads


@pytest.mark.parametrize(
    ("kind", "layout", "native"),
    [
        ("llama", "1EPD", True),
        ("gemma3", "1P1D", False),
        ("qwen3_5", "1EPD", True),
        ("qwen3_5", "1P1D", False),
        ("lfm2", "2EPD", False),
        ("lfm3", "1P1D", False),
        ("gpt_oss", "1EPD", False),
        ("llava", "1E1P1D", False),
        ("llava", "2EPD", False),
        ("qwen2_vl", "1EP1D", False),
        ("qwen3_5 with pictures", "1E1P1D", False),
        ("lfm3 with pictures", "1EPD", False),
    ],
)
def test_conversations_go_on_after_a_restart(path_of, said_of, tmp_path, always_loaded, kind, layout, native):
    """The third turn first, whose beginning only the store has: all whole blocks of the second turn and its answer."""
    said, path, options = said_of(kind), path_of(kind), {"layout": layout, "native_kernels": native}
    with start(path, tmp_path / "store", **options) as llm:
        for (_, answers), (_, wanted) in zip(converse(llm, 2), said):
            assert tokens(answers) == tokens(wanted)
        settle(llm)
        assert counts(llm)["n_skipped"] == 0
    with start(path, tmp_path / "store", **options) as llm:
        for i in (2, 1, 0):
            turns, wanted = said[i]
            answers = ask(llm, turns)
            assert tokens(answers) == tokens(wanted)
            for one, before in zip(answers, said[i - 1][1]) if i else ():
                assert one.n_cached >= whole(before, one)
        stranger = ask(llm, [said[2][0][0]._replace(salt="a stranger")])[0]
        assert stranger.tokens == said[2][1][0].tokens and stranger.n_cached == 0
        settle(llm)
        done = counts(llm)
        assert done["n_loaded"] > 40 and not (done["n_lost"] or done["n_failures"] or done["n_late"])


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D"])
@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_pictures_are_not_encoded_again(path_of, tmp_path, always_loaded, kind, layout):
    """Behind other texts, so that no KV of them is found."""
    path, sampling = path_of(kind), GREEDY
    with start(path) as llm:
        show = engines(llm) and placeholder(llm)
        asked = [Turn([1, 9 + i, *[show] * len(p), 40], p) for i, p in enumerate([(1,), (2, 3), (1, 4)])]
        others = [turn._replace(ids=[1, 60, *turn.ids]) for turn in asked]
        wanted = tokens(ask(llm, asked, sampling)), tokens(ask(llm, others, sampling))
    with start(path, tmp_path / "store", layout) as llm:
        assert tokens(ask(llm, asked)) == wanted[0]
        settle(llm)
        assert encoded(llm) >= 4
    with start(path, tmp_path / "store", layout) as llm:
        assert tokens(ask(llm, others)) == wanted[1]
        settle(llm)
        assert encoded(llm) == 0 and counts(llm)["n_loaded"] >= 4


def placeholder(llm):
    from tests.parts import parts

    return parts(llm).intake.processor.model.images.token_id


def test_two_servers_at_once_find_what_the_other_has_computed(path_of, said_of, tmp_path, always_loaded):
    path, said = path_of("llama"), said_of("llama")
    with start(path, tmp_path / "store") as one, start(path, tmp_path / "store", "1P1D") as other:
        for i, (turns, wanted) in enumerate(said):
            asked, wait = (one, other) if i % 2 else (other, one)
            answers = ask(asked, turns)
            assert tokens(answers) == tokens(wanted)
            for a, before in zip(answers, said[i - 1][1]) if i else ():
                assert a.n_cached >= whole(before, a)
            settle(asked)
            settle(wait)


# ---- bit by bit


LIKELY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5", "lfm3", "llava"])
def test_logits_behind_a_loaded_prefix_are_those_behind_a_cached_one(path_of, tmp_path, always_loaded, kind, native):
    """To the last bit."""
    path, options = path_of(kind), {"native_kernels": native, "drafts": "off"}
    with start(path, tmp_path / "store", **options) as llm:
        (turns, _), (after, _) = converse(llm, 2, LIKELY)
        settle(llm)
        del turns
    with start(path, tmp_path / "store", **options) as llm:
        loaded = [ask(llm, [turn], LIKELY)[0] for turn in after]
        assert counts(llm)["n_loaded"] > 20
    with start(path, **options) as llm:
        converse(llm, 1, LIKELY)
        cached = [ask(llm, [turn], LIKELY)[0] for turn in after]
    for one, other in zip(loaded, cached, strict=True):
        assert one.n_cached >= other.n_cached > 0
        if one.n_cached == other.n_cached:
            assert one.logprobs == other.logprobs
    assert sum(one.n_cached == other.n_cached for one, other in zip(loaded, cached)) >= 3
