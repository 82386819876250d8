"""Resizing in torchvision's arithmetic, compiled and by a copy of its rules, is torch's to the last bit."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from PIL import Image

from hydrainfer.assemble import media
from hydrainfer.assemble.media import backend_name, media_limits, media_workers, resampler
from hydrainfer.checkpoint import ClipSettings, PixelBounds, QwenSettings, QwenVideoSettings, locate_model
from hydrainfer.config import load
from hydrainfer.config.shipped import shipped
from hydrainfer.core import ConfigError
from hydrainfer.families import read_config
from hydrainfer.ops.build import _compiler, build_resampler
from hydrainfer.processor import ImagePart, MediaLimits, VideoReading
from hydrainfer.processor.messages import VideoPart
from hydrainfer.processor.pictures import resample_int16
from hydrainfer.processor.pictures.anyres import AnyresImages, AnyresSettings
from hydrainfer.processor.pictures.clip import ClipImages
from hydrainfer.processor.pictures.media import from_image
from hydrainfer.processor.pictures.qwen import QwenImages
from hydrainfer.processor.pictures.qwen_video import QwenVideos
from hydrainfer.processor.workers.prepare import Seal, prepare_image, prepare_video
from tests.equivalence.reference import photo

pytestmark = pytest.mark.cpu
MODES = {
    Image.Resampling.LANCZOS: "lanczos",
    Image.Resampling.BILINEAR: "bilinear",
    Image.Resampling.BICUBIC: "bicubic",
}
SPECIAL = [
    ((1, 500), (3, 9)),
    ((500, 1), (9, 3)),
    ((1, 1), (300, 30)),
    ((3, 3), (1, 1)),
    ((5, 7), (2, 2)),
    ((2, 900), (3, 90)),
    ((100, 100), (1, 1)),
    ((64, 48), (64, 48)),
    ((64, 48), (64, 44)),
    ((64, 48), (70, 48)),
    ((640, 480), (644, 476)),
]
SIZES = SPECIAL + [tuple(map(tuple, np.random.default_rng(i).integers(1, 300, (2, 2)).tolist())) for i in range(50)]


@pytest.fixture(scope="module")
def library():
    path = build_resampler("resample_int16")
    if not path:
        pytest.skip("no compiler here")
    return path


@pytest.fixture(scope="module")
def plain_library(tmp_path_factory):
    """The same kernel as a processor without AVX2 runs it."""
    if _compiler() is None:
        pytest.skip("no compiler here")
    path = tmp_path_factory.mktemp("plain") / "resample_int16.so"
    source = shipped("kernels") / "cpu" / "resample_int16.cpp"
    subprocess.run([_compiler(), "-std=c++17", "-O2", "-shared", "-fPIC", source, "-o", path], check=True)
    return str(path)


def picture(n: int, width: int, height: int) -> Image.Image:
    """A photograph, noise, or noise in black and white only, which overshoots most."""
    if n % 3 == 0:
        return photo("astronaut.png").convert("RGB").resize((width, height))
    values = np.random.default_rng(n).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values if n % 3 == 1 else (values > 127) * np.uint8(255))


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def torchs(image: Image.Image, width: int, height: int, mode: str) -> np.ndarray:
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]  # channels last
    made = torch.nn.functional.interpolate(pixels, (height, width), mode=mode, antialias=True)
    return made[0].permute(1, 2, 0).numpy()


def weight(mode: str, x: float) -> float:
    x = abs(x)
    if mode == "bilinear":
        return max(1 - x, 0.0)
    if mode == "lanczos":
        return float(np.sinc(x) * np.sinc(x / 3)) if x < 3 else 0.0
    if x < 1:
        return (1.5 * x - 2.5) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * -0.5 if x < 2 else 0.0


def one_axis(pixels: np.ndarray, n_out: int, mode: str) -> np.ndarray:
    """The first axis resized as the rules say, one output after the other."""
    n_in = len(pixels)
    stretch = max(n_in / n_out, 1.0)
    reach = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}[mode] * stretch
    shares, begins = [], []
    for i in range(n_out):
        centre = (i + 0.5) * (n_in / n_out)
        begin, end = max(int(centre - reach + 0.5), 0), min(int(centre + reach + 0.5), n_in)
        raw = [weight(mode, (at - centre + 0.5) * (1 / stretch)) for at in range(begin, end)]
        shares.append([w / sum(raw) for w in raw])
        begins.append(begin)
    bits, most = 0, max(map(max, shares))
    while bits < 22 and int(0.5 + most * 2 ** (bits + 1)) < 2**15:
        bits += 1
    out = np.empty((n_out, *pixels.shape[1:]), np.uint8)
    for i, (begin, share) in enumerate(zip(begins, shares, strict=True)):
        whole = np.array([int(w * 2**bits + np.copysign(0.5, w)) for w in share])
        total = np.tensordot(whole, pixels[begin : begin + len(whole)].astype(np.int64), 1)
        out[i] = np.clip((total + 2 ** (bits - 1)) >> bits, 0, 255)
    return out


@pytest.mark.parametrize("filter", MODES)
def test_kernel_and_the_rules_equal_torch(filter, library, plain_library):
    for n, (size, (width, height)) in enumerate(SIZES):
        image = picture(n, *size)
        theirs = torchs(image, width, height, MODES[filter])
        rules = one_axis(np.asarray(image).swapaxes(0, 1), width, MODES[filter]).swapaxes(0, 1)
        assert np.array_equal(one_axis(rules, height, MODES[filter]), theirs), (size, width, height)
        rng = np.random.default_rng(n)
        left, top = rng.integers(0, [width, height]).tolist()
        box = (left, top, int(rng.integers(left + 1, width + 1)), int(rng.integers(top + 1, height + 1)))
        for path in (library, plain_library, ""):
            ours = resample_int16.resized(image, width, height, filter, library=path)
            part = resample_int16.resized(image, width, height, filter, box, path)
            assert ours.flags.c_contiguous and part.flags.c_contiguous
            assert np.array_equal(ours, theirs), (size, width, height, path)
            assert np.array_equal(part, theirs[box[1] : box[3], box[0] : box[2]]), (size, width, height, box, path)


def test_a_picture_of_several_strips_equals_torch(library):
    image = picture(1, 2600, 2100)
    ours = resample_int16.resized(image, 600, 500, Image.Resampling.BICUBIC, library=library)
    assert np.array_equal(ours, torchs(image, 600, 500, "bicubic"))


def test_torch_resizes_if_the_kernel_has_been_removed(tmp_path):
    image = picture(2, 64, 48)
    ours = resample_int16.resized(image, 32, 24, Image.Resampling.BICUBIC, library=str(tmp_path / "none.so"))
    assert np.array_equal(ours, torchs(image, 32, 24, "bicubic"))


@pytest.mark.parametrize("filter", MODES)
def test_the_stored_digests_are_those_of_the_installed_torch(filter):
    def resize(image, width, height, resample):
        return torchs(image, width, height, MODES[resample])

    assert resample_int16.digest(resize, filter) == resample_int16._DIGESTS[filter]


def test_a_kernel_that_resizes_differently_is_not_used_and_the_log_says_so(library, tmp_path, monkeypatch, caplog):
    """Such as one that adds no half before it cuts the fraction."""
    source = (shipped("kernels") / "cpu" / "resample_int16.cpp").read_text().replace("1 << (bits - 1)", "0")
    (tmp_path / "wrong.cpp").write_text(source)
    wrong = str(tmp_path / "wrong.so")
    flags = ["-std=c++17", "-O2", "-march=native", "-shared", "-fPIC"]
    subprocess.run([_compiler(), *flags, tmp_path / "wrong.cpp", "-o", wrong], check=True)
    assert resample_int16.agrees(library) and not resample_int16.agrees(wrong)
    monkeypatch.setattr(media, "build_resampler", lambda source: wrong)
    assert resampler(load({"model": "x"}).config) == ""
    assert [r.message for r in caplog.records] == ["our kernel resizes differently here; using torch (slower)"]


WITHOUT_TORCH = """
import sys
from PIL import Image
from hydrainfer.checkpoint import ClipSettings
from hydrainfer.processor import ClipImages, MediaLimits, agrees
from hydrainfer.processor.pictures import from_image
library = sys.argv[1]
adapter = ClipImages(ClipSettings(), 1)
adapter.pixels(from_image(Image.new("RGB", (300, 200)), MediaLimits(resampler=library)))
print(agrees(library, "torchvision"), "torch" in sys.modules)
"""


def test_neither_the_check_nor_the_kernel_imports_torch(library):
    ran = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, library], capture_output=True, text=True, check=True)
    assert ran.stdout == "True False\n"


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_worker_loads_torch_only_if_it_resizes_and_before_its_memory_is_limited(library, by_torch, tmp_path):
    config = load({"model": "x", "media_workers": 1}).config
    limits = media_limits(config, "" if by_torch else library)
    workers, part = media_workers(config, limits), ImagePart(png(picture(1, 300, 200)), "")
    adapter = ClipImages(CLIP, 1)
    try:
        workers.warm()
        workers._threads.submit(lambda: None).result()  # the worker has started
        maps = Path(f"/proc/{workers.pids[0]}/maps").read_text()
        (made,) = workers.submit(prepare_image, part, adapter, limits, Seal(b"", "")).result()
    finally:
        workers.close()
    assert ("libtorch" in maps) == by_torch
    assert np.array_equal(made.pixels, adapter.pixels(from_image(picture(1, 300, 200), MediaLimits())))


CLIP = ClipSettings(resize=56, crop=(56, 56))
QWEN = QwenSettings(bounds=PixelBounds(56 * 56, 200 * 200))


@pytest.mark.parametrize(
    ("adapter", "settings"),
    [
        (lambda s: ClipImages(s, 1), CLIP),
        (lambda s: AnyresImages(AnyresSettings(tile=56, patch=14, pinpoints=((56, 112), (112, 112)), clip=s)), CLIP),
        (QwenImages, QWEN),
    ],
    ids=["clip", "anyres", "qwen"],
)
def test_every_adapter_uses_the_backend_and_names_it_in_its_keys(adapter, settings, library):
    image = picture(1, 300, 200)
    pillow, torchvision = adapter(settings.by("pillow")), adapter(settings)
    by_pillow = pillow.pixels(from_image(image, MediaLimits()))
    compiled, by_torch = (torchvision.pixels(from_image(image, MediaLimits(resampler=path))) for path in (library, ""))
    assert np.array_equal(compiled, by_torch) and not np.array_equal(compiled, by_pillow)
    assert pillow.parameters != torchvision.parameters


def test_frames_of_videos_equal_torch_and_have_other_keys(library):
    settings = QwenVideoSettings(frames=QWEN, times="counted")
    frames = np.random.default_rng(3).integers(0, 256, (4, 90, 160, 3), np.uint8)
    part, seal = VideoPart(frames, ""), Seal(b"", "")
    (ours,) = prepare_video(part, QwenVideos(settings), VideoReading(resampler=library), seal, 4)
    (pillows,) = prepare_video(part, QwenVideos(settings.by("pillow")), VideoReading(), seal, 4)
    height, width = ours.pixels.shape[1:3]
    theirs = [torchs(Image.fromarray(frame), width, height, "bicubic") for frame in frames]
    assert np.array_equal(ours.pixels, np.stack(theirs)) and ours.key != pillows.key


@pytest.mark.parametrize("named", [{}, {"image_backend": "auto"}, {"image_backend": "torchvision"}])
def test_the_default_chooses_the_kernel_and_the_start_line_says_so(library, named):
    config = load({"model": "x"} | named).config
    assert resampler(config) == library and not resampler(replace(config, native_kernels=False))
    assert backend_name(config, media_limits(config, library)) == "pillow, torchvision's pixels, our resizing"
    assert backend_name(config, media_limits(config)) == "pillow, torchvision's pixels, torch's resizing"


@pytest.mark.parametrize("name", ["llava-1.5-7b", "llava-next-7b", "gemma-3-4b"])
def test_a_models_description_names_the_backend(name):
    model = read_config(locate_model(name))
    assert model.by("torchvision") == model
    assert model.by("pillow") != model and model.by("pillow").by("torchvision") == model


@pytest.mark.parametrize("filter", [Image.Resampling.NEAREST, Image.Resampling.BOX, Image.Resampling.HAMMING])
def test_a_filter_that_torch_lacks_is_refused_in_one_line(filter):
    settings = ClipSettings(resample=int(filter))
    assert settings.by("pillow").resample == filter
    with pytest.raises(ConfigError, match="use image_backend pillow") as e:
        settings.by("torchvision")
    assert e.value.param == "image_backend" and "\n" not in str(e.value)
