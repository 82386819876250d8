"""Pictures and videos of Gemma 4 against transformers' own processing, bit by bit, with both backends."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from hydrainfer.checkpoint import BUDGETS, BudgetSettings, BudgetVideoSettings
from hydrainfer.core import CheckpointError
from hydrainfer.models.picture import Normalising
from hydrainfer.ops.build import build_resampler
from hydrainfer.processor import MediaLimits
from hydrainfer.processor.messages import VideoPart, VideoReading
from hydrainfer.processor.pictures.adapter import VideoShape
from hydrainfer.processor.pictures.budget import BudgetImages, BudgetVideos
from hydrainfer.processor.pictures.media import from_image
from hydrainfer.processor.workers.prepare import Seal, prepare_video
from tests.equivalence.reference import photo

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".cache" / "torchvision"
MODELS = "transformers.models.gemma4"
CASES = {
    "pictures": (f"{MODELS}.image_processing_gemma4:Gemma4ImageProcessor", {"max_soft_tokens": 70}),
    "videos": (f"{MODELS}.video_processing_gemma4:Gemma4VideoProcessor", {"do_sample_frames": False}),
}
EXTREMES = [(1, 1), (1, 150), (150, 1), (1500, 9), (9, 1500), (384, 384), (480, 336), (48, 48), (700, 3), (1201, 803)]
FRAMES = [(3, 640, 480), (2, 61, 300), (2, 480, 336)]


def pictures() -> dict[str, np.ndarray]:
    """60 pictures, half of them noise, and videos."""
    rng, found = random.Random(3), {}
    sizes = EXTREMES + [(rng.randint(2, 500), rng.randint(2, 500)) for _ in range(60 - len(EXTREMES))]
    for n, (width, height) in enumerate(sizes):
        shown = photo("astronaut.png").convert("RGB").resize((width, height))
        noise = np.random.default_rng(n).integers(0, 256, (height, width, 3), np.uint8)
        found[f"{n}: {width} x {height}"] = noise if n % 2 else np.asarray(shown)
    for n, width, height in FRAMES:
        found[f"{n} frames of {width} x {height}"] = np.random.default_rng(n).integers(
            0, 256, (n, height, width, 3), np.uint8
        )
    return found


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    if not FOLDER.is_dir():
        pytest.skip("torchvision is not in .cache/torchvision; make torchvision puts it there")
    folder = tmp_path_factory.mktemp("torchvision")
    cases, given, results = folder / "cases.json", folder / "pictures.npz", folder / "results.npz"
    cases.write_text(json.dumps(CASES))
    np.savez(given, **pictures())
    command = [sys.executable, "-m", "tests.processor.pictures.torchvision_reference"]
    subprocess.run([*command, FOLDER, cases, given, results], check=True, cwd=ROOT)
    with np.load(results) as made:
        return dict(made)


def rows_of(pixels: np.ndarray, settings: BudgetSettings, normalises: bool = True) -> np.ndarray:
    """The patches [rows, 3 * patch ** 2] of frames [n, height, width, 3], in a processor's order."""
    frames = torch.from_numpy(pixels.copy())
    frames = Normalising(settings, torch.device("cpu"))(frames) if normalises else frames
    p = settings.patch
    grid = frames.unflatten(2, (-1, p)).unflatten(1, (-1, p))  # [n, h, p, w, p, 3]
    return grid.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(0, 2).numpy()


def check(made: np.ndarray, theirs: np.ndarray, name: str) -> None:
    """`theirs`: pixels between 0 and 1, which the reference's tower stretches, padded."""
    want = 2 * (torch.from_numpy(theirs[: len(made)]) - 0.5)
    assert made.dtype == np.float32 and np.array_equal(made, want.numpy()), name
    assert not theirs[len(made) :].any(), "padding only"


def test_pictures_are_those_of_the_pil_processor():
    settings = BudgetSettings.read({"max_soft_tokens": 70}, 16, 3, 280).by("pillow")
    images, reference = BudgetImages(settings), transformers.Gemma4ImageProcessorPil(max_soft_tokens=70)
    for name, array in pictures().items():
        if array.ndim == 3:
            made = images.pixels(from_image(Image.fromarray(array), MediaLimits(max_aspect=1e9)))
            found = reference([Image.fromarray(array)], return_tensors="np")
            check(rows_of(made, settings), found["pixel_values"][0], name)
            assert images.fit(array.shape[1], array.shape[0]).n_tokens == found["num_soft_tokens_per_image"][0]


