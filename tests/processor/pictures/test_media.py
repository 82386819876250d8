"""Pictures from outside: what is accepted comes out right, what is not is a typed error that says what to send."""

import base64
import io
import struct
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import skimage
from PIL import Image

from hydrainfer.core import InvalidRequest, MediaError, RequestTooLarge
from hydrainfer.processor.pictures.media import MediaLimits, decode_image, from_image, read_image_url

pytestmark = pytest.mark.unit
LIMITS = MediaLimits()
PHOTO = Path(skimage.__file__).parent / "data" / "astronaut.png"


def encoded(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def pixels(data, limits=LIMITS):
    return np.asarray(decode_image(data, limits).image)


def photo(mode="RGB"):
    return Image.open(PHOTO).convert("RGB").resize((64, 48)).convert(mode)


def png_header(width, height):
    ihdr = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + ihdr + struct.pack(">I", zlib.crc32(ihdr)) + b"\0\0\0\0IDAT"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_four_formats_are_read(kind):
    picture = decode_image(encoded(photo(), kind), LIMITS)
    assert picture.image.mode == "RGB" and picture.image.size == (64, 48)
    assert np.abs(np.asarray(picture.image).astype(int) - np.asarray(photo())).mean() < 16


@pytest.mark.parametrize(
    ("kind", "name"), [("TIFF", "TIFF"), ("BMP", "BMP"), ("JPEG2000", "JPEG 2000"), ("AVIF", "HEIC"), ("ICO", "not a")]
)
def test_other_formats_are_named_and_refused(kind, name):
    try:
        data = encoded(photo(), kind)
    except (KeyError, OSError):
        pytest.skip(f"this PIL cannot write {kind}")
    with pytest.raises(MediaError, match=f"{name}.*supported formats are JPEG, PNG, WebP and GIF"):
        decode_image(data, LIMITS)


@pytest.mark.parametrize("data", [b"", b"<svg xmlns=''/>", b"<?xml?><svg/>", b"hello", bytes(100), b"%PDF-1.4"])
def test_bytes_that_are_no_picture_are_refused(data):
    with pytest.raises(MediaError, match="supported formats"):
        decode_image(data, LIMITS)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("part", [0.05, 0.5, 0.9])
def test_a_truncated_picture_is_refused_without_the_decoders_words(kind, part):
    data = encoded(Image.open(PHOTO).convert("RGB"), kind)
    with pytest.raises(MediaError, match="damaged or cut off") as e:
        decode_image(data[: int(len(data) * part)], LIMITS)
    assert "0x" not in e.value.message and e.value.__cause__ is None and e.value.__suppress_context__


def test_a_png_with_flipped_bytes_is_refused():
    """Pillow decodes it: its decompressor may find nothing wrong."""
    stored = io.BytesIO()
    photo().save(stored, "PNG", compress_level=0)
    for data in (encoded(photo(), "PNG"), stored.getvalue()):
        at = data.index(b"IDAT") + (len(data) - data.index(b"IDAT")) // 2
        assert decode_image(data, LIMITS).image.size == (64, 48)
        with pytest.raises(MediaError, match="damaged or cut off"):
            decode_image(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :], LIMITS)


def test_random_damage_never_raises_anything_else():
    rng = np.random.default_rng(0)
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        whole = encoded(photo(), kind)
        for _ in range(60):
            data = bytearray(whole)
            for at in rng.integers(4, len(data), 8):
                data[at] = rng.integers(256)
            with suppress(MediaError, RequestTooLarge):
                assert decode_image(bytes(data), LIMITS).image.mode == "RGB"


@pytest.mark.parametrize("size", [(30_000, 30_000), (2**31 - 1, 2**31 - 1), (9_500, 9_500)])
def test_a_bomb_is_refused_by_its_header(size):
    with pytest.raises(MediaError, match="more than 89478485 pixels"):
        decode_image(png_header(*size), LIMITS)


def test_limits_of_bytes_and_sides():
    with pytest.raises(RequestTooLarge, match="limit of 100"):
        decode_image(encoded(photo()), MediaLimits(max_image_bytes=100))
    with pytest.raises(MediaError, match=r"2000 x 2.*200 times"):
        decode_image(encoded(Image.new("RGB", (2000, 2))), LIMITS)
    with pytest.raises(MediaError, match="200 times"):
        from_image(Image.new("RGB", (2000, 2)), LIMITS)


def test_one_pixel_is_a_picture():
    assert pixels(encoded(Image.new("RGB", (1, 1), (1, 2, 3)))).tolist() == [[[1, 2, 3]]]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(orientation):
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photo(), "PNG", exif=exif)
    assert (pixels(data) == np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))).all()


def test_damaged_exif_is_ignored():
    data = encoded(photo(), "JPEG", exif=b"Exif\0\0II*\0" + b"\xff" * 40)
    assert pixels(data).shape == (48, 64, 3)


def test_modes_become_rgb():
    assert (pixels(encoded(photo("L")))[..., 0] == np.asarray(photo("L"))).all()
    cmyk = encoded(photo("CMYK"), "JPEG", quality=95)
    assert np.abs(pixels(cmyk).astype(int) - np.asarray(photo())).mean() < 8
    palette = encoded(photo("P"))
    assert (pixels(palette) == np.asarray(photo("P").convert("RGB"))).all()


def test_sixteen_bit_grey_keeps_its_high_byte():
    deep = Image.fromarray(np.arange(256, dtype=np.uint16)[None].repeat(4, 0) * 257)
    assert (pixels(encoded(deep))[0, :, 1] == np.arange(256)).all()


def test_transparency_is_composited_onto_white():
    clear = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    clear.putpixel((1, 0), (255, 0, 0, 255))
    assert pixels(encoded(clear)).tolist() == [[[255, 255, 255], [255, 0, 0]]]
    assert pixels(encoded(Image.new("LA", (1, 1), (9, 0)))).tolist() == [[[255, 255, 255]]]
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([7, 8, 9])
    assert pixels(encoded(palette, transparency=0)).tolist() == [[[255, 255, 255]]]


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_of_an_animation_the_first_frame_is_taken(kind):
    frames = [Image.new("RGB", (8, 8), c) for c in ("red", "green", "blue")]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    assert np.abs(pixels(data).astype(int) - (255, 0, 0)).max() < 8


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://a/b.png", "https://a/b.png", "ftp://x", "cat.png", ""])
def test_only_data_urls_are_read(url):
    with pytest.raises(InvalidRequest, match="data: URL") as e:
        read_image_url(url, LIMITS, "p")
    assert "passwd" not in e.value.message


@pytest.mark.parametrize("body", ["####", "abc", "YQ= =", "YWJj\n", "YQ", "é"])
def test_base64_is_strict(body):
    with pytest.raises(InvalidRequest, match="base64"):
        read_image_url(f"data:image/png;base64,{body}", LIMITS, "p")


def test_data_urls():
    good = base64.b64encode(b"abc").decode()
    assert read_image_url(f"data:image/png;base64,{good}", LIMITS, "p") == b"abc"
    assert read_image_url(f"DATA:;BASE64,{good}", LIMITS, "p") == b"abc"
    for bad in (f"data:image/png,{good}", "data:image/png;base64", "data:"):
        with pytest.raises(InvalidRequest, match="must look like"):
            read_image_url(bad, LIMITS, "p")
    with pytest.raises(RequestTooLarge):
        read_image_url("data:;base64," + "A" * 400, MediaLimits(max_image_bytes=100), "p")
