"""Videos of SmolVLM2 against transformers' own processing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from hydrainfer.checkpoint import IdeficsSettings, SmolVideoSettings
from hydrainfer.core import CheckpointError, InvalidRequest
from hydrainfer.families import read_config
from hydrainfer.models.picture import Normalising
from hydrainfer.ops.build import build_resampler
from hydrainfer.processor import load_description, parse_messages
from hydrainfer.processor.pictures.adapter import VideoShape
from hydrainfer.processor.pictures.idefics import IdeficsVideos, _words
from hydrainfer.processor.text import encode_rendered, expand
from hydrainfer.processor.workers.prepare import chosen_frames
from tests.checkpoints_smolvlm import EDGE, SIDE, make_smolvlm
from tests.families.smolvlm import WORDS
from tests.processor.pictures.glm_reference import Clip
from tests.processor.pictures.smol_reference import chat

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".cache" / "torchvision"
RATES = (1.0, 2.0, 10.0, 23.976, 24.0, 25.0, 29.97, 30.0, 59.94)
TEXTS = [("", "What is it?"), ("Look:", " and say."), ("See ", "\n\nNow?"), ("one\n", ""), ("7", "8 or 9")]
SHOWN = [
    Clip(72, 24.0, 90, 130),
    Clip(30, 12.5, 301, 40),
    Clip(90, 29.97, 20, 25),
    Clip(11, 24.0, 56, 56),
    Clip(5, 0.05, 60, 61, sampled=True),
    Clip(1, 2.0, 300, 2, sampled=True),
    Clip(2, 0.0005, 500, 333, sampled=True),
    Clip(7, 2.0, 1, 7, sampled=True),
    Clip(24, 7.3, 31, 9, sampled=True),
    Clip(4, 3.0, 240, 180, sampled=True),
]


def chosen():
    """Lengths around those at which the sampler changes, and others."""
    rng = np.random.default_rng(6)
    lengths = [1, 2, 3, 12, 13, *rng.integers(4, 20_000, 60).tolist()]
    bounds = (2, 12, 14, 15, 64, 66, 67)
    lengths += [round(s * rate) + more for s, rate, more in product(bounds, (1.0, 23.976, 30.0), (-1, 0, 1, 30))]
    return [Clip(max(n, 1), float(rng.choice(RATES))) for n in lengths]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Checkpoints whose files give the preprocessing of videos in different ways."""
    folder = tmp_path_factory.mktemp("checkpoints")
    published = make_smolvlm(folder / "published", seed=5)
    given = json.loads((published / "preprocessor_config.json").read_text())
    found = {"published": published}
    own = {
        "video_sampling": {"fps": 3, "max_frames": 12, "video_size": {"longest_edge": 91}},
        "fps": 1,
        "num_frames": 7,
    }
    for name in ("own file", "one file"):
        found[name] = folder / name
        shutil.copytree(published, found[name])
    videos = {k: v for k, v in given.items() if k not in ("size", "image_processor_type", "do_image_splitting")} | own
    (found["own file"] / "video_preprocessor_config.json").write_text(json.dumps(videos))
    kept = {
        "video_processor_type": "SmolVLMVideoProcessor",
        "num_frames": 5,
        "fps": 0.5,
        "size": {"longest_edge": 333},
    }
    v5 = {"image_processor": given, "video_processor": {"max_image_size": {"longest_edge": SIDE}} | kept}
    file = found["one file"] / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | v5))
    return found


@pytest.fixture(scope="module")
def reference(paths, tmp_path_factory):
    if not FOLDER.is_dir():
        pytest.skip("torchvision is not in .cache/torchvision; make torchvision puts it there")
    folder = tmp_path_factory.mktemp("torchvision")
    cases, results, pixels = folder / "cases.json", folder / "results.json", folder / "pixels.npz"
    checkpoints = {name: str(path) for name, path in paths.items()}
    given = {"checkpoints": checkpoints, "chosen": chosen(), "shown": SHOWN, "texts": TEXTS, "words": WORDS}
    cases.write_text(json.dumps(given))
    command = [sys.executable, "-m", "tests.processor.pictures.smol_reference"]
    subprocess.run([*command, FOLDER, cases, results, pixels], check=True, cwd=ROOT)
    with np.load(pixels) as arrays:
        return json.loads(results.read_text()), dict(arrays)


