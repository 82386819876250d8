"""The compiled resizing is Pillow's to the last bit, whatever the sizes, and gives way to it where it cannot be."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hydrainfer.assemble.media import media_limits, resampler, video_reading
from hydrainfer.checkpoint import ClipSettings, PixelBounds, QwenSettings, QwenVideoSettings
from hydrainfer.config import load
from hydrainfer.ops.build import build_resampler
from hydrainfer.processor import ImagePart, MediaLimits, MediaWorkers, VideoReading
from hydrainfer.processor.messages import VideoPart
from hydrainfer.processor.pictures import resample
from hydrainfer.processor.pictures.anyres import AnyresImages, AnyresSettings
from hydrainfer.processor.pictures.clip import ClipImages
from hydrainfer.processor.pictures.media import from_image
from hydrainfer.processor.pictures.qwen import QwenImages
from hydrainfer.processor.pictures.qwen_video import QwenVideos
from hydrainfer.processor.workers.prepare import Seal, prepare_image, prepare_video
from tests.equivalence.reference import photo

pytestmark = pytest.mark.cpu
FILTERS = [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS]
CLIP = ClipSettings(backend="pillow", resize=336, crop=(336, 336))
QWEN = QwenSettings(backend="pillow", bounds=PixelBounds(56 * 56, 500 * 500))


@pytest.fixture(scope="module")
def library():
    path = build_resampler()
    if not path:
        pytest.skip("no compiler or no AVX2 here")
    return path


def noise(rng, width, height):
    """Of all values, or black and white only, which overshoots most."""
    values = rng.integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values if rng.integers(2) else (values > 127) * np.uint8(255))


def check(image, size, filter, box, library):
    whole = np.asarray(image.resize(size, filter))
    made = resample.resized(image, *size, filter, box, library)
    left, top, right, bottom = box or (0, 0, *size)
    assert made.dtype == np.uint8 and made.flags.c_contiguous
    assert np.array_equal(made, whole[top:bottom, left:right]), (image.size, size, filter, box)


def test_pillow_resizes_if_the_kernel_has_been_removed(tmp_path):
    image = noise(np.random.default_rng(3), 64, 48)
    assert np.array_equal(
        resample.resized(image, 32, 24, Image.Resampling.BICUBIC, library=str(tmp_path / "resample.so")),
        np.asarray(image.resize((32, 24), Image.Resampling.BICUBIC)),
    )


@pytest.mark.parametrize("strip_bytes", [15 << 20, 1 << 14], ids=["in one piece", "in strips"])
@pytest.mark.parametrize("filter", FILTERS)
def test_equal_for_any_size_and_box(filter, strip_bytes, library, monkeypatch):
    monkeypatch.setattr(resample, "_STRIP_BYTES", strip_bytes)
    rng, n_kernel = np.random.default_rng(filter), 0
    for _ in range(150):
        width, height, *size = rng.integers(1, [400, 400, 300, 300]).tolist()
        left, top = rng.integers(0, size).tolist()
        box = (left, top, int(rng.integers(left + 1, size[0] + 1)), int(rng.integers(top + 1, size[1] + 1)))
        image = noise(rng, width, height)
        check(image, size, filter, box, library)
        check(image, size, filter, None, library)
        n_kernel += None not in (resample._taps(n, m, 0, m, filter) for n, m in zip(image.size, size, strict=True))
    assert n_kernel > 100, "most were meant for the kernel"


@pytest.mark.parametrize(
    ("size", "to"),
    [
        ((2600, 2100), (600, 600)),  # more than Pillow keeps in one piece
        ((2100, 2600), (2090, 300)),  # the same, columns first
        ((640, 480), (640, 476)),
        ((640, 480), (644, 480)),
        ((640, 480), (640, 480)),
        ((1, 1), (300, 300)),
        ((2, 900), (3, 9)),
    ],
)
def test_equal_for_sizes_that_are_special(size, to, library):
    check(noise(np.random.default_rng(1), *size), to, Image.Resampling.BICUBIC, None, library)


@pytest.mark.parametrize("filter", [Image.Resampling.NEAREST, Image.Resampling.BOX, Image.Resampling.HAMMING])
def test_other_filters_are_pillows(filter, library):
    check(noise(np.random.default_rng(2), 200, 100), (50, 70), filter, (3, 4, 40, 60), library)


@pytest.mark.parametrize("size", [(640, 480), (300, 800), (336, 336), (40, 30)])
@pytest.mark.parametrize(
    "adapter",
    [
        ClipImages(CLIP, 1),
        ClipImages(ClipSettings(backend="pillow", resize=200, crop=(335, 338), pad=True), 1),
        ClipImages(ClipSettings(backend="pillow", resize=None, crop=(301, 301)), 1),
        AnyresImages(AnyresSettings(tile=336, patch=14, pinpoints=((336, 672), (672, 336), (672, 672)), clip=CLIP)),
        QwenImages(QWEN),
    ],
    ids=["clip", "clip, padded", "clip, cropped only", "anyres", "qwen"],
)
def test_families_see_the_same_pixels(adapter, size, library):
    image = photo("astronaut.png").convert("RGB").resize(size)
    ours, theirs = (adapter.pixels(from_image(image, MediaLimits(resampler=path))) for path in (library, ""))
    assert ours.flags.c_contiguous and np.array_equal(ours, theirs)


def test_videos_are_the_same(library):
    adapter = QwenVideos(QwenVideoSettings(frames=QWEN, times="counted"))
    part = VideoPart(np.random.default_rng(3).integers(0, 256, (4, 270, 480, 3), np.uint8), "")
    made = (prepare_video(part, adapter, VideoReading(resampler=path), Seal(b"", ""), 4) for path in (library, ""))
    for ours, theirs in zip(*made, strict=True):
        assert np.array_equal(ours.pixels, theirs.pixels) and ours.key == theirs.key


def test_a_worker_uses_it(library, tmp_path):
    data = tmp_path / "photo.png"
    photo("coffee.png").save(data)
    adapter, part = ClipImages(CLIP, 1), ImagePart(data.read_bytes(), "")
    limits = MediaLimits(resampler=library)
    workers = MediaWorkers(1, limits)
    try:
        (made,) = workers.submit(prepare_image, part, adapter, limits, Seal(b"", "")).result()
        assert library in Path(f"/proc/{workers.pids[0]}/maps").read_text()
    finally:
        workers.close()
    (here,) = prepare_image(part, adapter, MediaLimits(), Seal(b"", ""))
    assert np.array_equal(made.pixels, here.pixels) and made.key == here.key


def test_chosen_by_options_and_only_if_it_agrees(library, monkeypatch):
    def chosen(**given):
        return resampler(load({"model": "x", "image_backend": "pillow", **given}).config)

    assert resample.agrees(library) and chosen() == library
    assert not chosen(native_kernels=False)
    config = load({"model": "x", "image_backend": "pillow"}).config
    assert media_limits(config, library).resampler == video_reading(config, library).resampler == library
    monkeypatch.setattr(resample, "_FRACTION_BITS", 14)  # as another version of Pillow might
    assert not resample.agrees(library) and not chosen()
