"""Draft models: what they guess is their own answer to what is there, and no answer of the model changes."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers

from hydrainfer import LLM, SamplingParams
from hydrainfer.core import ConfigError
from hydrainfer.runtime.guessing import CopyGuesser, DraftModel, beside
from hydrainfer.scheduler import Worth
from tests.checkpoints_qwen import make_qwen
from tests.checkpoints_text import make_text
from tests.equivalence.mixed import settled_stats
from tests.families.chats import PICTURES
from tests.parts import parts

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]

PROMPTS = ("one two three four five six seven eight nine ten " * 3, "Name a colour.", "x", "A B C D " * 11)
OPTIONS = {"threads": 1, "block_tokens": 4, "launcher": "inproc"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PARAMS = [GREEDY, SamplingParams(temperature=0.8, seed=3, max_tokens=24, n=2), GREEDY, GREEDY]


@pytest.fixture
def always(monkeypatch):
    """Three guesses are made behind each token, and all are verified."""
    monkeypatch.setattr(Worth, "guesses", lambda worth, lucks, most: 3)
    monkeypatch.setattr(Worth, "share", lambda worth, n_decodes, lucks, offers: list(offers))


def answers(outs) -> list[list[list[int]]]:
    return [[list(one.token_ids) for one in out.outputs] for out in outs]


def check_pools(llm) -> None:
    for pool in parts(llm).pools().values():
        pool.check(idle=True)


@pytest.mark.parametrize(
    ("kind", "draft", "native", "layout", "budget"),
    [
        ("llama", "llama", True, "1EPD", 512),
        ("llama", "llama", False, "1P1D", 9),  # what it lacks of a prompt is read in pieces
        ("gemma3", "gemma3", False, "1EPD", 9),  # layers with a window
        ("qwen3_5", "qwen3", True, "1EPD", 512),  # a model with states, a draft model without
    ],
)
def test_the_guesses_are_the_draft_models_own_answers(
    tmp_path, always, monkeypatch, kind, draft, native, layout, budget
):
    model, smaller = make_text(tmp_path / "model", kind, seed=5), make_text(tmp_path / "draft", draft, seed=6)
    options = OPTIONS | {"layout": layout, "native_kernels": native, "token_budget": budget}
    with LLM(model, drafts="off", **options) as llm:
        plain = llm.generate(list(PROMPTS), PARAMS, use_tqdm=False)
    found: list[tuple[list[int], tuple[int, ...]]] = []
    guess = DraftModel.guess

    def watched(drafter, work, ahead, passed, sampled, n):
        guesses = guess(drafter, work, ahead, passed, sampled, n)
        found.extend((ahead[item].fed[: 1 - len(made) or None], made) for item, made in guesses.items())
        return guesses

    monkeypatch.setattr(DraftModel, "guess", watched)
    with LLM(model, drafts="model", draft_model=str(smaller), **options) as llm:
        for _ in range(2):
            assert answers(llm.generate(list(PROMPTS), PARAMS, use_tqdm=False)) == answers(plain)
        assert settled_stats(llm).drafts["model"].n_tokens > 20
        check_pools(llm)
    reference = transformers.AutoModelForCausalLM.from_pretrained(smaller, dtype=torch.float32).eval()
    assert len(found) > 30
    for text, made in found[::7]:
        with torch.inference_mode():
            logits = reference(torch.tensor([[*text, *made[:-1]]])).logits[0, len(text) - 1 :]
        best = logits.max(-1).values
        assert (best - logits[range(len(made)), list(made)]).max() < 1e-3


@pytest.mark.parametrize(("n_blocks", "budget"), [(400, 512), (40, 12)])
def test_a_draft_model_that_is_the_model_is_always_right(tmp_path, always, monkeypatch, n_blocks, budget):
    """Also where its caches are so small that sequences give way to each other."""
    model = make_text(tmp_path / "model", "llama", seed=5)
    init, drafters = DraftModel.__init__, list[DraftModel]()
    monkeypatch.setattr(beside, "_KEPT", 1)

    def small(drafter, *args):
        init(drafter, *args)
        del drafter._free[n_blocks:]
        drafters.append(drafter)

    monkeypatch.setattr(DraftModel, "__init__", small)
    with LLM(model, drafts="off", **OPTIONS) as llm:
        plain = llm.generate(list(PROMPTS), GREEDY, use_tqdm=False)
    with LLM(model, drafts="model", draft_model=str(model), token_budget=budget, **OPTIONS) as llm:
        assert answers(llm.generate(list(PROMPTS), GREEDY, use_tqdm=False)) == answers(plain)
        counts = settled_stats(llm).drafts["model"]
        assert counts.n_accepted == counts.n_tokens > 20
        for _ in range(8):  # sequences that have ended are forgotten
            llm.generate([PROMPTS[1]], GREEDY, use_tqdm=False)
        check_pools(llm)
    (drafter,) = drafters
    assert len(drafter._readers) <= 4 + 1
    blocks = [block for reader in drafter._readers.values() for block in reader.blocks] + drafter._free
    assert sorted(blocks) == list(range(n_blocks))


@pytest.mark.parametrize(("kind", "layout"), [("llama", "1EPD"), ("gemma3", "1P1D"), ("mixtral", "1EPD")])
def test_a_copy_in_8_bits_is_nearly_always_right(tmp_path, always, kind, layout):
    model = make_text(tmp_path / "model", kind, seed=5)
    with LLM(model, drafts="off", layout=layout, **OPTIONS) as llm:
        plain = llm.generate(list(PROMPTS), PARAMS, use_tqdm=False)
    with LLM(model, drafts="ngram,model", draft_model="self-int8", layout=layout, **OPTIONS) as llm:
        found = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt, params in zip(PROMPTS, PARAMS)]
        assert answers(found) == answers(plain)
        counts = settled_stats(llm).drafts["model"]
        assert counts.n_tokens > 40
        assert answers(llm.generate(list(PROMPTS), PARAMS, use_tqdm=False)) == answers(plain)
        check_pools(llm)


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D"])
@pytest.mark.parametrize("draft", ["self-int8", "a text model"])
def test_behind_pictures(tmp_path, always, layout, draft):
    """The copy reads the pictures in the model's cache; another model knows the text alone."""
    model = make_qwen("qwen2_5_vl", tmp_path / "seeing", seed=2)
    name = "self-int8"
    if draft != name:
        name = str(make_text(tmp_path / "text", "qwen2", seed=3))
        shutil.copy(model / "tokenizer.json", name)
    chats = [PICTURES["one"], PICTURES["several sizes"], PICTURES["turns"]]
    with LLM(model, drafts="off", layout=layout, **OPTIONS) as llm:
        plain = llm.chat(chats, GREEDY, use_tqdm=False)
    with LLM(model, drafts="model", draft_model=name, layout=layout, **OPTIONS) as llm:
        assert answers(llm.chat(chats, GREEDY, use_tqdm=False)) == answers(plain)
        counts = settled_stats(llm).drafts["model"]
        assert counts.n_tokens > 20
        assert draft != "self-int8" or counts.n_accepted > 0.5 * counts.n_tokens
        check_pools(llm)