@pytest.mark.parametrize("library", ["", "resample_int16"])
def test_pictures_are_those_of_the_torchvision_processor(library, references):
    settings = BudgetSettings.read({"max_soft_tokens": 70}, 16, 3, 280).by("torchvision")
    limits = MediaLimits(max_aspect=1e9, resampler=build_resampler(library) if library else "")
    for name, array in pictures().items():
        if array.ndim == 3 and (library or array.size < 200_000):
            made = BudgetImages(settings).pixels(from_image(Image.fromarray(array), limits))
            check(rows_of(made, settings), references[f"pictures|{name}"][0], name)


def test_frames_are_those_of_the_torchvision_processor(references):
    settings = BudgetVideoSettings.read({}, 16, 3).by("torchvision")
    reading = VideoReading(resampler=build_resampler("resample_int16"))
    for name, frames in pictures().items():
        if frames.ndim == 4:
            made = prepare_video(VideoPart(frames, ""), BudgetVideos(settings), reading, Seal(b"", ""), len(frames))
            theirs = references[f"videos|{name}"]
            for each, want in zip(made, theirs, strict=True):
                rows = rows_of(each.pixels, settings.frames, normalises=False)
                assert np.array_equal(rows, np.rint(want[: len(rows)] * 255)), name
                assert np.allclose(rows_of(each.pixels, settings.frames), 2 * want[: len(rows)] - 1, 0, 2e-7)


@pytest.mark.parametrize("budget", BUDGETS)
def test_sizes_are_those_of_the_processor(budget):
    """Its own function, which its preprocessing calls; the tests of placeholders run the preprocessing itself."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    rng = random.Random(budget)
    images = BudgetImages(BudgetSettings(budget=budget))
    some = [(rng.randint(1, 4000), rng.randint(1, 4000)) for _ in range(300)]
    for width, height in [*EXTREMES, (1, 8000), (8000, 1), (48 * budget, 48), *some]:
        target = images.resized(width, height)
        want = get_aspect_ratio_preserving_size(height, width, 16, 9 * budget, 3)
        assert (target.height, target.width) == want, (width, height)
        assert 1 <= images.fit(width, height).n_tokens <= budget <= images.settings.tokens


def test_a_video_is_sampled_as_by_the_processor_and_shorter_ones_are_taken_whole():
    videos = BudgetVideos(BudgetVideoSettings.read({}, 16, 3))

    def sampled(n, rate=24.0, **options):
        return videos.configured(options).sample(VideoShape(n, rate, 64, 64), 768)

    for n in (33, 100, 1000, 12_345):
        assert sampled(n) == (np.arange(32) * n // 32).tolist()
        assert sampled(n, num_frames=8) == (np.arange(8) * n // 8).tolist()
        n_wanted = min(int(n / 25 * 2), 768)
        assert sampled(n, 25.0, fps=2) == (np.arange(n_wanted) * n // n_wanted).tolist()
    assert sampled(5) == [0, 1, 2, 3, 4]


def test_each_frame_has_its_time_before_it():
    settings = BudgetVideoSettings(frames=BudgetSettings(budget=70), start="<s>", end="<e>")
    shape = VideoShape(4000, 25.0, 640, 480)
    items = BudgetVideos(settings, whole=True).items(shape, [0, 1499, 1500, 3999])
    assert [item.before for item in items] == ["00:00 <s>", " 00:59 <s>", " 01:00 <s>", " 02:39 <s>"]
    assert all(item.after == "<e>" and item.whole and item.n_tokens == 63 for item in items)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_soft_tokens": 100}, "max_soft_tokens is 100; it must be one of 70, 140, 280, 560, 1120"),
        ({"patch_size": 14}, r"patch_size and pooling_kernel_size \(14, 3\), the vision tower \(16, 3\)"),
        ({"do_resize": False}, "do_resize false is not supported"),
        ({"do_normalize": True, "image_mean": [0.5] * 3}, "image_mean and image_std must be 0 and 1"),
        ({"resample": None}, "resample is null"),
    ],
)
def test_preprocessing_that_does_not_fit_is_refused(given, says):
    with pytest.raises(CheckpointError, match=says):
        BudgetSettings.read(given, 16, 3, 280)
