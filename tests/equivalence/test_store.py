"""Tokens are the same whatever a shared store has, loads, loses or breaks; and what it has is not computed again."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from hydrainfer import SamplingParams
from hydrainfer.models import fingerprint
from hydrainfer.scheduler import Worth
from hydrainfer.stores.files import clear
from tests.checkpoints_mtp import add_mtp
from tests.checkpoints_text import make_text
from tests.equivalence.stored import (
    MAKE,
    Faults,
    Turn,
    always_loaded,
    ask,
    ask_all,
    converse,
    counts,
    crowd,
    dirty,
    encoded,
    engines,
    faulty,
    few,
    follow,
    openings,
    placeholders_of,
    settle,
    start,
    whole,
)
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]
__all__ = ["always_loaded", "dirty", "faulty"]


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
    """The conversations with a kind, without a store; and other questions about their pictures, with the answers."""
    said = {}

    def talk(kind):
        if kind not in said:
            with start(path_of(kind)) as llm:
                said[kind] = converse(llm), others_of(llm)
        return said[kind]

    return talk


def others_of(llm):
    turns = [turn._replace(ids=[1, 60, *turn.ids[1:], 61]) for turn in openings(llm) if turn.pictures and not turn.salt]
    if turns:
        turns.append(Turn([1, 61, *placeholders_of(llm)[:1] * 2, 62], (3, 3)))
    return turns, ask(llm, turns) if turns else []


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
        ("qwen2_vl", "1EP1D", False),
        ("qwen3_5 with pictures", "1E1P1D", False),
    ],
)
def test_conversations_go_on_after_a_restart(path_of, said_of, tmp_path, always_loaded, kind, layout, native):
    """The third turn first, whose beginning only the store has: all whole blocks of the second turn and its answer.
    Pictures are not encoded again, also where other text precedes them."""
    (said, (others, about)), path = said_of(kind), path_of(kind)
    options = {"layout": layout, "native_kernels": native}
    with start(path, tmp_path, **options) as llm:
        for (_, answers), (_, wanted) in zip(converse(llm, 2), said):
            assert tokens(answers) == tokens(wanted)
        settle(llm)
        assert counts(llm)["n_skipped"] == 0
    with start(path, tmp_path, **options) as llm:
        for i in (2, 1, 0):
            turns, wanted = said[i]
            answers = ask(llm, turns)
            assert tokens(answers) == tokens(wanted)
            for one, before in zip(answers, said[i - 1][1]) if i else ():
                assert one.n_cached >= whole(before, one)
        assert not others or tokens(ask(llm, others)) == tokens(about)
        settle(llm)
        assert encoded(llm) == 0
        done = counts(llm)
        assert done["n_loaded"] > 40 and not (done["n_lost"] or done["n_failures"] or done["n_late"])
        stranger = ask(llm, [said[2][0][0]._replace(salt="a stranger")])[0]
        assert stranger.tokens == said[2][1][0].tokens and stranger.n_cached == 0


def test_two_servers_at_once_find_what_the_other_has_computed(path_of, said_of, tmp_path, always_loaded):
    path, (said, _) = path_of("llama"), said_of("llama")
    with start(path, tmp_path) as one, start(path, tmp_path, "1P1D") as other:
        for i, (turns, wanted) in enumerate(said):
            answers = ask(other if i % 2 else one, turns)
            assert tokens(answers) == tokens(wanted)
            for found, before in zip(answers, said[i - 1][1]) if i else ():
                assert found.n_cached >= whole(before, found)
            settle(one)
            settle(other)


# ---- bit by bit


LIKELY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5)


@pytest.mark.parametrize(
    ("kind", "native"), [("llama", True), ("gemma3", False), ("qwen3_5", True), ("lfm3", False), ("llava", True)]
)
def test_logits_behind_a_loaded_prefix_are_to_the_bit_those_behind_a_cached_one(
    path_of, tmp_path, always_loaded, kind, native
):
    path, options = path_of(kind), {"native_kernels": native, "drafts": "off"}
    with start(path, tmp_path / "store", **options) as llm:
        turns = openings(llm)
        firsts = [ask(llm, [turn])[0] for turn in turns]  # one by one: batches are then the same everywhere
        settle(llm)
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
        after = [follow(turn, said, 1, placeholders_of(llm)) for turn, said in zip(turns, firsts)]
        cached = [ask(llm, [turn], LIKELY)[0] for turn in after]
    with start(path, tmp_path / "copy", **options) as llm:
        loaded = [ask(llm, [turn], LIKELY)[0] for turn in after]
        assert counts(llm)["n_loaded"] > 20
    for one, other, first in zip(loaded, cached, firsts):
        assert one.n_cached == other.n_cached >= whole(first, one)
        assert one.tokens == other.tokens and one.logprobs == other.logprobs


# ---- what other bytes would come of


def changed(path, folder, tensor):
    """The same checkpoint with one other tensor."""
    shutil.copytree(path, folder)
    weights = load_file(folder / "model.safetensors")
    (name,) = (name for name in weights if name.endswith(tensor))
    weights[name] = weights[name] + 0.05 * torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(1))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def with_another_row(path, folder):
    """The same checkpoint with one other row in the token table: that of a token of all prompts, of which the samples
    of the table show nothing."""
    shutil.copytree(path, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][1] *= 2
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert fingerprint(folder) == fingerprint(path)
    return folder


def turned_otherwise(path, folder):
    """The same weights with another base of the angles by which keys are turned."""
    shutil.copytree(path, folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    return folder


OTHERS = {
    "a tensor": lambda path, folder: (changed(path, folder, "layers.0.self_attn.k_proj.weight"), {}),
    "a row": lambda path, folder: (with_another_row(path, folder), {}),
    "the configuration": lambda path, folder: (turned_otherwise(path, folder), {}),
    "the dtype": lambda path, _: (path, {"dtype": "bfloat16"}),
    "the blocks": lambda path, _: (path, {"block_tokens": 8}),
    "int8": lambda path, _: (path, {"quantization": "int8", "native_kernels": True}),
    "no prefixes": lambda path, _: (path, {"prefix_cache": False}),
}


@pytest.fixture(scope="module")
def filled(path_of, said_of, tmp_path_factory):
    """A folder with the blocks of the conversations with Llama."""
    folder = tmp_path_factory.mktemp("filled")
    with start(path_of("llama"), folder) as llm:
        converse(llm)
        settle(llm)
    return folder


@pytest.mark.parametrize("what", OTHERS)
def test_blocks_of_others_are_not_found(path_of, said_of, filled, tmp_path, always_loaded, what):
    path, options = OTHERS[what](path_of("llama"), tmp_path / "changed")
    turns = said_of("llama")[0][2][0]
    options["drafts"] = "off"
    with start(path, **options) as llm:
        wanted = [ask(llm, [turn])[0] for turn in turns]  # one by one: bfloat16 is not the same in other batches
    with start(path, shutil.copytree(filled, tmp_path / "store"), **options) as llm:
        answers = [ask(llm, [turn])[0] for turn in turns]
        settle(llm)
        assert counts(llm)["n_loaded"] == 0
    assert tokens(answers) == tokens(wanted)
    assert answers[2].n_cached == 0


def test_the_same_weights_elsewhere_are_the_same_model(path_of, said_of, filled, tmp_path, always_loaded):
    path, (turns, wanted) = shutil.copytree(path_of("llama"), tmp_path / "copy"), said_of("llama")[0][2]
    with start(path, shutil.copytree(filled, tmp_path / "store"), native_kernels=True, layout="1P1D") as llm:
        answers = ask(llm, turns)
    assert tokens(answers) == tokens(wanted) and min(one.n_cached for one in answers) > 20


def test_drafts_of_an_mtp_layer_need_the_states_of_that_layer(tmp_path, always_loaded, monkeypatch):
    """Those who guess with it keep more of a request than others, and find only their own."""
    path, folder = add_mtp(make_text(tmp_path / "model", "qwen3_5", seed=5)), tmp_path / "store"
    with start(path, drafts="off") as llm:
        said = converse(llm)
    monkeypatch.setattr(Worth, "guesses", lambda worth, lucks, most: 3)
    monkeypatch.setattr(Worth, "share", lambda worth, n_decodes, lucks, offers: list(offers))
    for i, drafts in enumerate(("off", "mtp", "mtp", "off")):
        with start(path, folder, drafts=drafts) as llm:
            turns, wanted = said[2 if i > 1 else 1]
            answers = ask(llm, turns)
            settle(llm)
            assert tokens(answers) == tokens(wanted)
            assert (counts(llm)["n_loaded"] > 0) == (i > 1)
            for one, before in zip(answers, said[1][1]) if i > 1 else ():
                assert one.n_cached >= whole(before, one) > 0
            assert drafts == "off" or sum(e.scheduler.drafts.counts["mtp"].n_tokens for e in engines(llm)) > 20


# ---- stores that fail


FAULTS = {
    "nothing": Faults(),
    "errors": Faults(error=0.3, full=0.2),
    "losses": Faults(lost=0.1, lie=0.1),
    "flips": Faults(flip=0.1),
    "slowness": Faults(slow=0.5, sleep_s=0.2),
    "everything": Faults(error=0.1, full=0.1, lost=0.05, lie=0.05, flip=0.05, slow=0.1, hang=0.02, hang_s=1.0),
}
SIGNS = {"nothing": "n_loaded", "errors": "n_failures", "losses": "n_lost", "flips": "n_corrupt", "slowness": "n_late"}


@pytest.mark.parametrize(
    ("what", "kind", "layout"),
    [
        ("nothing", "gemma3", "2EPD"),
        ("errors", "llava", "1EPD"),
        ("losses", "lfm3", "1P1D"),
        ("flips", "qwen3_5", "1EPD"),
        ("slowness", "llava", "1E1P1D"),
        ("everything", "qwen3_5", "2EPD"),
    ],
)
def test_a_store_that_fails_changes_nothing(
    path_of, said_of, tmp_path, always_loaded, faulty, dirty, caplog, what, kind, layout
):
    """The caches hold few requests, so that much is looked for in the store; some clients leave."""
    path, (said, _) = path_of(kind), said_of(kind)
    with start(path, tmp_path, layout, patient=False, **few(path, 1)) as llm:
        converse(llm)
        for store in faulty:
            store.faults = FAULTS[what]
        asyncio.run(crowd(llm, said, 40, seed=what))
        for store in faulty:
            store.faults = Faults()
            store.release()
        settle(llm)
        assert what not in SIGNS or counts(llm)[SIGNS[what]] > 0, counts(llm)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_folder_may_be_cleared_at_any_time(path_of, said_of, tmp_path, always_loaded, dirty, caplog):
    path, (said, _) = path_of("llama"), said_of("llama")
    with start(path, tmp_path, **few(path, 1)) as llm:
        converse(llm)
        with ThreadPoolExecutor(1) as thread:
            asking = thread.submit(asyncio.run, crowd(llm, said, 80, seed=1))
            while not asking.done():
                clear(tmp_path)
                time.sleep(0.3)
            asking.result()
        settle(llm)
        done = counts(llm)
        assert done["n_loaded"] > 0 and not (done["n_failures"] or done["n_corrupt"]), done
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert not list((tmp_path / "writing").glob("*"))


LONG = [Turn([1, 100 + i, *[9, 8, 7] * 18]) for i in range(8)]


@pytest.fixture(scope="module")
def long_ones(path_of, tmp_path_factory):
    """A folder with the blocks of long prompts of nothing in common, and the answers."""
    folder = tmp_path_factory.mktemp("long")
    with start(path_of("llama"), folder) as llm:
        answers = ask(llm, LONG)
        settle(llm)
    return folder, answers


@pytest.mark.parametrize(
    ("method", "layout"),
    [("has", "1EPD"), ("read", "1EPD"), ("read", "1P1D"), ("write", "1EPD"), ("touch", "1EPD")],
)
def test_nobody_waits_for_a_store_that_hangs(path_of, long_ones, tmp_path, always_loaded, faulty, method, layout):
    """The store hangs from the first call of this method on. All blocks come back, at the latest when calls end."""
    folder, wanted = long_ones
    with start(path_of("llama"), shutil.copytree(folder, tmp_path / "store"), layout, patient=False) as llm:
        for store in faulty:
            store.faults = Faults(hang=1.0, only=method)
        for turn, said in zip(LONG, wanted):
            (got,) = ask(llm, [turn])
            assert got.tokens == said.tokens and got.ttft_s < PATIENCE_S
            assert got.n_cached == 0 or method in ("write", "touch")
        assert any(store.n_hung for store in faulty)
        for store in faulty:
            store.release()
        settle(llm)


@pytest.mark.parametrize("at_once", [1, len(LONG)])
def test_reads_that_hang_leave_room_for_others(path_of, long_ones, tmp_path, always_loaded, faulty, at_once):
    """In caches for four requests at a time. Whether blocks are there, the store still says, so that it is tried again
    and again."""
    folder, wanted = long_ones
    path = path_of("llama")
    with start(path, shutil.copytree(folder, tmp_path / "store"), patient=False, **few(path, 1.5)) as llm:
        faulty[0].faults = Faults(hang=1.0, only="read")
        for i in range(0, len(LONG), at_once):
            answers = asyncio.run(asyncio.wait_for(ask_all(llm, LONG[i : i + at_once]), PATIENCE_S))
            assert tokens(answers) == tokens(wanted[i : i + at_once])
        faulty[0].release()
        settle(llm)


def test_loads_that_wait_for_others_are_no_failure(path_of, long_ones, tmp_path, always_loaded, faulty):
    """Together they take much longer than one may."""
    folder, wanted = long_ones
    with start(path_of("llama"), shutil.copytree(folder, tmp_path / "store")) as llm:
        (engine,) = engines(llm)
        engine.scheduler.fetching.least_s = 0.3
        faulty[0].faults = Faults(slow=1.0, sleep_s=0.2, only="read")
        assert tokens(ask(llm, LONG)) == tokens(wanted)
        settle(llm)
        done = counts(llm)
        assert done["n_loaded"] > 80 and done["n_late"] == done["n_failures"] == 0
