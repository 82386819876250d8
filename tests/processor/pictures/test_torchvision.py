"""The pixels of pictures and videos that enter a tower are those of transformers' torchvision processors, to the last
bit."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hydrainfer.checkpoint import (
    ClipSettings,
    IdeficsSettings,
    PixtralSettings,
    QwenSettings,
    QwenVideoSettings,
    SquareVideoSettings,
    TileSettings,
)
from hydrainfer.models.picture import Normalising
from hydrainfer.ops.build import build_resampler
from hydrainfer.processor import MediaLimits, VideoReading
from hydrainfer.processor.messages import VideoPart
from hydrainfer.processor.pictures.adapter import MediaItem, VideoShape
from hydrainfer.processor.pictures.anyres import AnyresImages, AnyresSettings
from hydrainfer.processor.pictures.clip import ClipImages
from hydrainfer.processor.pictures.idefics import IdeficsImages
from hydrainfer.processor.pictures.media import from_image
from hydrainfer.processor.pictures.pixtral import PixtralImages
from hydrainfer.processor.pictures.qwen import QwenImages
from hydrainfer.processor.pictures.qwen_video import QwenVideos
from hydrainfer.processor.pictures.square_video import SquareVideos
from hydrainfer.processor.pictures.tiles import TileImages
from hydrainfer.processor.workers.prepare import Seal, prepare_video
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
TILES = {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}}
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
    "clip, scaled only": (
        f"{MODELS}.clip.image_processing_clip:CLIPImageProcessor",
        CLIP | {"do_normalize": False},
    ),
    "clip, with a mean of 0 and a deviation of 1": (
        f"{MODELS}.clip.image_processing_clip:CLIPImageProcessor",
        CLIP | {"image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]},
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
    "idefics3": (f"{MODELS}.idefics3.image_processing_idefics3:Idefics3ImageProcessor", TILES),
    "smolvlm": (f"{MODELS}.smolvlm.image_processing_smolvlm:SmolVLMImageProcessor", TILES),
    "internvl": (
        f"{MODELS}.got_ocr2.image_processing_got_ocr2:GotOcr2ImageProcessor",
        {"size": SQUARE, "crop_to_patches": True},
    ),
    "mistral 3": (
        f"{MODELS}.pixtral.image_processing_pixtral:PixtralImageProcessor",
        {"size": {"longest_edge": 400}, "patch_size": 28},  # as the processor of text and pictures gives it
    ),
    "pixtral": (
        f"{MODELS}.pixtral.image_processing_pixtral:PixtralImageProcessor",
        {"size": {"longest_edge": 333}, "patch_size": {"height": 16, "width": 16}},
    ),
    "qwen2-vl": (
        f"{MODELS}.qwen2_vl.image_processing_qwen2_vl:Qwen2VLImageProcessor",
        {"size": {"shortest_edge": 56 * 56, "longest_edge": 400 * 400}},
    ),
    "qwen3-vl": (
        f"{MODELS}.qwen2_vl.image_processing_qwen2_vl:Qwen2VLImageProcessor",
        {"size": {"shortest_edge": 64 * 64, "longest_edge": 400 * 400}, "patch_size": 16},
    ),
    "glm-4v": (
        f"{MODELS}.glm4v.image_processing_glm4v:Glm4vImageProcessor",
        {"size": {"shortest_edge": 112 * 112, "longest_edge": 400 * 400}},
    ),
}
SQUARES = {
    "internvl, videos": (f"{MODELS}.internvl.video_processing_internvl:InternVLVideoProcessor", {"size": SQUARE}),
    "internvl, videos, first frame": (
        f"{MODELS}.internvl.video_processing_internvl:InternVLVideoProcessor",
        {"size": SQUARE, "initial_shift": False},
    ),
    "internvl, videos, shifted": (
        f"{MODELS}.internvl.video_processing_internvl:InternVLVideoProcessor",
        {"size": SQUARE, "initial_shift": 0.9},
    ),
    "llava-onevision, videos": (
        f"{MODELS}.llava_onevision.video_processing_llava_onevision:LlavaOnevisionVideoProcessor",
        {"size": SQUARE, "image_mean": [0.5, 0.4, 0.6]},
    ),
}
VIDEOS = {  # Qwen2.5-VL has the processor of Qwen2-VL
    "qwen2-vl, videos": (
        f"{MODELS}.qwen2_vl.video_processing_qwen2_vl:Qwen2VLVideoProcessor",
        {"size": {"shortest_edge": 56 * 56, "longest_edge": 200 * 200}},
    ),
    "qwen3-vl, videos": (
        f"{MODELS}.qwen3_vl.video_processing_qwen3_vl:Qwen3VLVideoProcessor",
        {"size": {"shortest_edge": 64 * 64, "longest_edge": 6 * 200 * 200}, "do_sample_frames": False},
    ),
}
FRAMES = [(6, 640, 480), (5, 375, 500), (2, 90, 160), (4, 61, 300), (3, 56, 56)]


def videos() -> dict[str, np.ndarray]:
    """uint8 [frames, height, width, 3] by name."""
    found = {}
    for n, width, height in FRAMES:
        noise = np.random.default_rng(n).integers(0, 256, (n, height, width, 3), np.uint8)
        shown = np.asarray(photo("astronaut.png").convert("RGB").resize((width, height)))
        found[f"noise {n} x {width}x{height}"] = noise
        found[f"photo {n} x {width}x{height}"] = np.stack([np.roll(shown, 3 * i, axis=1) for i in range(n)])
    return found


def lengths() -> dict[str, np.ndarray]:
    """Videos of which only the frames are chosen, as `torchvision_reference` takes them, by name. At most 300 are: of
    more, torch's numbers depend on the width of the machine's vectors."""
    rng, found = np.random.default_rng(5), {"one": (1, 25, 1, 0), "all": (8, 25, 8, 0)}
    for i in range(150):
        n, rate = int(rng.integers(1, 4000)), float(rng.uniform(5, 120))
        wanted = (0, max(float(rng.uniform(0, min(1, 300 / n))), 1.01 / n) * rate)
        found[f"length {i}"] = (n, rate, *(wanted if i % 2 else (int(rng.integers(1, min(n, 300) + 1)), 0)))
    return {name: np.array(four, np.float64) for name, four in found.items()}


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
    options = {name: (where, without_name(how)) for name, (where, how) in (CASES | VIDEOS).items()}
    options |= {name: (*case, True) for name, case in SQUARES.items()}
    cases.write_text(json.dumps(options))
    np.savez(given, **pictures(), **videos(), **lengths())
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
    readers = {"qwen2-vl": QwenSettings.read, "qwen3-vl": QwenSettings.read}
    readers |= {"glm-4v": partial(QwenSettings.read, in_time=True), "internvl": partial(TileSettings.read, tile=56)}
    readers |= dict.fromkeys(("idefics3", "smolvlm"), IdeficsSettings.read)
    readers |= {"mistral 3": partial(PixtralSettings.read, patch=14, merge=2, limit=400)}
    readers |= {"pixtral": partial(PixtralSettings.read, patch=16, merge=1, limit=1024)}
    given = {"do_center_crop": False} | options if case == "llava-onevision" else options
    settings = readers.get(case, ClipSettings.read)(given)
    if isinstance(settings, QwenSettings):
        pixels = QwenImages(settings).pixels(from_image(Image.fromarray(array), limits))
    elif isinstance(settings, PixtralSettings):
        pixels = PixtralImages(settings).pixels(from_image(Image.fromarray(array), limits))
    elif isinstance(settings, IdeficsSettings):
        pixels = IdeficsImages(settings, 4).pixels(from_image(Image.fromarray(array), limits))
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
    return patches(scaled.expand(settings.temporal, -1, -1, -1), settings)


def patches(frames: torch.Tensor, settings: QwenSettings) -> np.ndarray:
    """The rows of patches of normalised frames [n, height, width, 3], in a processor's order."""
    p, m = settings.patch, settings.merge
    grid = frames.unflatten(2, (-1, m, p)).unflatten(1, (-1, m, p)).unflatten(0, (-1, settings.temporal))
    rows = grid.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)  # [t, h, w, m, m, 3, temporal, p, p]
    return rows.flatten(5).flatten(0, 4).numpy()


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


