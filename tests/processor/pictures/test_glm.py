"""Pictures and videos of the GLM families against transformers' own processing."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from hydrainfer.checkpoint import GLM_BOUNDS, GlmVideoSettings, PixelBounds, QwenSettings
from hydrainfer.core import CheckpointError, InvalidRequest, MediaError
from hydrainfer.models.picture import Normalising
from hydrainfer.ops.build import build_resampler
from hydrainfer.processor.pictures.adapter import VideoShape
from hydrainfer.processor.pictures.glm_video import GlmVideos
from hydrainfer.processor.pictures.qwen import QwenImages
from hydrainfer.processor.workers.prepare import chosen_frames
from tests.families.glm4v import make_tokenizer
from tests.processor.pictures.glm_reference import NAMES, PROMPT, SIZE, Clip

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".cache" / "torchvision"
RATES = (1.0, 2.0, 10.0, 23.976, 24.0, 25.0, 29.97, 30.0, 59.94)
SHOWN = [
    Clip(30, 24.0, 90, 130),
    Clip(45, 12.5, 301, 40),
    Clip(61, 29.97, 20, 25),
    Clip(5, 2.0, 60, 60, sampled=True),
    Clip(2, 0.7, 112, 56, sampled=True),
]


def chosen():
    """Lengths around those at which a sampler changes, and others."""
    rng = np.random.default_rng(5)
    lengths = [1, 2, 3, 5, *rng.integers(6, 20_000, 60).tolist()]
    bounds = (30, 300, 2400)
    lengths += [round(s * rate) + more for s, rate, more in product(bounds, (1.0, 23.976, 30.0), (-1, 0, 1))]
    clips = [Clip(n, float(rng.choice(RATES))) for n in lengths]
    return [clip for clip in clips if clip.n / clip.fps >= 0.5]  # of shorter ones GLM-4.6V's processor takes no frame


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    if not FOLDER.is_dir():
        pytest.skip("torchvision is not in .cache/torchvision; make torchvision puts it there")
    folder = tmp_path_factory.mktemp("torchvision")
    cases, results, pixels = folder / "cases.json", folder / "results.json", folder / "pixels.npz"
    cases.write_text(json.dumps({"chosen": chosen(), "shown": SHOWN}))
    make_tokenizer().save_pretrained(folder / "tokenizer")
    command = [sys.executable, "-m", "tests.processor.pictures.glm_reference"]
    subprocess.run([*command, FOLDER, folder / "tokenizer", cases, results, pixels], check=True, cwd=ROOT)
    with np.load(pixels) as arrays:
        return json.loads(results.read_text()), dict(arrays)


def adapter(sampler: str, **more) -> GlmVideos:
    given = {"video_processor_type": f"{NAMES[sampler]}VideoProcessor", "size": SIZE} | more
    settings = GlmVideoSettings.read_glm(given, QwenSettings.read({}, GLM_BOUNDS, in_time=True))
    assert settings.sampler == sampler
    around = {"start": "<|begin_of_image|>", "end": "<|end_of_image|>"}
    return GlmVideos(msgspec.structs.replace(settings, **around).by("torchvision"))


def shape(clip: Clip) -> VideoShape:
    return VideoShape(clip.n, clip.fps, clip.width, clip.height, clip.sampled)


@pytest.mark.parametrize("sampler", NAMES)
def test_the_frames_of_a_video_are_those_of_its_processor(sampler, reference):
    videos = adapter(sampler)
    for clip, want in zip(chosen(), reference[0][sampler]["chosen"], strict=True):
        assert videos.sample(shape(clip), 10_000) == want, clip


@pytest.mark.parametrize("sampler", NAMES)
def test_prompts_and_pixels_of_a_video_are_those_of_its_processor(sampler, reference):
    videos, library = adapter(sampler), build_resampler("resample_int16")
    s = videos.settings.frames
    for i, (clip, prompt) in enumerate(zip(SHOWN, reference[0][sampler]["prompts"], strict=True)):
        indices = chosen_frames(shape(clip), videos, 768)
        items = videos.items(shape(clip), indices)
        shown = "".join(f"{item.before}{'<|image|>' * item.n_tokens}{item.after}" for item in items)
        assert PROMPT.replace("<|video|>", shown) == prompt, clip
        target = videos.resized(shape(clip), len(indices))
        frames = np.stack([target.resized(Image.fromarray(f), library=library) for f in clip.frames()[indices]])
        rows = []
        for item, pixels in zip(items, videos.pixels(shape(clip), frames), strict=True):
            scaled = Normalising(s, torch.device("cpu"))(torch.from_numpy(pixels))  # [2, height, width, 3]
            _, h, w = item.grid
            cut = scaled.view(2, h, s.merge, s.patch, w, s.merge, s.patch, 3).permute(1, 4, 2, 5, 7, 0, 3, 6)
            rows.append(cut.reshape(-1, 6 * s.patch**2).numpy())
        assert np.array_equal(np.concatenate(rows), reference[1][f"{sampler}|{i}"]), clip


@pytest.mark.parametrize("sampler", NAMES)
def test_frames_are_bounded(sampler):
    videos, clip = adapter(sampler), VideoShape(900, 30.0, 60, 60)
    usual = videos.sample(clip, 768)
    for most in (1, 2, 7, 20):
        found = videos.sample(clip, most)
        assert len(found) <= most and set(found) <= set(usual) and found == sorted(found)
    assert len(videos.configured({"max_frames": 12}).sample(clip, 768)) == 12
    assert videos.sample(VideoShape(1, 30.0, 60, 60), 768) == [0, 0]
    for unknown in ("num_frames", *(["fps"] if sampler == "glm46v" else [])):
        with pytest.raises(InvalidRequest, match=f"{unknown!r} is not known; this model takes min_pixels"):
            videos.configured({unknown: 3})


def test_a_request_may_ask_for_fewer_frames_per_second():
    videos, clip = adapter("glm4v"), VideoShape(300, 30.0, 60, 60)
    assert videos.configured({"fps": 1.0}).sample(clip, 768) == [*range(0, 300, 30)]


@pytest.mark.parametrize("given", [{}, {"size": {"shortest_edge": 6272, "longest_edge": 62_720}}])
def test_pictures_are_as_large_as_their_processor_makes_them(given):
    import transformers

    theirs, rng = transformers.Glm4vImageProcessorPil(**given), np.random.default_rng(3)
    ours = QwenImages(QwenSettings.read(given, GLM_BOUNDS, in_time=True))
    sizes = [
        (1, 1),
        (1, 200),
        (200, 1),
        (27, 28),
        (28, 27),
        (5600, 28),
        (28, 5600),
        (3000, 16),
        *rng.integers(5, 900, (60, 2)),
    ]
    for width, height in sizes:
        _, h, w = ours.fit(int(width), int(height)).grid
        made = theirs(Image.new("RGB", (width, height)), return_tensors="np")
        assert made["image_grid_thw"].tolist() == [[1, 2 * h, 2 * w]], (width, height)
    for width, height in [(1, 201), (5700, 28)]:
        with pytest.raises(MediaError, match="at most 200 times"):
            ours.fit(width, height)
        with pytest.raises(ValueError, match="ratio must be smaller than 200"):
            theirs(Image.new("RGB", (width, height)))


def test_sizes_of_pictures_and_frames_are_those_of_smart_resize():
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

    rng = np.random.default_rng(4)
    for _ in range(2000):
        least = int(rng.integers(1, 300)) * 28 * 28 // 4
        bounds = PixelBounds(least, least + int(rng.integers(4, 4000)) * 28 * 28 // 4)
        width = int(np.exp(rng.uniform(0, 8)))
        height = int(np.clip(np.exp(rng.uniform(0, 8)), -(-width // 190), width * 190))
        settings = QwenSettings(bounds=bounds, in_time=True)
        want = smart_resize(2, height, width, min_pixels=bounds.least, max_pixels=bounds.most)
        assert QwenImages(settings).fit(width, height).grid == (1, *(n // 28 for n in want)), (width, height, bounds)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"fps": 1e9}, "fps is 1000000000.0; it must be at most 1000"),
        ({"patch_size": 16}, "cuts or normalises frames otherwise"),
        ({"size": 5}, "size must give"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, says):
    with pytest.raises(CheckpointError, match=says):
        GlmVideoSettings.read_glm(given, QwenSettings.read({}, GLM_BOUNDS, in_time=True))
