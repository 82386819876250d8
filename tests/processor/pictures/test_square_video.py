"""Videos whose frames are single squares, of InternVL and LLaVA-OneVision: their prompts, their frames, and what is
refused. The pixels and the choice of frames are compared with transformers in `test_torchvision.py`."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from hydrainfer.core import CheckpointError, InvalidRequest, SamplingParams
from hydrainfer.families import read_config
from hydrainfer.processor import ChatOptions, PixelStore, Processor, load_description, parse_messages
from hydrainfer.processor.pictures.adapter import VideoShape
from tests.families import internvl, llava_onevision
from tests.families.chats import text, user, video
from tests.pillow import described
from tests.processor.video.videos import all_frames, make_video

pytestmark = pytest.mark.cpu
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
FAMILIES = {
    "internvl": (internvl, internvl.make_internvl),
    "onevision": (llava_onevision, llava_onevision.make_onevision),
}
FILES = ("config.json", "preprocessor_config.json")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {name: make(tmp_path_factory.mktemp(name)) for name, (_, make) in FAMILIES.items()}


def processor_of(path):
    return Processor(described(path), PixelStore(1 << 28), weights=b"", dtype="float32")


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_of_many_lengths_and_sizes_are_those_of_transformers(checkpoints, name):
    """InternVL's also where the text before a video and the name of its first frame become one token."""
    path, sizes = checkpoints[name], [(1, 1), (2, 99), (300, 3), (56, 56), (130, 90)]
    ours, theirs = processor_of(path), FAMILIES[name][0].Processor.from_pretrained(path)
    for i, n in enumerate((1, 2, 9, 10, 11, 33)):
        height, width = sizes[i % len(sizes)]
        for before in ("", "x", "Look: ", "a (", "12\n"):
            messages = [user(*([text(before)] if before else []), video(n, n, height, width, 1.0), text("? "))]
            shown = theirs.apply_chat_template(messages, add_generation_prompt=True)
            want = theirs(text=[shown], videos=[messages[0]["content"][-2]["video"]])["input_ids"][0]
            (request,) = ours.chat("r", parse_messages(messages, local=True), GREEDY).requests
            assert list(request.prompt_ids) == list(want), (n, before)
            newline = name == "onevision"
            assert [m.n_tokens for m in request.media] == [4] * (n - 1) + [4 + newline]


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


@pytest.mark.parametrize("name", FAMILIES)
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
    adapter = pickle.loads(pickle.dumps(adapter))  # as it reaches the workers
    wanted = frames if isinstance(frames, list) else frames[name]
    assert adapter.sample(VideoShape(n, rate, 64, 48), 768) == wanted
    assert len(adapter.configured({"fps": 1000}).sample(VideoShape(5000, 25.0, 64, 48), 300)) == 300


@pytest.mark.parametrize("name", FAMILIES)
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


@pytest.mark.parametrize("name", FAMILIES)
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


@pytest.mark.parametrize(
    ("name", "options", "n"), [("internvl", {}, 8), ("onevision", {}, 32), ("internvl", {"fps": 1}, 4)]
)
def test_frames_of_a_file_are_those_that_are_chosen(checkpoints, name, options, n):
    """The video has 40 frames in 4 s."""
    data, processor = make_video("mpeg4"), processor_of(checkpoints[name])
    chat = parse_messages([user({"type": "video", "video": data}, text("?"))], local=True)
    (request,) = processor.chat("r", chat, GREEDY, options=ChatOptions(media=options)).requests
    shape, adapter = VideoShape(40, 10.0, 96, 64), processor.model.images.video.adapter.configured(options)
    chosen, target, frames = adapter.sample(shape, 768), adapter.resized(shape, n), all_frames(data)
    assert len(set(chosen)) == len(request.media) == n
    want = [target.resized(Image.fromarray(frames[i])) for i in chosen]
    assert np.array_equal(np.concatenate([processor.pixels.get(m.pixels) for m in request.media]), np.stack(want))


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_frames_have_one_key_unless_a_newline_follows(checkpoints, name):
    """A picture of the same pixels has another key."""
    clip = video(5, 3, 56, 56, 1.0)
    clip["video"][:] = clip["video"][0]
    parts = (clip, {"type": "image", "image": Image.fromarray(clip["video"][0])})
    messages = parse_messages([user(*parts)], local=True)
    (request,) = processor_of(checkpoints[name]).chat("r", messages, GREEDY).requests
    first, second, third, picture = (m.key for m in request.media)
    assert first == second and picture not in (first, third)
    assert (second == third) == (name == "internvl")


def test_a_frame_has_half_the_published_towers_side(checkpoints):
    """As transformers' processor counts, of 27 x 27 patches."""
    theirs = llava_onevision.Processor.from_pretrained(checkpoints["onevision"])
    theirs.num_image_tokens = 27 * 27
    c = read_config(checkpoints["onevision"]).vision
    c = replace(c, tower=replace(c.tower, image_size=384))
    for n in (1, 2, 8, 32):
        want = theirs.replace_video_token({"pixel_values_videos": [np.empty((n, 0))]}, 0).count("<video>")
        assert n * c.frame_side**2 + 1 == want == 196 * n + 1
