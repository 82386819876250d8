"""The forms in which a whole picture may come: PNGs with chunks beside the pixels, every kind of transparency, `data:`
URLs."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from hydrainfer.core import InvalidRequest, MediaError, RequestTooLarge
from hydrainfer.processor.pictures import MediaLimits, decode_image
from hydrainfer.processor.pictures.media import header_pixels, read_data_url
from tests.checkpoints import make_picture

pytestmark = pytest.mark.cpu
LIMITS = MediaLimits()
PIXELS = make_picture(3, 40)


def encoded(**options) -> bytes:
    out = io.BytesIO()
    Image.fromarray(PIXELS).save(out, "PNG", **options)
    return out.getvalue()


def chunk(kind: bytes, data: bytes, sound: bool = True) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data) ^ (not sound))


def with_chunk(kind: bytes, data: bytes, sound: bool = True, after_pixels: bool = False) -> bytes:
    png = encoded()
    at = png.index(b"IEND" if after_pixels else b"IDAT") - 4
    return png[:at] + chunk(kind, data, sound) + png[at:]


def texts(n: int) -> PngImagePlugin.PngInfo:
    note = PngImagePlugin.PngInfo()
    for i in range(n):
        note.add_text(f"note {i}", "A" * (1 << 21), zip=True)
    return note


BESIDE_PIXELS = {
    "compressed text of 2 MiB": encoded(pnginfo=texts(1)),
    "80 MiB of compressed text": encoded(pnginfo=texts(40)),
    "a colour profile of 1 MiB": encoded(icc_profile=b"x" * 9 + b"\0" * (1 << 20)),
    "international text": with_chunk(b"iTXt", b"n\0\1\0\0\0" + zlib.compress(b"A" * (1 << 21))),
    "a text with another checksum": with_chunk(b"tEXt", b"a\0b", sound=False),
    "a text that does not decompress": with_chunk(b"zTXt", b"a\0\0damaged"),
    "a profile that does not decompress": with_chunk(b"iCCP", b"a\0\0damaged"),
    "a time with another checksum": with_chunk(b"tIME", b"\7\xe8\1\1\1\1\1", sound=False),
    "a density that is too short": with_chunk(b"pHYs", b"\0"),
    "a chunk of its own": with_chunk(b"prVt", b"x" * 10, sound=False),
    "text behind the pixels": with_chunk(b"zTXt", b"n\0\0" + zlib.compress(b"A" * (1 << 21)), after_pixels=True),
}


@pytest.mark.parametrize("name", BESIDE_PIXELS)
def test_chunks_beside_the_pixels_do_not_make_a_picture_unreadable(name):
    data = BESIDE_PIXELS[name]
    assert np.array_equal(np.asarray(decode_image(data, LIMITS).image), PIXELS)
    assert header_pixels(data) == 40 * 40


def test_a_picture_is_turned_upright_though_its_text_is_too_large():
    exif = Image.Exif()
    exif[0x0112] = 6
    for pnginfo in (None, texts(1)):
        turned = decode_image(encoded(exif=exif.tobytes(), pnginfo=pnginfo), LIMITS)
        assert np.array_equal(np.asarray(turned.image), np.rot90(PIXELS, -1))


@pytest.mark.parametrize("name", ["compressed text of 2 MiB", "a text with another checksum"])
def test_limits_and_damage_of_pixels_count_beside_such_chunks(name):
    data = BESIDE_PIXELS[name]
    with pytest.raises(MediaError, match="more than 100 pixels"):
        decode_image(data, MediaLimits(max_pixels=100))
    at = data.index(b"IDAT") + 40
    with pytest.raises(MediaError, match="damaged or cut off"):
        decode_image(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], LIMITS)
    with pytest.raises(MediaError, match="damaged or cut off"):
        decode_image(data[: data.index(b"IDAT") + 100], LIMITS)


def row_png(depth: int, colour: int, row: bytes, clear: bytes, palette: bytes = b"") -> bytes:
    """A picture of one row of four pixels, or two where there are three numbers for each."""
    width = 2 if colour == 2 else 4
    return b"".join([
        b"\x89PNG\r\n\x1a\n",
        chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0)),
        chunk(b"PLTE", palette) if palette else b"",
        chunk(b"tRNS", clear),
        chunk(b"IDAT", zlib.compress(b"\0" + row)),
        chunk(b"IEND", b""),
    ])  # fmt: skip


GREYS = {1: [0, 255, 0, 255], 2: [0, 85, 170, 255], 4: [0, 85, 170, 255], 8: [0, 64, 128, 255], 16: [0, 64, 128, 255]}
ROWS = {
    1: b"\x50",
    2: b"\x1b",
    4: b"\x05\xaf",
    8: bytes([0, 64, 128, 255]),
    16: struct.pack(">4H", 0, 16400, 32800, 65535),
}
VALUES = {1: [0, 1, 0, 1], 2: [0, 1, 2, 3], 4: [0, 5, 10, 15], 8: [0, 64, 128, 255], 16: [0, 16400, 32800, 65535]}


@pytest.mark.parametrize("depth", GREYS)
@pytest.mark.parametrize("pixel", range(4))
def test_transparent_grey_becomes_white_at_every_depth(depth, pixel):
    clear = VALUES[depth][pixel]
    data = row_png(depth, 0, ROWS[depth], struct.pack(">H", clear))
    wanted = [255 if value == clear else grey for value, grey in zip(VALUES[depth], GREYS[depth], strict=True)]
    assert np.asarray(decode_image(data, LIMITS).image)[0, :, 0].tolist() == wanted


@pytest.mark.parametrize("depth", [8, 16])
def test_a_transparent_colour_becomes_white_at_every_depth(depth):
    values = (0x12, 0x56, 0x9A, 4, 5, 6)
    packed = struct.pack(">6H", *(v << 8 | 0x34 for v in values)) if depth == 16 else bytes(values)
    clear = struct.pack(">3H", *(v << 8 | 0x34 if depth == 16 else v for v in values[:3]))
    image = np.asarray(decode_image(row_png(depth, 2, packed, clear), LIMITS).image)[0]
    assert image.tolist() == [[255, 255, 255], [4, 5, 6]]


GOOD = base64.b64encode(bytes(range(256)) * 3).decode()
FORMS = {
    "plain": f"data:image/png;base64,{GOOD}",
    "escaped": "data:image/png;base64," + GOOD.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
    "all escaped": "data:image/png;base64," + "".join(f"%{ord(c):02X}" for c in GOOD),
    "a space": f"data:image/png; base64,{GOOD}",
    "upper case": f"DATA:image/png;BASE64,{GOOD}",
    "a parameter": f"data:image/png;charset=utf-8;base64,{GOOD}",
    "no type": f"data:;base64,{GOOD}",
    "an escaped type": f"data:image%2Fpng;base64,{GOOD}",
    "escapes alone": "data:image/png," + quote(bytes(range(256)) * 3),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_data_urls_that_the_standards_allow(name):
    assert read_data_url(FORMS[name], "picture", "image/png", 1 << 20, "p") == bytes(range(256)) * 3
    with pytest.raises(RequestTooLarge):
        read_data_url(FORMS[name], "picture", "image/png", 700, "p")


@pytest.mark.parametrize("body", ["%zz", "%", "a%2", "%00", "=%3D", "AAAA%0AAAAA"])
def test_escapes_that_hold_no_base64_are_refused(body):
    with pytest.raises(InvalidRequest, match="valid base64"):
        read_data_url(f"data:image/png;base64,{body}", "picture", "image/png", 1 << 20, "p")
