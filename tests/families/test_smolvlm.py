"""What SmolVLM2 has that others lack: videos whose placeholder is no token."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from hydrainfer import LLM, SamplingParams
from hydrainfer.core import InvalidRequest
from hydrainfer.families import read_config
from hydrainfer.processor import ChatOptions, PixelStore, Processor, load_description, parse_messages
from tests.checkpoints_smolvlm import AROUND, IMAGE, TEMPLATE, WHOLE, make_smolvlm
from tests.equivalence.criterion import Tally
from tests.families.chats import image, text, user
from tests.families.smolvlm import VIDEO, VIDEOS, SmolReference, video
from tests.families.test_glm4v import movie
from tests.pillow import described

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
OPTIONS = {"threads": 1, "native_kernels": False, "image_backend": "pillow"}
NO_VIDEOS = "this model takes no videos; send pictures"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_smolvlm(tmp_path_factory.mktemp("smolvlm"), seed=6)


@pytest.fixture(scope="module")
def changed(path, tmp_path_factory):
    """`changed(file, **fields)`: a copy of the checkpoint with these fields in a file of JSON."""

    def copy(file, **fields):
        folder = tmp_path_factory.mktemp("changed") / "checkpoint"
        shutil.copytree(path, folder)
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | fields))
        return folder

    return copy


def request_of(path, *parts, **options):
    """A prepared request, and its processor."""
    processor = Processor(described(path), PixelStore(1 << 28), weights=b"", dtype="float32")
    messages = parse_messages([user(*parts)], local=True)
    return processor.chat("r", messages, GREEDY, options=ChatOptions(media=options)).requests[0], processor


@pytest.mark.parametrize("n_chunk", [1, 7])
def test_turns_in_small_chunks_that_reuse_what_was_computed(n_chunk, path):
    again = [{"role": "assistant", "content": [text("It moves.")]}, user(text("Then?"), video(50, 2, 60, 90, 1.0))]
    chat, reference, tally = [*VIDEOS["video"], *again], SmolReference(path), Tally()
    with LLM(path, token_budget=n_chunk, block_tokens=4, **OPTIONS) as llm:
        for n in (1, 3):
            prompt_ids, ids, gaps = reference.greedy(chat[:n], GREEDY.max_tokens)
            (out,) = llm.chat(chat[:n], GREEDY, use_tqdm=False)
            assert list(out.prompt_token_ids) == prompt_ids
            tally.add(f"{n_chunk}/{n}", list(out.outputs[0].token_ids), ids, gaps)
    tally.check()


@pytest.mark.parametrize(
    ("options", "taken", "number"),
    [({}, [0, 5, 11], "three"), ({"fps": 2}, [0, 2, 4, 6, 8, 11], "six"), ({"num_frames": 1}, [0], "one")],
)
def test_one_sampler_decides_the_prompt_and_the_pixels(options, taken, number, path):
    """The file has 12 frames in 3 s, and each is as bright as its number says."""
    request, processor = request_of(path, {"type": "video", "video": movie(12, 4)}, **options)
    shown = processor.model.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)
    frames = [f"\nFrame from 00:{i // 4:02d}:{AROUND}{WHOLE}{IMAGE * 4}{AROUND}" for i in taken]
    intro = f"You are provided the following series of {number} frames from a 0:00:03 [H:MM:SS] video.\n"
    assert f"User: {intro}{''.join(frames)}\n\n<end_of_utterance>" in shown
    found = [processor.pixels.get(m.pixels).mean() / 20 for m in request.media]
    assert np.round(found).astype(int).tolist() == taken


def test_a_template_that_shows_videos_itself_makes_the_same_prompt(path, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(path, own)
    shows = TEMPLATE.replace("{% endif %}{% endfor %}", f"{{% else %}}{VIDEO}{{% endif %}}{{% endfor %}}", 1)
    (own / "chat_template.jinja").write_text(shows)
    parts = VIDEOS["videos"][0]["content"]
    assert shows != TEMPLATE and request_of(own, *parts)[0].prompt_ids == request_of(path, *parts)[0].prompt_ids


def test_a_prompt_that_the_caller_wrote_has_a_placeholder_for_each_video(path):
    parts = [video(20, 2, 60, 60, 1.0), image(4)]
    messages = parse_messages([user(*parts)], local=True)
    written = f"<|im_start|>User: {VIDEO}{IMAGE}<end_of_utterance>\nAssistant:"
    request, processor = request_of(path, *parts)
    assert processor.chat("r", messages, GREEDY, prompt=written).requests[0].prompt_ids == request.prompt_ids
    with pytest.raises(InvalidRequest, match="the prompt holds <video> 0 times for 1 pictures or videos"):
        processor.chat("r", messages, GREEDY, prompt=IMAGE)


@pytest.mark.parametrize("mark", [VIDEO, IMAGE, AROUND, WHOLE])
def test_marks_in_a_users_words_are_refused(mark, path):
    with pytest.raises(InvalidRequest, match="stands for a picture"):
        request_of(path, text(f"see {mark} here"))


def test_a_video_without_frames_and_unknown_options_are_refused(path):
    none = {"type": "video", "video": np.zeros((0, 8, 8, 3), np.uint8), "fps": 1.0}
    with pytest.raises(InvalidRequest, match=r"frames of a video must be uint8 \[frames, height, width, 3\]"):
        request_of(path, none)
    with pytest.raises(InvalidRequest, match="'max_frames' is not known; this model takes num_frames, fps"):
        request_of(path, image(0), max_frames=3)


def test_a_processor_without_videos_takes_pictures_only(path, changed, tmp_path):
    """Only one of SmolVLM's processors takes videos. Idefics3 has no other."""
    assert read_config(path).vision.videos is not None
    for file in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        older = changed(file, processor_class="Idefics3Processor")
        if file != "processor_config.json":  # which comes first
            assert read_config(older).vision.videos is not None
            (older / "processor_config.json").unlink()
        assert load_description(older).images.video is None
        with pytest.raises(InvalidRequest, match=NO_VIDEOS):
            request_of(older, video(1, 1, 60, 60, 1.0))
        request_of(older, image(0), text(f"What does {VIDEO} mean?"))
    idefics = make_smolvlm(tmp_path, "idefics3")
    (idefics / "processor_config.json").unlink()
    assert read_config(idefics).vision.videos is None
    with pytest.raises(InvalidRequest, match=NO_VIDEOS):
        request_of(idefics, video(1, 1, 60, 60, 1.0))
