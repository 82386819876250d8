"""Our pixels are the Hugging Face processor's, bit by bit."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import skimage
from PIL import Image

from hydrainfer.checkpoint import ClipSettings, locate_model
from hydrainfer.processor.messages.chat import ImagePart
from hydrainfer.processor.pictures import adapter
from hydrainfer.processor.pictures.clip import ClipImages, gemma_images
from hydrainfer.processor.pictures.media import MediaLimits, Picture, decode_image
from hydrainfer.processor.workers.prepare import Seal, prepare_image
from tests.pillow import configured

pytestmark = pytest.mark.cpu
DATA = Path(skimage.__file__).parent / "data"
PHOTOS = ["astronaut.png", "camera.png", "rocket.jpg", "logo.png", "text.png", "no_time_for_that_tiny.gif"]
CONFIGS = [
    {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    {"size": 224, "crop_size": 224, "resample": 2},
    {"size": {"shortest_edge": 200}, "crop_size": {"height": 335, "width": 338}, "resample": 1},
    {"size": {"height": 100, "width": 51}, "do_center_crop": False},
    {"do_resize": False, "crop_size": 301},
]


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
@pytest.mark.parametrize("name", PHOTOS)
def test_pixels_equal_clip(config, name):
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    data = (DATA / name).read_bytes()
    reference = CLIPImageProcessorPil(do_rescale=False, do_normalize=False, **config)
    theirs = np.asarray(reference(Image.open(io.BytesIO(data)), return_tensors="np")["pixel_values"][0])
    ours = ClipImages(ClipSettings.read(config).by("pillow"), 1).pixels(decode_image(data, MediaLimits()))
    assert ours.dtype == np.uint8 and ours.flags.c_contiguous
    assert np.array_equal(ours, theirs.transpose(1, 2, 0))


@pytest.mark.parametrize("size", [(1, 1), (3, 500), (500, 3), (56, 56), (57, 56)])
def test_odd_sizes_and_padding_equal_llavas_own_processor(size):
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
    for pad in (False, True):
        config = {"do_pad": pad, "size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
        theirs = LlavaImageProcessorPil(do_rescale=False, do_normalize=False, **config)(image, return_tensors="np")
        settings = ClipSettings.read({**config, "image_processor_type": "LlavaImageProcessor"})
        ours = ClipImages(settings.by("pillow"), 1).pixels(Picture(image, "RGB"))
        assert np.array_equal(ours, np.asarray(theirs["pixel_values"][0]).transpose(1, 2, 0))


@pytest.mark.parametrize("size", [(1, 1), (7, 5), (40, 590), (290, 37), (896, 896), (1500, 1000)])
def test_pixels_equal_gemma3(size):
    """One size for all, whatever their shape, by the checkpoint's own preprocessor_config.json."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    given = json.loads((locate_model("gemma-3-4b") / "preprocessor_config.json").read_text())
    reference = Gemma3ImageProcessorPil(**given | {"do_rescale": False, "do_normalize": False})
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
    theirs = np.asarray(reference(image, return_tensors="np")["pixel_values"][0])
    ours = gemma_images(configured(locate_model("gemma-3-4b")))
    assert np.array_equal(ours.pixels(Picture(image, "RGB")), theirs.transpose(1, 2, 0))
    item = ours.fit(*image.size)
    assert item.n_tokens == 256 and item.whole


@pytest.mark.parametrize("size", [(1920, 1080), (1080, 1920), (4096, 4096), (700, 671)])
def test_fast_jpeg_differs_little_and_is_another_picture(size):
    out = io.BytesIO()
    Image.open(DATA / "astronaut.png").convert("RGB").resize(size).save(out, "JPEG", quality=90)
    fast, exact = MediaLimits(fast_jpeg=True), MediaLimits()
    seen = ClipImages(ClipSettings.read(CONFIGS[0]), 1)
    part, seal = ImagePart(out.getvalue(), ""), Seal(b"", "")
    (ours,), (theirs,) = (prepare_image(part, seen, how, seal) for how in (fast, exact))
    difference = np.abs(ours.pixels.astype(int) - theirs.pixels)
    print(size, "mean", difference.mean(), "greatest", difference.max())
    assert ours.key != theirs.key and ours.item == theirs.item
    assert difference.mean() < 1.0 and difference.max() <= 32
    assert bool(difference.any()) == (min(size) >= 2 * 336), "only where half the size is enough"
    with_grid = type("WithGrid", (), {"fit": seen.fit, "pixels": seen.pixels, "parameters": b""})()
    assert np.array_equal(prepare_image(part, with_grid, fast, seal)[0].pixels, theirs.pixels)


def test_the_key_depends_on_everything_that_the_embedding_does():
    image = Image.new("RGB", (4, 2), (1, 2, 3))

    def content_key(picture, *rest, made=(3, 2, 3), value=0):
        return adapter.content_key(picture, np.full(made, value, np.uint8), *rest)

    base = content_key(Picture(image, "RGB"), b"p", b"w", "float32")
    assert base == content_key(Picture(image.copy(), "RGB"), b"p", b"w", "float32")
    other = Image.new("RGB", (2, 4), (1, 2, 3))
    changed = [
        content_key(Picture(other, "RGB"), b"p", b"w", "float32"),
        content_key(Picture(image, "P"), b"p", b"w", "float32"),
        content_key(Picture(image, "RGB"), b"pw", b"", "float32"),
        content_key(Picture(image, "RGB"), b"p", b"v", "float32"),
        content_key(Picture(image, "RGB"), b"p", b"w", "bfloat16"),
        content_key(Picture(image, "RGB"), b"p", b"w", "float32", value=1),
        content_key(Picture(image, "RGB"), b"p", b"w", "float32", made=(2, 3, 3)),
    ]
    assert len({base, *changed}) == 8
    settings = [ClipSettings.read(c) for c in ({}, {"do_rescale": False}, {"image_mean": [0.5, 0.5, 0.5]})]
    assert len({ClipImages(s, 1).parameters for s in settings}) == 3
