"""Published weights: greedy ids equal those of transformers, which reads the same file, by layout; and good sense."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import transformers

from hydrainfer import LLM, SamplingParams
from tests.caches import take_own_cache
from tests.equivalence.criterion import Tally
from tests.parts import parts
from tests.real.published import PUBLISHED, find

pytestmark = [pytest.mark.real, pytest.mark.cpu, pytest.mark.timeout(900)]
N_NEW = 48


@pytest.fixture(scope="module", params=PUBLISHED)
def published(request, tmp_path_factory):
    """(name, file)."""
    file = find(request.param)
    with pytest.MonkeyPatch.context() as patch:
        take_own_cache(patch, tmp_path_factory.mktemp("cache"))
        yield request.param, file


@pytest.fixture(scope="module")
def reference(published):
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate, with which transformers reads GGUF, is not installed; make test-real does so")
    folder, file = str(published[1].parent), published[1].name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)


@torch.inference_mode()
def greedy(model, prompt, eos_ids):
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    how = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, "eos_token_id": list(eos_ids)}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=N_NEW, **how)
    best = torch.cat(out.logits).float().topk(2, dim=-1).values
    return out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


def test_tokens_are_those_of_transformers(published, reference):
    """Prompts are ours: where transformers 5.23 knows a file's tokenizer only roughly, its own would differ."""
    name, file = published
    asks, sampling, tally = PUBLISHED[name].asks, SamplingParams(temperature=0.0, max_tokens=N_NEW), Tally()
    model, _ = reference
    wanted = {}
    for layout in ("1EPD", "1P1D"):
        with LLM(file, layout=layout, launcher="inproc", dtype="float32", max_model_len=2048) as llm:
            eos_ids = parts(llm).intake.processor.model.eos_ids
            outputs = llm.chat([chat for chat, _ in asks.values()], sampling, use_tqdm=False)
            for (case, (_, word)), out in zip(asks.items(), outputs):
                if case not in wanted:
                    wanted[case] = greedy(model, out.prompt_token_ids, eos_ids)
                ids, gaps = wanted[case]
                tally.add(f"{layout}/{case}", list(out.outputs[0].token_ids), ids, gaps)
                assert word in out.outputs[0].text, f"{layout}/{case}: {out.outputs[0].text!r}"
            for pool in parts(llm).pools().values():
                pool.check(idle=True)
    tally.check()


def test_the_tokenizer_is_that_of_transformers_but_for_digits(published, reference):
    _, file = published
    theirs = reference[1]
    with LLM(file, max_model_len=512, dtype="float32") as llm:
        ours = parts(llm).intake.processor.model.tokenizer
        for text in ("Hello world, isn't it?", "  spaces\n\n\tand tabs ", "Grüße, 色, \U0001f600", "f(x) = [a, b]; //"):
            assert ours.encode(text).ids == theirs(text)["input_ids"], text
            assert ours.decode(ours.encode(text).ids) == text


def test_in_eight_bits_it_knows_the_same(published):
    name, file = published
    asks = PUBLISHED[name].asks
    with LLM(file, dtype="float32", quantization="int8", max_model_len=2048) as llm:
        outputs = llm.chat(
            [chat for chat, _ in asks.values()], SamplingParams(temperature=0.0, max_tokens=N_NEW), use_tqdm=False
        )
    for (_, word), out in zip(asks.values(), outputs):
        assert word in out.outputs[0].text
