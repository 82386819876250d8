"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, with experts and without, against transformers, end to end: photographs,
videos and messages in, tokens out.

Under budgets that chunk prompts through pictures and batch pictures of different sizes, and in every layout.
"""

from __future__ import annotations

import numpy as np
import pytest

from hydrainfer import LLM, SamplingParams
from tests.checkpoints import make_picture
from tests.checkpoints_qwen import FAMILIES, make_qwen
from tests.equivalence.criterion import Tally
from tests.equivalence.qwen_reference import Reference
from tests.equivalence.reference import photo
from tests.parts import parts

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(600)]

N_NEW = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=N_NEW)


def image(name, size=None):
    picture = photo(name).convert("RGB")
    return {"type": "image", "image": picture if size is None else picture.resize(size)}


def video(seed, n, height, width, fps):
    frames = np.stack([make_picture(seed + i, max(height, width))[:height, :width] for i in range(n)])
    return {"type": "video", "video": frames, "fps": fps}


def text(t):
    return {"type": "text", "text": t}


def user(*parts):
    return {"role": "user", "content": list(parts)}


CHATS = {
    "one": [user(image("astronaut.png"), text("What is in this picture?"))],
    "sizes": [
        user(text("Which is wide,"), image("rocket.jpg", (300, 40)), image("chelsea.png", (60, 210)), text("or tall?")),
        user(image("coffee.png", (30, 20)), text("Or this?")),
    ],
    "none": [user(text("Explain how a queue works, and why it is fair to those who wait."))],
    "turns": [
        user(image("coffee.png"), text("What is this?")),
        {"role": "assistant", "content": [text("A cup.")]},
        user(text("And"), image("camera.png"), text("?")),
    ],
    "video": [user(text("What happens:"), video(10, 6, 90, 130, 2.0), text("Say it."))],
    "mixed": [user(video(20, 5, 60, 60, 0.7), image("chelsea.png"), video(30, 2, 112, 56, 3.3), text("Compare."))],
}
ENGINES = {
    "whole prompts": {"token_budget": 4096},  # with our kernels
    "chunks of 7": {"native_kernels": False, "token_budget": 7, "image_budget": 2, "block_tokens": 4},
}
LAYOUTS = ["1EP1D", "1ED1P", "1E1P1D"]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    """(checkpoint, chats → what transformers says)."""
    tied, published = (
        request.param not in ("qwen2_5_vl", "qwen3_vl_moe"),
        request.param != "qwen2_vl" and "moe" not in request.param,
    )
    path = make_qwen(request.param, tmp_path_factory.mktemp("qwen"), 1, tied=tied, published=published, shards=2)
    reference = Reference(path)
    return path, {name: reference.greedy(chat, N_NEW) for name, chat in CHATS.items()}


@pytest.fixture(scope="module")
def tally():
    kept = Tally()
    yield kept
    kept.check()


def compare(outputs, wanted, label, tally):
    for (name, (prompt_ids, ids, gaps)), out in zip(wanted.items(), outputs, strict=True):
        assert list(out.prompt_token_ids) == prompt_ids, name
        tally.add(f"{label}/{name}", list(out.outputs[0].token_ids), ids, gaps)


def check_whole(llm):
    for pool in parts(llm).pools().values():
        pool.check(idle=True)
    parts(llm).intake.processor.pixels.check(idle=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_instance(case, engine, tally):
    path, wanted = case
    with LLM(path, threads=1, image_backend="pillow", **ENGINES[engine]) as llm:
        compare(llm.chat(list(CHATS.values()), GREEDY, use_tqdm=False), wanted, engine, tally)
        compare(llm.chat(CHATS["mixed"], GREEDY, use_tqdm=False), {"mixed": wanted["mixed"]}, "cached", tally)
        (other,) = llm.chat([user(image("coffee.png"), *CHATS["one"][0]["content"][1:])], GREEDY, use_tqdm=False)
        assert list(other.outputs[0].token_ids) != wanted["one"][1], "answers depend on the picture"
        check_whole(llm)
    assert len({tuple(ids) for _, ids, _ in wanted.values()}) == len(wanted), "answers depend on the question"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(case, layout, tally):
    """Embeddings with their further levels, and positions, survive migration."""
    path, wanted = case
    options = {"token_budget": 32, "block_tokens": 4, "threads": 1, "native_kernels": False, "image_backend": "pillow"}
    with LLM(path, layout=layout, launcher="inproc", **options) as llm:
        compare(llm.chat(list(CHATS.values()), GREEDY, use_tqdm=False), wanted, layout, tally)


@pytest.mark.parametrize("n_asked", [2, 40], ids=["answers-ahead", "answers-behind"])
@pytest.mark.parametrize("family", ["qwen2_5_vl"])
def test_turns_after_a_video_are_those_without_reuse(family, n_asked, tmp_path):
    """An answer's positions count on from the video's last frame, unless the question reaches beyond it: only then are
    they those that the next prompt gives it."""
    path = make_qwen(family, tmp_path, 1)
    said, found = {}, {}
    for reuse in (True, False):
        with LLM(path, threads=1, prefix_cache=reuse, token_budget=64, block_tokens=4, native_kernels=False) as llm:
            images = parts(llm).intake.processor.model.images
            placeholder = images.video.token_id
            ids, said[reuse] = [5, placeholder, *range(20, 20 + n_asked)], []
            shown = {"video": [(video(10, 12, 60, 60, 0.5)["video"], {"fps": 0.5})]}
            for turn in range(3):
                prompt = {"prompt_token_ids": ids, "multi_modal_data": shown}
                (out,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
                found[turn, reuse] = len(out.prompt_token_ids), parts(llm).engine.stats().tokens_found
                answer = [9 if t in (placeholder, images.token_id) else t for t in out.outputs[0].token_ids]
                said[reuse].append(answer)
                ids = [*ids, *answer, 30 + turn, 31, 32]
            check_whole(llm)
    assert said[True] == said[False]
    for turn in (1, 2):
        (n_before, found_before), n_found = found[turn - 1, True], found[turn, True][1]
        assert n_found - found_before == (n_before if n_asked == 2 else n_before + 15) // 4 * 4
