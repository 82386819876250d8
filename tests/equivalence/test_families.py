"""Every supported family against transformers, end to end: messages and photographs in, token ids out, by layout.

A family is one entry of `FAMILIES`, or a sample in `tests/families`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import transformers

from hydrainfer import LLM, SamplingParams
from tests.checkpoints_next import make_llava_next
from tests.checkpoints_text import make_text
from tests.equivalence.criterion import Tally
from tests.equivalence.mixed import settled_stats
from tests.equivalence.oracle import drafts_of, key
from tests.equivalence.reference import Reference, TextReference
from tests.families.chats import IN_ORDER, PICTURES, TEXTS
from tests.families.sample import SEEING, SPEAKING, Sample, samples
from tests.parts import parts

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]

N_NEW = 16
WHOLE = {"token_budget": 4096, "image_budget": 8}  # pictures of several requests in one forward
CHUNKED = {"token_budget": 24, "block_tokens": 4, "image_budget": 2}  # cuts every picture's span
DRAFTED = {"token_budget": 99, "native_kernels": True, "drafts": "oracle"}  # seven of ten drafts are right
COMPILED = {"token_budget": 40, "native_kernels": True}  # windows in our kernels, pictures' spans beside them
next_reference = partial(
    Reference, processor=transformers.LlavaNextProcessor, model=transformers.LlavaNextForConditionalGeneration
)
SLIDING = {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}
FAMILIES = {
    "llava-next, mistral": Sample(
        partial(make_llava_next, text="mistral", template=IN_ORDER), next_reference, TEXTS | PICTURES, SEEING
    ),
    "llava-next, llama": Sample(
        partial(make_llava_next, text="llama", seed=1, template=IN_ORDER, published_names=False),
        next_reference,
        TEXTS | PICTURES,
        ("1EPD", "1E1P1D"),
    ),
    "llama": Sample(partial(make_text, kind="llama", seed=2), TextReference, TEXTS, SPEAKING),
    "mistral": Sample(partial(make_text, kind="mistral", seed=3, shards=3), TextReference, TEXTS, SPEAKING),
    "gemma3, text": Sample(partial(make_text, kind="gemma3", seed=8), TextReference, TEXTS, (*SPEAKING, "1ED1P")),
    "mistral, window": Sample(
        partial(make_text, kind="mistral", seed=6, sliding_window=19), TextReference, TEXTS, SPEAKING
    ),
    "qwen2, window": Sample(
        partial(make_text, kind="qwen2", seed=7, sliding_window=13, **SLIDING), TextReference, TEXTS, SPEAKING
    ),
    "qwen3-next": Sample(partial(make_text, kind="qwen3_next", seed=16), TextReference, TEXTS, (*SPEAKING, "1ED1P")),
    "qwen3.5, text": Sample(partial(make_text, kind="qwen3_5", seed=17), TextReference, TEXTS, SPEAKING),
    "lfm2": Sample(partial(make_text, kind="lfm2", seed=9), TextReference, TEXTS, (*SPEAKING, "1ED1P")),
    "lfm3": Sample(partial(make_text, kind="lfm3", seed=10), TextReference, TEXTS, (*SPEAKING, "1ED1P")),
    "lfm3, another seed": Sample(
        partial(make_text, kind="lfm3", seed=11, shards=3, tie_word_embeddings=True), TextReference, TEXTS, SPEAKING
    ),
    "gpt-oss": Sample(partial(make_text, kind="gpt_oss", seed=9), TextReference, TEXTS, (*SPEAKING, "1ED1P")),
    "gpt-oss, another seed": Sample(
        partial(make_text, kind="gpt_oss", seed=10, num_key_value_heads=4), TextReference, TEXTS, SPEAKING
    ),
    "mimo": Sample(partial(make_text, kind="mimo", seed=11), TextReference, TEXTS, (*SPEAKING, "1ED1P")),
    "mimo, another seed": Sample(
        partial(make_text, kind="mimo", seed=16, shards=3, n_group=1, topk_group=1), TextReference, TEXTS, SPEAKING
    ),
    "mixtral": Sample(partial(make_text, kind="mixtral", seed=13), TextReference, TEXTS, SPEAKING),
    "qwen2-moe": Sample(partial(make_text, kind="qwen2_moe", seed=14), TextReference, TEXTS, SPEAKING),
    "qwen3-moe": Sample(partial(make_text, kind="qwen3_moe", seed=15), TextReference, TEXTS, SPEAKING),
    "qwen2": Sample(partial(make_text, kind="qwen2", seed=4), TextReference, TEXTS, SPEAKING),
    "qwen3": Sample(partial(make_text, kind="qwen3", seed=5), TextReference, TEXTS, (*SPEAKING, "1ED1P")),
    **samples(),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """`cases(family)` → (checkpoint, chats → what transformers says), made once."""
    made: dict[str, tuple[Path, dict[str, tuple]]] = {}

    def get(name: str) -> tuple[Path, dict[str, tuple]]:
        if name not in made:
            family = FAMILIES[name]
            path = family.make(tmp_path_factory.mktemp("family"))
            reference = family.reference(path)
            made[name] = path, {chat: reference.greedy(content, N_NEW) for chat, content in family.chats.items()}
        return made[name]

    return get


@pytest.fixture(scope="module")
def tally():
    kept = Tally()
    yield kept
    kept.check()


@pytest.mark.parametrize(
    ("family", "layout", "budgets"),
    [
        *((name, layout, "chunked") for name, family in FAMILIES.items() for layout in family.layouts),
        *((name, "1EPD", way) for name in FAMILIES for way in ("whole", "drafted")),
        *(
            (name, "1EPD", "compiled")
            for name in FAMILIES
            if FAMILIES[name].compiled or any(w in name for w in ("gemma", "window", "gpt", "mimo", "lfm3"))
        ),
    ],
)
def test_tokens_are_those_of_transformers(cases, tally, family, layout, budgets, monkeypatch):
    path, wanted = cases(family)
    ways = {"chunked": CHUNKED, "whole": WHOLE, "compiled": COMPILED, "drafted": DRAFTED}
    options = {"native_kernels": False, "image_backend": "pillow"} | ways[budgets]
    greedy = SamplingParams(temperature=0.0, max_tokens=N_NEW)
    answers = {key(prompt_ids, greedy, 0): ids for prompt_ids, ids, _ in wanted.values()}
    with (
        drafts_of(monkeypatch, answers, 0.7),
        LLM(path, layout=layout, launcher="inproc", threads=1, **options) as llm,
    ):
        outputs = llm.chat(list(FAMILIES[family].chats.values()), greedy, use_tqdm=False)
        for (name, (prompt_ids, ids, gaps)), out in zip(wanted.items(), outputs):
            assert list(out.prompt_token_ids) == prompt_ids, name
            tally.add(f"{family}/{layout}/{budgets}/{name}", list(out.outputs[0].token_ids), ids, gaps)
        for pool in parts(llm).pools().values():
            pool.check(idle=True)
        assert budgets != "drafted" or settled_stats(llm).drafts["oracle"].n_accepted > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_vary(cases, family):
    """Else equality would say little: answers differ from chat to chat, and are no single token over and over."""
    answers = [ids for _, ids, _ in cases(family)[1].values()]
    assert len(set(map(tuple, answers))) == len(answers)
    assert all(len(set(ids)) > 3 or len(ids) < 6 for ids in answers)
