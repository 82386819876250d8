"""Videos whose frames are single squares, of InternVL: their prompts, their frames, and what is refused. The pixels and
the choice of frames are compared with transformers in `test_torchvision.py`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from hydrainfer.core import CheckpointError, InvalidRequest, SamplingParams
from hydrainfer.families import read_config
from hydrainfer.processor import ChatOptions, PixelStore, Processor, load_description, parse_messages
from hydrainfer.processor.pictures.adapter import VideoShape
from tests.families import internvl
from tests.families.chats import text, user, video
from tests.pillow import described

pytestmark = pytest.mark.cpu
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
MAKERS = {"internvl": internvl.make_internvl}
FILES = ("config.json", "preprocessor_config.json")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in MAKERS.items()}


def processor_of(path, store=None):
    return Processor(described(path), store or PixelStore(1 << 28), weights=b"", dtype="float32")


def test_prompts_of_many_lengths_and_sizes_are_those_of_transformers(checkpoints):
    """Also where the text before a video and the name of its first frame become one token."""
    path, sizes = checkpoints["internvl"], [(1, 1), (2, 99), (300, 3), (56, 56), (130, 90)]
    ours, theirs = processor_of(path), internvl.Processor.from_pretrained(path)
    for i, n in enumerate((1, 2, 9, 10, 11, 33)):
        height, width = sizes[i % len(sizes)]
        for before in ("", "x", "Look: ", "a (", "12\n"):
            messages = [user(*([text(before)] if before else []), video(n, n, height, width, 1.0), text("? "))]
            shown = theirs.apply_chat_template(messages, add_generation_prompt=True)
            want = theirs(text=shown, videos=[messages[0]["content"][-2]["video"]])["input_ids"][0]
            (request,) = ours.chat("r", parse_messages(messages, local=True), GREEDY).requests
            assert list(request.prompt_ids) == list(want), (n, before)
            assert [m.n_tokens for m in request.media] == [4] * n


def test_a_text_prompt_names_the_first_frame_and_one_of_ids_has_to(tmp_path):
    """Published tokenizers have <video> behind the last row of the embedding."""
    token_id = internvl.make_tokenizer().convert_tokens_to_ids("<video>")
    processor = processor_of(internvl.make_internvl(tmp_path, text={"vocab_size": token_id}))
    assert (processor.model.vocabulary.n_tokens, processor.model.images.video.token_id) == (token_id, token_id)
    ids = [*processor.encode("See:Frame1: "), token_id, *processor.encode("!")]
    messages = parse_messages([user(video(3, 2, 30, 30, 1.0))], local=True)
    (first,), (second,) = (processor.chat("r", messages, GREEDY, prompt=p).prompts for p in ("See:<video>!", ids))
    assert first == second and max(first) < token_id
    shown = processor.decode([*first]).replace("<IMG_CONTEXT>", "")
    assert shown == "See:Frame1: <img></img>\nFrame2: <img></img>!"
    with pytest.raises(InvalidRequest, match=f"token id {token_id}"):
        processor.complete("r", ids, GREEDY)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("options", "n", "rate", "frames"),
    [
        ({}, 1, 25.0, [0]),
        ({"num_frames": 3}, 1, 25.0, [0]),
        ({"fps": 0.001}, 50, 25.0, {"internvl": [25], "onevision": [0]}),
        ({"fps": 2}, 20, 0.0, {"internvl": [10], "onevision": [0]}),  # a file without a rate
        ({"num_frames": 99}, 5, 25.0, [0, 1, 2, 3, 4]),
        ({"num_frames": None}, 8, 25.0, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_short_videos_and_odd_options(checkpoints, name, options, n, rate, frames):
    adapter = load_description(checkpoints[name]).images.video.adapter.configured(options)
    wanted = frames if isinstance(frames, list) else frames[name]
    assert adapter.sample(VideoShape(n, rate, 64, 48), 768) == wanted
    assert len(adapter.configured({"fps": 1000}).sample(VideoShape(5000, 25.0, 64, 48), 300)) == 300


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_frames": 0}, "num_frames must be a whole number, at least 1"),
        ({"num_frames": 2.0}, "num_frames must be a whole number"),
        ({"fps": 0}, "fps must be a number over 0"),
        ({"fps": True}, "fps must be a number over 0"),
        ({"fps": 2, "num_frames": 2}, "exclude each other"),
        ({"max_frames": 2}, "'max_frames' is not known; this model takes .*num_frames, fps"),
    ],
)
def test_options_that_make_no_sense_are_refused(checkpoints, name, options, says):
    """Whether the request has a video or a picture."""
    processor = processor_of(checkpoints[name])
    for part in (video(1, 2, 20, 20, 1.0), {"type": "image", "image": Image.new("RGB", (9, 9))}):
        with pytest.raises(InvalidRequest, match=says):
            processor.chat("r", parse_messages([user(part)], local=True), GREEDY, options=ChatOptions(media=options))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("size", {"height": 30, "width": 30}, "has size (30, 30) and crop_size None, but the vision tower takes"),
        ("size", None, "size is null"),
        ("size", {"height": 0, "width": 1}, "size.height is 0"),
        ("size", {"shortest_edge": [3]}, "size.shortest_edge is [3]"),
        ("do_resize", False, "has size None"),
        ("do_center_crop", True, "and crop_size (224, 224)"),
        ("image_mean", [0.1, 0.2, 0.3], "normalises frames otherwise than pictures are"),
        ("do_rescale", False, "normalises frames otherwise than pictures are"),
        ("num_frames", -1, "num_frames is -1"),
        ("num_frames", "8", 'num_frames is "8"'),
        ("fps", 0, "fps is 0"),
        (
            "initial_shift",
            "half",
            '"half"; it must be a number from 0 to 1e+09, true or false, or null',
        ),
        ("initial_shift", -0.5, "initial_shift is -0.5"),
        ("resample", 9, "resample is 9"),
    ],
)
def test_damaged_preprocessing_of_videos_is_said_in_one_line(checkpoints, name, field, value, says, tmp_path):
    for file in FILES:
        (tmp_path / file).write_text((checkpoints[name] / file).read_text())
    content = json.loads((tmp_path / "preprocessor_config.json").read_text()) | {field: value}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as e:
        read_config(tmp_path)
    assert says in e.value.message and "\n" not in e.value.message


def test_what_a_file_says_of_the_frames_counts(checkpoints, tmp_path):
    for file in FILES:
        (tmp_path / file).write_text((checkpoints["internvl"] / file).read_text())
    given = json.loads((tmp_path / "preprocessor_config.json").read_text())

    def settings(**fields):
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(given | fields))
        found = read_config(tmp_path).vision.videos
        return found.num_frames, found.fps, found.shift

    assert settings() == (8, None, "half")
    assert settings(num_frames=5, fps=2, initial_shift=False) == (5, None, 0.0)
    assert settings(fps=2, initial_shift=1.5) == (None, 2, 1.5)
    assert settings(initial_shift=None, fps=None) == (8, None, "half")


def test_a_frame_and_a_picture_have_keys_of_their_own(checkpoints):
    path, store = checkpoints["internvl"], PixelStore(1 << 28)
    clip = video(5, 2, 56, 56, 1.0)
    clip["video"][1] = clip["video"][0]
    parts = (clip, {"type": "image", "image": Image.fromarray(np.array(clip["video"][0]))})
    (request,) = processor_of(path, store).chat("r", parse_messages([user(*parts)], local=True), GREEDY).requests
    keys = [m.key for m in request.media]
    assert keys[0] == keys[1] != keys[2]
