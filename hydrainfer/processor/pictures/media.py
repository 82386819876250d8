"""Decoding a picture from a client to an upright RGB picture, or to a `MediaError` that says what to send instead."""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.parse import unquote, unquote_to_bytes

import msgspec
import numpy as np
from PIL import GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from hydrainfer.checkpoint import PixelBackend
from hydrainfer.core import InvalidRequest, MediaError, RequestTooLarge
from hydrainfer.processor.pictures import resample, resample_int16
from hydrainfer.processor.pictures.resample import Box

Size = tuple[int, int]
SUPPORTED = "JPEG, PNG, WebP and GIF"
_PLUGINS = (GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin)  # importing these registers their formats
_ARITHMETICS = {"pillow": resample, "torchvision": resample_int16}
_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PIXEL_CHUNKS = (b"IHDR", b"PLTE", b"IDAT", b"IEND", b"tRNS", b"CgBI")
_FOREIGN = (
    (b"\x00\x00\x00\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"BM", "BMP"),
    (b"%PDF", "PDF"),
    (b"<svg", "SVG"),
    (b"<?xml", "SVG or other XML"),
)


class MediaLimits(msgspec.Struct, frozen=True):
    """The limits on the pictures of one request, and how they are decoded. `max_pixels` is checked against the header,
    before decoding. `max_aspect` bounds the memory for resizing the short edge. `fast_jpeg`: decode a JPEG at 1/2, 1/4
    or 1/8 of its size if that is still at least the target size; the pixels differ from the reference. `resampler`: the
    path of the compiled resizing for the backend of the adapters; empty: Pillow or torch resize. `dali`: DALI decodes
    and resizes what it can; these pixels, too, differ from the reference."""

    max_images: int = 16
    max_videos: int = 2
    max_image_bytes: int = 32 << 20
    max_pixels: int = 89_478_485
    max_aspect: float = 200.0
    fast_jpeg: bool = False
    resampler: str = ""
    dali: bool = False


class ResizeTarget(NamedTuple):
    """The size that a picture will be resized to, Pillow's filter for it, and whose arithmetic does it. `via`: the
    width and height that it is given before that, rounded to 8 bits."""

    width: int
    height: int
    resample: int
    backend: PixelBackend
    via: Size | None = None

    def resized(self, image: Image.Image, box: Box | None = None, library: str = "") -> np.ndarray:
        """The resized RGB picture as uint8 [height, width, 3], or the `box` of it. `library`: that of
        `MediaLimits.resampler`."""
        resize = _ARITHMETICS[self.backend].resized
        if self.via is not None:
            image = Image.fromarray(resize(image, *self.via, self.resample, None, library))
        return resize(image, self.width, self.height, self.resample, box, library)


def agrees(library: str, backend: PixelBackend) -> bool:
    """Whether the compiled resizing gives the same pixels as what resizes without it: the installed Pillow, another
    version of which may round differently or have the passes in another order, or torch."""
    return _ARITHMETICS[backend].agrees(library)


class Picture(NamedTuple):
    """A decoded picture. `image` is RGB and upright; `mode` is the mode of the file. `resampler` is that of
    `MediaLimits`. `full`: the original width and height, if the decoder has made the picture smaller."""

    image: Image.Image
    mode: str
    resampler: str = ""
    full: Size | None = None

    @property
    def size(self) -> Size:
        """Width and height of the picture that the client sent, upright."""
        return self.full or self.image.size

    def resized(self, target: ResizeTarget, box: Box | None = None) -> np.ndarray:
        """The resized picture, uint8 [height, width, 3], or the `box` of it."""
        return target.resized(self.image, box, self.resampler)


def read_image_url(url: str, limits: MediaLimits, param: str) -> bytes:
    """The bytes of a picture's `data:` URL. Raises what `read_data_url` raises."""
    return read_data_url(url, "picture", "image/jpeg", limits.max_image_bytes, param)


def read_data_url(url: str, noun: str, example: str, max_bytes: int, param: str) -> bytes:
    """The bytes of a `data:` URL (RFC 2397), in base64 or as escapes. `example`: a content type for the error message.
    Raises `InvalidRequest` for any other URL and for invalid base64, or `RequestTooLarge`."""
    scheme = url[:16].partition(":")[0].lower()
    if scheme != "data":
        raise InvalidRequest(
            f"this URL is not fetched here; send the {noun} itself as a data: URL (data:{example};base64,...)",
            param=param,
            code="unsupported_url",
        )
    head, comma, body = url.partition(",")
    n_escapes = body.count("%")
    n_chars = len(body) - 2 * n_escapes
    if not comma or not re.search(r"; *base64 *\Z", unquote(head), re.IGNORECASE):
        if not comma or not n_escapes:
            raise InvalidRequest(
                f"a data: URL must look like data:{example};base64,...", param=param, code="invalid_url"
            )
        _check_bytes(n_chars, max_bytes, param, noun)
        return unquote_to_bytes(body)
    _check_bytes(n_chars * 3 // 4 - 2, max_bytes, param, noun)
    try:
        return base64.b64decode(unquote_to_bytes(body) if n_escapes else body, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(
            "the data: URL does not hold valid base64 (standard alphabet, padded, no spaces or line breaks)",
            param=param,
            code="invalid_base64",
        ) from None


def decode_image(
    data: bytes, limits: MediaLimits, param: str = "messages", wanted: Callable[[int, int], ResizeTarget] | None = None
) -> Picture:
    """Check a picture, decode it, turn it upright and convert it to RGB. Only the first frame of an animation is
    decoded. `wanted` maps width and height to the size after resizing; it is used if `limits.fast_jpeg` or
    `limits.dali`.

    Transparency is composited onto white, and 16-bit grey keeps its high byte, as PIL does for 16-bit RGB. A PNG is
    whole if the chunks that decide its pixels are. Raises `MediaError`, whose message never quotes the decoder, or
    `RequestTooLarge`.
    """
    _check_bytes(len(data), limits.max_image_bytes, param)
    kind = _sniff(data)
    if kind is None:
        raise MediaError(f"the picture is {_describe(data)}; supported formats are {SUPPORTED}", param=param)
    try:
        try:
            return _decoded(data, kind, limits, param, wanted)
        except (MediaError, MemoryError, Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise
        except Exception:
            if kind != "PNG":
                raise
            return _decoded(_bare_png(data), kind, limits, param, wanted)
    except MediaError:
        raise
    except MemoryError:
        raise MediaError("decoding the picture takes more memory than this server allows", param=param) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels(limits, param) from None
    except Exception:
        raise MediaError(
            f"the picture cannot be decoded: it starts like a {kind} file but is damaged or cut off", param=param
        ) from None


def _decoded(
    data: bytes, kind: str, limits: MediaLimits, param: str, wanted: Callable[[int, int], ResizeTarget] | None
) -> Picture:
    """`decode_image` for a file of this kind. Raises `MediaError` or anything that Pillow raises."""
    with Image.open(io.BytesIO(data), formats=[kind]) as image:
        _check_size(image.size, limits, param)
        full = image.size
        if limits.dali and wanted is not None:
            made = _by_dali(data, image, wanted(*full))
            if made is not None:
                return Picture(made, image.mode, limits.resampler, full)
        if limits.fast_jpeg and wanted is not None:
            image.draft(None, wanted(*full)[:2])  # only affects a JPEG, and only before decoding
        if kind == "PNG":
            _check_png(data)
            _scale_transparency(image, data[24])
        image.load()
        mode, upright = image.mode, _upright(image)
        full = full if upright.size == image.size else full[::-1]
        return Picture(to_rgb(upright), mode, limits.resampler, full)


def silence_pillow() -> None:
    """Keep Pillow's warnings off this process's console. The client is told what is wrong with a picture, and only the
    client can correct it."""
    warnings.filterwarnings("ignore", module=r"PIL\.")


def _by_dali(data: bytes, image: Image.Image, target: ResizeTarget) -> Image.Image | None:
    """The resized picture, decoded by DALI. Of the file in `image` only the header has been read. Returns None to leave
    the picture to Pillow, which supports every kind of JPEG and whose errors lead to a message."""
    plain = image.format == "JPEG" and image.mode == "RGB" and image.info.get("adobe_transform", 1) == 1
    if not plain or _turn(image) is not None or target[:2] == image.size:
        return None
    from hydrainfer.processor.pictures.dali import decoder

    made = decoder().resized(data, *target[:3])
    return None if made is None else Image.fromarray(made)


def header_pixels(data: bytes) -> int:
    """Width times height by the file's header, without decoding; 0 if the header cannot be read."""
    kind = _sniff(data)
    if kind == "PNG" and data[12:16] == b"IHDR":  # Pillow reads the chunks before the pixels as well
        return int.from_bytes(data[16:20], "big") * int.from_bytes(data[20:24], "big")
    try:
        with Image.open(io.BytesIO(data), formats=[kind] if kind else []) as image:
            return image.width * image.height
    except Exception:  # decode_image raises the error for it
        return 0


def from_image(image: Image.Image, limits: MediaLimits, param: str = "messages") -> Picture:
    """A picture that a Python caller has already opened. Raises `MediaError`."""
    _check_size(image.size, limits, param)
    return Picture(to_rgb(_upright(image)), image.mode, limits.resampler)


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture in RGB, without transparency."""
    if image.mode in ("I", "I;16", "I;16B", "I;16L", "I;16N"):
        deep = np.asarray(image)  # a dtype that holds 0xFFFF
        high = (np.clip(deep, 0, 0xFFFF) >> 8).astype(np.uint8)
        if isinstance(clear := image.info.get("transparency"), int):
            high[deep == clear] = 255  # white
        image = Image.fromarray(high)
    elif "A" in image.getbands() or image.info.get("transparency") is not None:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba)
    return image if image.mode == "RGB" else image.convert("RGB")


def _turn(image: Image.Image) -> Image.Transpose | None:
    """The transposition that turns a picture upright; None if it is upright already."""
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except Exception:  # the picture may be whole even if its EXIF data is damaged
        return None
    return _UPRIGHT.get(orientation) if isinstance(orientation, int) else None


def _upright(image: Image.Image) -> Image.Image:
    turn = _turn(image)
    if turn is None:
        return image
    info, image = image.info, image.transpose(turn)
    image.info = info
    return image


def _sniff(data: bytes) -> str | None:
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return None


def _check_png(data: bytes) -> None:
    """Check the checksums of a PNG's pixels, which Pillow does not check: 0.3 ms per MB. Raises `ValueError`."""
    for chunk in _png_chunks(data):
        if chunk[4:8] == b"IDAT" and not _is_sound(chunk):
            raise ValueError("a chunk of pixels has another checksum")


def _bare_png(data: bytes) -> bytes:
    """The chunks of a PNG that decide its pixels, and the orientation. Pillow refuses a picture whose other chunks,
    such as texts or a colour profile, are large or have a wrong checksum, although the picture is whole."""
    bare = bytearray(data[:8])
    for chunk in _png_chunks(data):
        if chunk[4:8] in _PIXEL_CHUNKS or (chunk[4:8] == b"eXIf" and _is_sound(chunk)):
            bare += chunk
    return bytes(bare)


def _png_chunks(data: bytes) -> Iterator[memoryview]:
    """The chunks of a PNG: length, kind, data and checksum. The last may be cut off."""
    view, at = memoryview(data), 8
    while at < len(view):
        end = at + 12 + int.from_bytes(view[at : at + 4], "big")
        yield view[at:end]
        at = end


def _is_sound(chunk: memoryview) -> bool:
    """Whether a chunk of a PNG is whole and has the right checksum."""
    whole = len(chunk) == 12 + int.from_bytes(chunk[:4], "big")
    return whole and zlib.crc32(chunk[4:-4]) == int.from_bytes(chunk[-4:], "big")


def _scale_transparency(image: Image.Image, depth: int) -> None:
    """Give a PNG's transparent colour the depth to which Pillow brings the pixels: 8 bits, but for 16-bit grey."""
    clear = image.info.get("transparency")
    if isinstance(clear, int) and depth < 8:
        image.info["transparency"] = clear * 255 // ((1 << depth) - 1)
    elif isinstance(clear, tuple) and depth == 16:
        image.info["transparency"] = tuple(value >> 8 for value in clear)


def _describe(data: bytes) -> str:
    if not data:
        return "empty"
    if data[4:8] == b"ftyp":
        return "HEIC, AVIF or a video"
    head = data[:64].lstrip()
    return next((name for magic, name in _FOREIGN if head.startswith(magic)), "not a picture file")


def _check_bytes(n: int, limit: int, param: str, noun: str = "picture") -> None:
    if n > limit:
        raise RequestTooLarge(f"a {noun} of {n} bytes is over the limit of {limit}; send a smaller one", param=param)


def _check_size(size: tuple[int, int], limits: MediaLimits, param: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise MediaError("the picture has no pixels", param=param)
    if width * height > limits.max_pixels:
        raise _too_many_pixels(limits, param)
    if max(width, height) > limits.max_aspect * min(width, height):
        raise MediaError(
            f"the picture is {width} x {height}: one side may be at most {limits.max_aspect:g} times the other",
            param=param,
        )


def _too_many_pixels(limits: MediaLimits, param: str) -> MediaError:
    return MediaError(f"the picture has more than {limits.max_pixels} pixels; send a smaller one", param=param)