@pytest.mark.parametrize("times", ["counted", "timed", "told"])
def test_frames_of_videos_equal_torchvisions_processor(times, references):
    """Those of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""
    case = "qwen3-vl, videos" if times == "told" else "qwen2-vl, videos"
    _, options = VIDEOS[case]
    sides = {"patch": 16, "mean": (0.5,) * 3, "std": (0.5,) * 3} if times == "told" else {}
    settings = QwenVideoSettings.read(options, times, 1.0, QwenSettings(**sides))
    reading = VideoReading(resampler=build_resampler("resample_int16"))
    normalised = Normalising(settings.frames, torch.device("cpu"))
    for name, frames in videos().items():
        made = prepare_video(VideoPart(frames, ""), QwenVideos(settings), reading, Seal(b"", ""), len(frames))
        rows = [patches(normalised(torch.from_numpy(each.pixels)), settings.frames) for each in made]
        theirs = references[f"{case}|{name}"]
        assert theirs.dtype == np.float32 and np.array_equal(np.concatenate(rows), theirs), (times, name)


@pytest.mark.parametrize("case", SQUARES)
def test_frames_that_are_one_square_are_chosen_and_made_as_by_torchvisions_processor(case, references):
    _, options = SQUARES[case]
    settings = SquareVideoSettings.read(options, 56, ClipSettings.read(options), 8, shifted="internvl" in case)
    adapter = SquareVideos(settings, 56, lambda *_: MediaItem(4))
    reading = VideoReading(resampler=build_resampler("resample_int16"))
    normalised = Normalising(settings.frames, torch.device("cpu"))
    for name, frames in videos().items():
        made = prepare_video(VideoPart(frames, ""), adapter, reading, Seal(b"", ""), len(frames))
        pixels = torch.cat([normalised(torch.from_numpy(each.pixels)) for each in made])
        theirs = references[f"{case}|{name}"][0]  # [frames, 3, height, width]
        assert theirs.dtype == np.float32 and np.array_equal(pixels.permute(0, 3, 1, 2).numpy(), theirs), name
    for name, four in lengths().items():
        n, rate, n_wanted, fps = four.tolist()
        chosen = adapter.configured({"num_frames": int(n_wanted) or None, "fps": fps or None})
        found = chosen.sample(VideoShape(int(n), rate, 64, 48), 10_000)
        theirs = [i for i in references[f"{case}|{name}"].tolist() if i < n]  # rounding may add one that is not there
        assert found == theirs, (name, n, rate, n_wanted, fps)
