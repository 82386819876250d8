"""DALI's pictures are nearly Pillow's; what it does not take, or cannot decode, is Pillow's entirely."""

import io

import numpy as np
import pytest
from PIL import Image

from hydrainfer.checkpoint import ClipSettings, PixelBounds, QwenSettings
from hydrainfer.core import MediaError
from hydrainfer.processor import ImagePart, MediaLimits, MediaWorkers
from hydrainfer.processor.pictures.clip import ClipImages
from hydrainfer.processor.pictures.qwen import QwenImages
from hydrainfer.processor.workers.prepare import Seal, prepare_image
from tests.equivalence.reference import photo

pytest.importorskip("nvidia.dali", reason="the dali extra is not installed")
pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]
DALI, PILLOW, SEAL = MediaLimits(dali=True), MediaLimits(), Seal(b"", "float32")
CLIP = ClipImages(ClipSettings(backend="pillow", resize=224, crop=(224, 224)), 1)
QWEN = QwenImages(QwenSettings(backend="pillow", bounds=PixelBounds(56 * 56, 448 * 448)))


def jpeg(name="astronaut.png", mode="RGB", **options):
    file = io.BytesIO()
    photo(name).convert(mode).save(file, "JPEG", quality=90, **options)
    return file.getvalue()


def made(data, adapter, limits):
    (found,) = prepare_image(ImagePart(data, "p"), adapter, limits, SEAL)
    return found


@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"progressive": True}], ids=["420", "444", "progressive"])
@pytest.mark.parametrize("adapter", [CLIP, QWEN], ids=["clip", "qwen"])
@pytest.mark.parametrize("name", ["astronaut.png", "coffee.png", "rocket.jpg", "retina.jpg"])
def test_photographs_differ_little(name, adapter, options):
    data = jpeg(name, **options)
    ours, theirs = made(data, adapter, DALI), made(data, adapter, PILLOW)
    assert ours.item == theirs.item and ours.pixels.shape == theirs.pixels.shape and ours.key != theirs.key
    difference = np.abs(ours.pixels.astype(int) - theirs.pixels)
    print(name, options, "mean", difference.mean().round(3), "greatest", difference.max())
    assert difference.any() and difference.mean() < 0.3 and difference.max() <= 16


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return jpeg(exif=exif)


def png():
    file = io.BytesIO()
    photo("coffee.png").save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("data", [turned(), jpeg(mode="L"), jpeg(mode="CMYK"), png()], ids=["exif", "L", "CMYK", "png"])
def test_pictures_other_than_plain_jpegs_are_decoded_by_pillow(data):
    assert np.array_equal(made(data, QWEN, DALI).pixels, made(data, QWEN, PILLOW).pixels)


@pytest.mark.parametrize("damage", [slice(0, 5000), slice(0, 300), slice(0, 20)])
def test_damage_has_the_usual_words_and_the_next_picture_is_well(damage):
    with pytest.raises(MediaError, match="damaged or cut off"):
        made(jpeg()[damage], CLIP, DALI)
    assert made(jpeg(), CLIP, DALI).pixels.shape == (224, 224, 3)


def test_a_worker_has_it_and_its_limits():
    limits = MediaLimits(dali=True, max_pixels=300_000)
    workers = MediaWorkers(1, limits)
    try:
        first = workers.submit(prepare_image, ImagePart(jpeg(), "p"), CLIP, limits, SEAL).result()
        assert np.array_equal(first[0].pixels, made(jpeg(), CLIP, DALI).pixels)
        (pid,) = workers.pids
        large = io.BytesIO()
        Image.new("RGB", (1000, 301)).save(large, "JPEG")
        with pytest.raises(MediaError, match="more than 300000 pixels"):
            workers.submit(prepare_image, ImagePart(large.getvalue(), "p"), CLIP, limits, SEAL).result()
        assert workers.pids == [pid]
    finally:
        workers.close()
