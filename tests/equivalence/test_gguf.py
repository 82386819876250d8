"""Models from GGUF files against transformers on the checkpoints that they were made from, end to end, by layout.

Whole numbers are the checkpoint's own; of quantised ones, the checkpoint has what comes back from them.
"""

from __future__ import annotations

from functools import partial

import pytest

from hydrainfer import LLM, SamplingParams
from tests.caches import take_own_cache
from tests.checkpoints import make_llava
from tests.checkpoints_text import make_text
from tests.equivalence.criterion import Tally
from tests.equivalence.reference import Reference, TextReference
from tests.equivalence.test_families import CHUNKED
from tests.families.chats import PICTURES, TEXTS, image, text, user
from tests.gguf_files import AS_PUBLISHED, quantised, spell_as_published, write_text, write_vision
from tests.parts import parts

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]

N_NEW = 16
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FILES = {
    "llama": (partial(make_text, kind="llama", seed=2), "F32"),
    "llama, F16": (partial(make_text, kind="llama", seed=2), "F16"),
    "llama, Q8_0": (partial(make_text, kind="llama", seed=2), "Q8_0"),
    "llama 3": (partial(make_text, kind="llama", seed=9, rope_parameters=LLAMA3, tie_word_embeddings=True), "F32"),
    "mistral, window": (partial(make_text, kind="mistral", seed=6, sliding_window=19), "F32"),
    "qwen2": (partial(make_text, kind="qwen2", seed=4), "F32"),
    "qwen2, Q4_1": (partial(make_text, kind="qwen2", seed=4), "Q4_1"),
    "qwen3, Q5_0": (partial(make_text, kind="qwen3", seed=5), "Q5_0"),
    "gemma3": (partial(make_text, kind="gemma3", seed=8, **AS_PUBLISHED), "F32"),
    "gemma3, BF16": (partial(make_text, kind="gemma3", seed=8, **AS_PUBLISHED), "BF16"),
}
OPTIONS = CHUNKED | {"launcher": "inproc", "threads": 1, "dtype": "float32", "image_backend": "pillow"}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        take_own_cache(patch, tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="module")
def tally():
    kept = Tally()
    yield kept
    kept.check()


def agrees(path, layouts, chats, wanted, tally, **options):
    greedy = SamplingParams(temperature=0.0, max_tokens=N_NEW)
    for layout in layouts:
        with LLM(path, layout=layout, **OPTIONS, **options) as llm:
            outputs = llm.chat(list(chats.values()), greedy, use_tqdm=False)
            for (name, (prompt_ids, ids, gaps)), out in zip(wanted.items(), outputs):
                assert list(out.prompt_token_ids) == prompt_ids, name
                tally.add(f"{path.name}/{layout}/{name}", list(out.outputs[0].token_ids), ids, gaps)
            for pool in parts(llm).pools().values():
                pool.check(idle=True)


@pytest.mark.parametrize("name", FILES)
def test_tokens_are_those_of_transformers(name, tmp_path, tally):
    make, kind = FILES[name]
    checkpoint = spell_as_published(make(tmp_path / "checkpoint"))
    file = write_text(checkpoint, tmp_path / "model.gguf", kind)
    same = checkpoint if kind == "F32" else quantised(checkpoint, tmp_path / "same", kind)
    reference = TextReference(same)
    wanted = {chat: reference.greedy(content, N_NEW) for chat, content in TEXTS.items()}
    agrees(file, ("1EPD", "1P1D") if kind == "F32" else ("1EPD",), TEXTS, wanted, tally)


@pytest.mark.parametrize("swapped", [True, False], ids=["as before", "as now"])
def test_pictures_are_seen_by_a_file_of_their_own(swapped, tmp_path, tally):
    checkpoint = spell_as_published(make_llava(tmp_path / "checkpoint", seed=3))
    file = write_text(checkpoint, tmp_path / "model.gguf")
    vision = write_vision(checkpoint, tmp_path / "mmproj.gguf", swapped)
    chats = PICTURES | {"text": TEXTS["text"], "two": [user(image(0), image(2), text("Which is older?"))]}
    reference = Reference(checkpoint)
    wanted = {chat: reference.greedy(content, N_NEW) for chat, content in chats.items()}
    agrees(file, ("1EPD", "1E1P1D") if swapped else ("1EPD",), chats, wanted, tally, mmproj=str(vision))