@pytest.mark.parametrize("guesser", [DraftModel, CopyGuesser])
def test_an_error_of_the_draft_model_ends_no_request(tmp_path, always, monkeypatch, guesser):
    model = make_text(tmp_path / "model", "llama", seed=5)

    def fail(*_args):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(guesser, "guess", fail)
    with LLM(model, drafts="off", **OPTIONS) as llm:
        plain = llm.generate(list(PROMPTS), GREEDY, use_tqdm=False)
    name = str(model) if guesser is DraftModel else "self-int8"
    with LLM(model, drafts="model", draft_model=name, **OPTIONS) as llm:
        assert answers(llm.generate(list(PROMPTS), GREEDY, use_tqdm=False)) == answers(plain)
        counts = settled_stats(llm).drafts["model"]
        assert (counts.n_failures, counts.n_tokens) == (1, 0)
        check_pools(llm)


def test_what_a_draft_model_must_be(tmp_path):
    model, states = make_text(tmp_path / "llama", "llama"), make_text(tmp_path / "states", "qwen3_5")
    for options, wanted in (
        ({"drafts": "model"}, "needs --draft-model"),
        ({"drafts": "ngram", "draft_model": str(model)}, "leaves out"),
        ({"drafts": "off", "draft_model": str(model)}, "leaves out"),
        ({"drafts": "mtp,model", "draft_model": str(model)}, "no MTP layer"),
        ({"draft_model": str(states)}, "recurrent"),
        ({"draft_model": str(make_text(tmp_path / "other", "qwen3"))}, "another vocabulary: token 0"),
        ({"draft_model": str(tmp_path / "nothing")}, "no such directory"),
        ({"draft_model": "self-int8", "quantization": "int8"}, "8-bit weights itself"),
        ({"draft_model": "self-int8", "async_scheduling": True}, "leaves out"),
    ):
        with pytest.raises(ConfigError, match=wanted) as error:
            LLM(model, threads=1, launcher="inproc", **options)
        assert error.value.param in ("draft_model", "drafts")
    with pytest.raises(ConfigError, match="recurrent layers"):
        LLM(states, threads=1, launcher="inproc", draft_model="self-int8")
