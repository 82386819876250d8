"""MTP layers against transformers' own, behind all that the decoder computes; and answers, which they do not change."""

from __future__ import annotations

import pytest
import torch

from hydrainfer import LLM, SamplingParams
from hydrainfer.core import CheckpointError, ConfigError
from hydrainfer.models import Model
from hydrainfer.scheduler import Worth
from hydrainfer.scheduler.drafting import BroughtDrafter, Guess
from tests.checkpoints_mtp import MtpReference, add_mtp
from tests.checkpoints_qwen import make_qwen
from tests.checkpoints_text import make_text
from tests.equivalence.mixed import settled_stats
from tests.equivalence.qwen_reference import Reference
from tests.families.chats import PICTURES
from tests.parts import parts

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]

KINDS = ("qwen3_5", "qwen3_next", "mimo")
PROMPTS = ("one two three four five six seven eight nine ten " * 3, "Name a colour.", "x", "A B C D " * 11)
OPTIONS = {"threads": 1, "native_kernels": False, "block_tokens": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    return add_mtp(make_text(tmp_path_factory.mktemp("mtp") / request.param, request.param, seed=5))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return add_mtp(make_qwen("qwen3_5", tmp_path_factory.mktemp("mtp") / "seeing", seed=2))


@pytest.fixture
def guessed(monkeypatch):
    """The logits that the layer guesses first from, by the position of the row; three guesses are always made."""
    found: dict[int, torch.Tensor] = {}
    guess = Model.guess

    def watched(model, hidden, embedded, positions, cache, last):
        out = guess(model, hidden, embedded, positions, cache, last)
        if last is not None and len(last.rows):
            row = positions[last.rows].tolist() if positions.dim() == 1 else last.batches[0].contexts
            found.update(zip(row, model.logits(out)))
        return out

    monkeypatch.setattr(Model, "guess", watched)
    monkeypatch.setattr(Worth, "guesses", lambda worth, lucks, most: 3)
    monkeypatch.setattr(Worth, "share", lambda worth, n_decodes, lucks, offers: list(offers))
    return found


@pytest.mark.parametrize(("budget", "native"), [(512, False), (9, False), (9, True)])
@pytest.mark.parametrize("mostly_right", [False, True])
def test_guesses_are_those_of_transformers_behind_chunks_decodes_and_drafts(
    checkpoint, guessed, budget, native, mostly_right, monkeypatch
):
    """The guesses themselves are seldom right. `mostly_right`: drafts come from the answer instead, and are."""
    reference, options = MtpReference(checkpoint), OPTIONS | {"token_budget": budget, "native_kernels": native}
    prompt = PROMPTS[0]
    with LLM(checkpoint, layout="1EPD", launcher="inproc", drafts="off", **options) as llm:
        plain = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
    answer, n_prompt = list(plain.outputs[0].token_ids), len(plain.prompt_token_ids)
    if mostly_right:

        def mixed(drafter, seq, n):
            tokens = answer[seq.n_produced : seq.n_produced + min(n, 3)]
            return Guess([t if (seq.n_produced + i) % 4 else 7 for i, t in enumerate(tokens)])

        monkeypatch.setattr(BroughtDrafter, "guess", mixed)
    with LLM(checkpoint, layout="1EPD", launcher="inproc", drafts="mtp", **options) as llm:
        out = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        counts = settled_stats(llm).drafts["mtp"]
        for pool in parts(llm).pools().values():
            pool.check(idle=True)
    assert list(out.outputs[0].token_ids) == answer
    assert counts.n_tokens > 10
    assert not mostly_right or counts.n_accepted > 6
    ids = [*plain.prompt_token_ids, *answer]
    wanted = reference.guesses(ids)
    rows = [row for row in guessed if row < len(wanted)]
    assert rows[0] == n_prompt - 1
    assert len(rows) > 5
    for row in rows:
        assert (guessed[row] - wanted[row]).abs().max() < 1e-4, row


@pytest.mark.parametrize(("layout", "budget"), [("1EPD", 512), ("1EPD", 9), ("1E1P1D", 40)])
def test_guesses_behind_pictures(seeing, guessed, layout, budget):
    """In chunks that cut a picture, its next row is not at hand for the last row of a chunk. In 1E1P1D the first guess
    is made where the prompt was computed, and used by nobody."""
    reference, chats = Reference(seeing), [PICTURES["one"], PICTURES["several sizes"]]
    options = OPTIONS | {"layout": layout, "launcher": "inproc", "token_budget": budget, "image_backend": "pillow"}
    with LLM(seeing, drafts="off", **options) as llm:
        plain = llm.chat(chats, GREEDY, use_tqdm=False)
    with LLM(seeing, drafts="mtp", **options) as llm:
        for chat, one in zip(chats, plain, strict=True):
            guessed.clear()
            out = llm.chat([chat], GREEDY, use_tqdm=False)[0]
            assert out.outputs[0].token_ids == one.outputs[0].token_ids
            ids = [*one.prompt_token_ids, *one.outputs[0].token_ids]
            wanted = MtpReference(seeing).guesses_of(reference.inputs(chat), ids)
            rows = [row for row in guessed if row < len(wanted)]
            assert len(rows) > 5
            for row in rows if budget == 512 else ():
                assert (guessed[row] - wanted[row]).abs().max() < 1e-4, row
        for pool in parts(llm).pools().values():
            pool.check(idle=True)


@pytest.mark.parametrize("layout", ["1EPD", "1P1D"])
def test_answers_are_the_same_with_mtp_wherever_it_guesses(checkpoint, layout, monkeypatch):
    params = [GREEDY, SamplingParams(temperature=0.8, seed=3, max_tokens=24, n=2), GREEDY, GREEDY]
    with LLM(checkpoint, layout="1EPD", launcher="inproc", drafts="off", **OPTIONS) as llm:
        plain = llm.generate(list(PROMPTS), params, use_tqdm=False)
    monkeypatch.setattr(Worth, "guesses", lambda worth, lucks, most: 3)
    monkeypatch.setattr(Worth, "share", lambda worth, n_decodes, lucks, offers: list(offers))
    with LLM(checkpoint, layout=layout, launcher="inproc", drafts="ngram,mtp", **OPTIONS) as llm:
        for _ in range(2):  # the second time prompts are found
            drafted = llm.generate(list(PROMPTS), params, use_tqdm=False)
            for one, other in zip(plain, drafted, strict=True):
                assert [list(o.token_ids) for o in one.outputs] == [list(o.token_ids) for o in other.outputs]
        assert settled_stats(llm).drafts["mtp"].n_tokens > 20
        for pool in parts(llm).pools().values():
            pool.check(idle=True)


def test_mtp_must_be_there(tmp_path):
    llama = make_text(tmp_path / "llama", "llama")
    with pytest.raises(ConfigError, match="no MTP layer"):
        LLM(llama, launcher="inproc", drafts="mtp", threads=1)
    bare = make_text(tmp_path / "qwen", "qwen3_5")
    with pytest.raises(CheckpointError, match="tensors are missing, first mtp"):
        LLM(bare, launcher="inproc", drafts="mtp", threads=1)
