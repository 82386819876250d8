"""With the torchvision backend, the pixels that enter a tower are those of transformers' torchvision processors, to the
last bit."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hydrainfer.checkpoint import ClipSettings, QwenSettings, TileSettings
from hydrainfer.models.picture import Normalising
from hydrainfer.ops.build import build_resampler
from hydrainfer.processor import MediaLimits
from hydrainfer.processor.pictures.anyres import AnyresImages, AnyresSettings
from hydrainfer.processor.pictures.clip import ClipImages
from hydrainfer.processor.pictures.media import from_image
from hydrainfer.processor.pictures.qwen import QwenImages
from hydrainfer.processor.pictures.tiles import TileImages
from tests.equivalence.reference import photo

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".cache" / "torchvision"
SIZES = [(640, 480), (500, 375), (375, 500), (801, 599), (56, 56), (30, 20), (61, 300), (300, 61), (120, 119)]
SQUARE = {"height": 56, "width": 56}
CLIP = {"size": {"shortest_edge": 56}, "crop_size": SQUARE}
PADDED = CLIP | {"do_pad": True, "image_processor_type": "LlavaImageProcessor"}
GEMMA = {
    "size": SQUARE,
    "resample": 2,
    "do_center_crop": False,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
POINTS = [[56, 112], [112, 56], [112, 112]]
MODELS = "transformers.models"
CASES = {
    "clip": (f"{MODELS}.clip.image_processing_clip:CLIPImageProcessor", CLIP),
    "clip, odd crop": (
        f"{MODELS}.clip.image_processing_clip:CLIPImageProcessor",
        {"size": {"shortest_edge": 50}, "crop_size": {"height": 55, "width": 57}, "resample": 1},
    ),
    "clip, cropped only": (
        f"{MODELS}.clip.image_processing_clip:CLIPImageProcessor",
        {"do_resize": False, "crop_size": {"height": 201, "width": 202}},
    ),
    "llava, padded": (f"{MODELS}.llava.image_processing_llava:LlavaImageProcessor", PADDED),
    "gemma 3": (f"{MODELS}.gemma3.image_processing_gemma3:Gemma3ImageProcessor", GEMMA),
    "llava-next": (
        f"{MODELS}.llava_next.image_processing_llava_next:LlavaNextImageProcessor",
        CLIP | {"image_grid_pinpoints": POINTS},
    ),
    "llava-onevision": (
        f"{MODELS}.llava_onevision.image_processing_llava_onevision:LlavaOnevisionImageProcessor",
        {"size": SQUARE, "image_grid_pinpoints": POINTS, "image_mean": [0.5, 0.4, 0.6]},
    ),
    "internvl": (
        f"{MODELS}.got_ocr2.image_processing_got_ocr2:GotOcr2ImageProcessor",
        {"size": SQUARE, "crop_to_patches": True},
    ),
    "qwen2-vl": (
        f"{MODELS}.qwen2_vl.image_processing_qwen2_vl:Qwen2VLImageProcessor",
        {"size": {"shortest_edge": 56 * 56, "longest_edge": 400 * 400}},
    ),
    "qwen3-vl": (
        f"{MODELS}.qwen2_vl.image_processing_qwen2_vl:Qwen2VLImageProcessor",
        {"size": {"shortest_edge": 64 * 64, "longest_edge": 400 * 400}, "patch_size": 16},
    ),
}


def pictures() -> dict[str, np.ndarray]:
    found = {}
    for n, (width, height) in enumerate(SIZES):
        noise = np.random.default_rng(n).integers(0, 256, (height, width, 3), np.uint8)
        found[f"noise {width}x{height}"] = noise
        found[f"photo {width}x{height}"] = np.asarray(photo("astronaut.png").convert("RGB").resize((width, height)))
    return found


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    if not FOLDER.is_dir():
        pytest.skip("torchvision is not in .cache/torchvision; make torchvision puts it there")
    folder = tmp_path_factory.mktemp("torchvision")
    cases, given, results = folder / "cases.json", folder / "pictures.npz", folder / "results.npz"
    options = {name: (where, without_name(how)) for name, (where, how) in CASES.items()}
    cases.write_text(json.dumps(options))
    np.savez(given, **pictures())
    command = [sys.executable, "-m", "tests.processor.pictures.torchvision_reference"]
    subprocess.run([*command, FOLDER, cases, given, results], check=True, cwd=ROOT)
    with np.load(results) as made:
        return dict(made)


def without_name(options):
    return {name: value for name, value in options.items() if name != "image_processor_type"}


def ours(case: str, array: np.ndarray, limits: MediaLimits) -> np.ndarray:
    """The normalised pixels in the order of the processor's: [pictures or tiles, 3, height, width] or, for Qwen, rows
    of patches."""
    _, options = CASES[case]
    if case == "internvl":
        settings = TileSettings.read(options, 56).by("torchvision")
    else:
        read = QwenSettings.read if case.startswith("qwen") else ClipSettings.read
        settings = read({"do_center_crop": case != "llava-onevision"} | options).by("torchvision")
    if isinstance(settings, QwenSettings):
        pixels = QwenImages(settings).pixels(from_image(Image.fromarray(array), limits))
    elif isinstance(settings, TileSettings):
        pixels = TileImages(settings, 4).pixels(from_image(Image.fromarray(array), limits))
    elif case in ("llava-next", "llava-onevision"):
        points = tuple(map(tuple, POINTS))
        tiles = AnyresImages(AnyresSettings(tile=56, patch=14, pinpoints=points, clip=settings))
        pixels = tiles.pixels(from_image(Image.fromarray(array), limits))
    else:
        pixels = ClipImages(settings, 1).pixels(from_image(Image.fromarray(array), limits))[None]
    scaled = Normalising(settings, torch.device("cpu"))(torch.from_numpy(pixels))  # [n, height, width, 3]
    if not isinstance(settings, QwenSettings):
        return scaled.permute(0, 3, 1, 2).numpy()
    p, m = settings.patch, settings.merge
    grid = scaled[0].unflatten(1, (-1, m, p)).unflatten(0, (-1, m, p))  # [h, m, p, w, m, p, 3]
    rows = grid.permute(0, 3, 1, 4, 6, 2, 5)[..., None, :, :].expand(*[-1] * 5, settings.temporal, -1, -1)
    return rows.flatten(4).flatten(0, 3).numpy()


@pytest.mark.parametrize("case", CASES)
def test_normalised_pixels_equal_torchvisions_processor(case, references):
    limits = MediaLimits(resampler=build_resampler("resample_int16"))
    for name, array in pictures().items():
        theirs = references[f"{case}|{name}"]
        made = ours(case, array, limits)
        theirs = theirs[0] if theirs.ndim == 5 else theirs
        assert made.dtype == theirs.dtype == np.float32
        assert np.array_equal(made, theirs[: len(made)]), (case, name, np.abs(made - theirs[: len(made)]).max())
        assert not theirs[len(made) :].any(), "padding only"