def shape(clip: Clip) -> VideoShape:
    return VideoShape(clip.n, clip.fps, clip.width, clip.height, clip.sampled)


NAMES = ["published", "own file", "one file"]


@pytest.mark.parametrize("name", NAMES)
def test_the_frames_of_a_video_are_those_of_its_processor(name, paths, reference):
    videos = load_description(paths[name]).images.video.adapter
    for clip, want in zip(chosen(), reference[0][name]["chosen"], strict=True):
        assert videos.sample(shape(clip), 10_000) == want, clip


@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_pixels_of_a_video_are_those_of_its_processor(name, paths, reference):
    model, library = load_description(paths[name]), build_resampler("resample_int16")
    video, settings = model.images.video, read_config(paths[name]).vision.pixels
    for i, (clip, want) in enumerate(zip(SHOWN, reference[0][name]["prompts"], strict=True)):
        written = model.template.render(parse_messages(chat(clip, *TEXTS[i % len(TEXTS)]), local=True))
        indices = chosen_frames(shape(clip), video.adapter, 768)
        items = video.adapter.items(shape(clip), indices)
        ids = expand(encode_rendered(written, model), [items], model, [video.token_id]).ids
        assert list(ids) == want, (clip, model.tokenizer.decode(ids, skip_special_tokens=False))
        target = video.adapter.resized(shape(clip), len(indices))
        frames = np.stack([target.resized(Image.fromarray(f), library=library) for f in clip.frames()[indices]])
        pixels = np.concatenate(video.adapter.pixels(shape(clip), frames))
        scaled = Normalising(settings, torch.device("cpu"))(torch.from_numpy(pixels))  # [n, height, width, 3]
        assert np.array_equal(scaled.permute(0, 3, 1, 2).numpy(), reference[1][f"{name}|{i}"]), clip


@pytest.mark.parametrize("kernel", [True, False], ids=["our kernel", "Pillow"])
def test_frames_are_as_pictures_of_one_tile_in_pillow(kernel):
    given = {"size": {"longest_edge": EDGE}, "max_image_size": {"longest_edge": SIDE}}
    theirs = transformers.SmolVLMImageProcessorPil(**given, do_image_splitting=False)
    pictures, library = IdeficsSettings.read(given), build_resampler("resample") if kernel else ""
    videos = IdeficsVideos(SmolVideoSettings.read(given, pictures).by("pillow"), 4)
    normalise, rng = Normalising(pictures.by("pillow"), torch.device("cpu")), np.random.default_rng(8)
    sizes = [(1, 1), (56, 56), (224, 224), (2000, 20), (20, 2000), *rng.integers(1, 500, (30, 2)).tolist()]
    for width, height in sizes:
        frame = rng.integers(0, 256, (height, width, 3), np.uint8)
        made = videos.resized(VideoShape(1, 1.0, width, height), 1).resized(Image.fromarray(frame), library=library)
        want = theirs(Image.fromarray(frame), return_tensors="pt")["pixel_values"][0, 0]
        ours = normalise(torch.tensor(made[None])).permute(0, 3, 1, 2)[0]
        assert (ours - want).abs().max() < 1e-6, (width, height)  # a level is 8e-3


def test_sizes_of_frames_after_the_first_resize_are_those_of_the_processor():
    from transformers.models.smolvlm.video_processing_smolvlm import get_resize_output_image_size

    rng = np.random.default_rng(9)
    for edge in (91, 224, 1536, 4095, 4096, 4200, 2**32):
        frames = IdeficsSettings(edge=edge, split=False)
        videos = IdeficsVideos(SmolVideoSettings(frames=frames), 4)
        sizes = [(1, 1), (1, 9000), (9000, 1), (4095, 4096), *np.exp(rng.uniform(0, 9, (200, 2))).astype(int).tolist()]
        for width, height in sizes:
            target = videos.resized(VideoShape(1, 1.0, width, height), 1)
            want = get_resize_output_image_size(torch.empty((1, height, width), device="meta"), edge)
            assert target.via == want[::-1], (width, height, edge)


