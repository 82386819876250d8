"""Videos whose frames are single squares, of InternVL and LLaVA-OneVision: their embeddings, and prompts in chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hydrainfer import LLM, SamplingParams
from hydrainfer.core import Role
from hydrainfer.families.llava import FRAME, LAST_FRAME
from hydrainfer.models import load_model
from hydrainfer.models.picture import PatchedPicture
from hydrainfer.processor import PixelStore, Processor, parse_messages
from tests.equivalence.criterion import Tally
from tests.families.chats import SQUARE_VIDEOS, assistant, text, user, video
from tests.families.sample import samples
from tests.parts import parts
from tests.pillow import described

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]
SAMPLES = {name: samples()[name] for name in ("internvl", "llava-onevision")}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
LONG = [user(text("What happens:"), video(60, 9, 50, 90, 2.0), text("Say it."))]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {name: sample.make(tmp_path_factory.mktemp("family"), seed=9) for name, sample in SAMPLES.items()}


@pytest.mark.parametrize("name", SAMPLES)
def test_embeddings_of_frames_are_those_of_transformers(name, paths):
    """The reference computes in float64."""
    ours, theirs, store = (
        load_model(paths[name], Role.parse("E")),
        SAMPLES[name].reference(paths[name]),
        PixelStore(1 << 28),
    )
    theirs.model.double()
    processor = Processor(described(paths[name]), store, weights=b"", dtype="float32")
    for messages in (LONG, SQUARE_VIDEOS["video"], SQUARE_VIDEOS["one frame"], SQUARE_VIDEOS["videos"]):
        inputs = theirs.inputs(messages)
        with torch.inference_mode():
            if name == "internvl":
                want = theirs.model.get_image_features(pixel_values=inputs["pixel_values"].double()).pooler_output
            else:
                want = theirs.model.get_video_features(inputs["pixel_values_videos"].double()).pooler_output
            (request,) = processor.chat("r", parse_messages(messages, local=True), GREEDY).requests
            made = ours.encode([PatchedPicture(store.get(m.pixels), m.grid) for m in request.media])
        difference = float((torch.cat(made) - want.flatten(0, 1)).abs().max())
        print(f"{name}: {difference:.1e}")
        assert difference < 1e-5
        assert [len(rows) for rows in made] == [m.n_tokens for m in request.media]


@pytest.mark.parametrize(("name", "n_chunk"), [("internvl", 1), ("llava-onevision", 1), ("llava-onevision", 7)])
def test_turns_in_small_chunks_that_reuse_what_was_computed(name, n_chunk, paths):
    again = [assistant("It moves."), user(text("Then?"), video(40, 3, 60, 90, 1.0))]
    reference, tally, chat = SAMPLES[name].reference(paths[name]), Tally(), [*SQUARE_VIDEOS["video"], *again]
    options = {"threads": 1, "native_kernels": False, "image_backend": "pillow"}
    with LLM(paths[name], token_budget=n_chunk, block_tokens=4, **options) as llm:
        for n in (1, 3):
            prompt_ids, ids, gaps = reference.greedy(chat[:n], GREEDY.max_tokens)
            (out,) = llm.chat(chat[:n], GREEDY, use_tqdm=False)
            assert list(out.prompt_token_ids) == prompt_ids
            assert out.prompt.count("<video>") == (n + 1) // 2 * (name == "llava-onevision")
            tally.add(f"{name}/{n}", list(out.outputs[0].token_ids), ids, gaps)
        assert parts(llm).engine.stats().tokens_found > 20, "of the first turn"
    tally.check()


def test_only_whole_frames_reach_the_tower(paths):
    tower = load_model(paths["llava-onevision"], Role.parse("E")).vision

    def rows(shape, grid):
        return tower.rows(PatchedPicture(np.zeros(shape, np.uint8), grid))

    assert (rows((1, 42, 42, 3), FRAME), rows((1, 42, 42, 3), LAST_FRAME)) == (4, 5)
    for shape, grid in (((2, 42, 42, 3), FRAME), ((1, 42, 28, 3), FRAME), ((42, 42, 3), LAST_FRAME)):
        assert rows(shape, grid) is None
    assert rows((1, 42, 42, 3), (0, 0, 2)) is None