def test_numbers_are_written_as_num2words_writes_them():
    some = {
        20: "twenty",
        64: "sixty-four",
        100: "one hundred",
        101: "one hundred and one",
        768: "seven hundred and sixty-eight",
        1000: "one thousand",
        1001: "one thousand and one",
        1100: "one thousand, one hundred",
        2345: "two thousand, three hundred and forty-five",
        150_000: "one hundred and fifty thousand",
    }
    for n, words in (some | WORDS).items():
        assert _words(n) == words


def test_frames_are_bounded_and_may_be_fewer(paths):
    videos, clip = load_description(paths["published"]).images.video.adapter, VideoShape(900, 30.0, 60, 60)
    assert len(videos.sample(clip, 768)) == 30
    for most in (1, 2, 7, 20):
        found = videos.sample(clip, most)
        assert len(found) == most and found == sorted(found) and found[0] == 0
    assert videos.configured({"num_frames": 4}).sample(clip, 768) == [30, 310, 590, 870]
    assert len(videos.configured({"fps": 0.1}).sample(clip, 768)) == 3
    assert len(videos.configured({"fps": 30}).sample(clip, 768)) == 64
    assert videos.sample(VideoShape(1, 0.0, 60, 60), 768) == [0], "a file without a rate"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_pixels": 9}, "'max_pixels' is not known; this model takes num_frames, fps"),
        ({"num_frames": 0}, "num_frames must be a whole number, at least 1"),
        ({"fps": True}, "fps must be a number over 0 and at most 1000"),
        ({"fps": 1, "num_frames": 2}, "exclude each other"),
    ],
)
def test_wrong_options_of_a_request_name_the_right_ones(options, says, paths):
    images = load_description(paths["published"]).images
    for adapter in (images.adapter, images.video.adapter):
        with pytest.raises(InvalidRequest, match=says):
            adapter.configured(options)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"do_resize": False}, "do_resize false is not supported"),
        ({"size": {"height": 9, "width": 9}}, "size must give longest_edge"),
        ({"size": None}, "size is null"),
        ({"max_image_size": {"longest_edge": 28}}, "makes or normalises frames otherwise than pictures"),
        ({"image_mean": [0.1] * 3}, "makes or normalises frames otherwise than pictures"),
        ({"rescale_factor": 0.5}, "makes or normalises frames otherwise than pictures"),
        ({"video_processor_type": "GlmVideoProcessor"}, "'GlmVideoProcessor' is not supported; supported: SmolVLMV"),
        ({"video_sampling": {"video_size": {"longest_edge": None}}}, "longest_edge of the size of frames is null"),
        ({"video_sampling": {"video_size": 7}}, "size must give longest_edge"),
        ({"video_sampling": 7}, "video_sampling is 7; it must be an object, or null"),
        ({"video_sampling": {"fps": 0}}, "video_sampling.fps is 0; it must be a number"),
        ({"video_sampling": {"max_frames": "x"}}, "video_sampling.max_frames is"),
        ({"video_sampling": {"video_size": {"longest_edge": -1}}}, "video_sampling.video_size.longest_edge is -1"),
        ({"fps": []}, r"fps is \[\]"),
    ],
)
def test_preprocessing_that_cannot_be_is_refused_in_one_line(given, says, paths, tmp_path):
    path = tmp_path / "changed"
    shutil.copytree(paths["published"], path)
    content = {"max_image_size": {"longest_edge": SIDE}} | given
    (path / "video_preprocessor_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=says) as e:
        load_description(path)
    assert "\n" not in e.value.message


def test_what_files_leave_out_has_a_default():
    videos = SmolVideoSettings.read({}, IdeficsSettings.read({}))
    assert (videos.num_frames, videos.fps) == (64, 1)
    assert SmolVideoSettings.read({"video_sampling": {}, "fps": 2}, IdeficsSettings.read({})).fps == 2
