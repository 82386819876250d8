"""The protocols of the adapters that turn pictures and frames into pixels. Each model family has a small adapter."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from hydrainfer.checkpoint import ModelConfig
from hydrainfer.core import InvalidRequest
from hydrainfer.families import family_of
from hydrainfer.processor.pictures.media import Picture, ResizeTarget
from hydrainfer.processor.pictures.pixels import Pixels


class InnerText(NamedTuple):
    """A text between the placeholders of a picture. `after`: the places where it stands, each a number of placeholders
    before it, at least 1 and less than all, ascending. `n_tokens`: the number of its tokens, for the planner, which has
    no tokenizer.

    The text is tokenised by itself. So that the tokens are those of the whole prompt's text, it begins and ends with
    special tokens, which no neighbour merges with, or the family's tests compare the ids."""

    text: str
    after: tuple[int, ...]
    n_tokens: int = 1


class MediaItem(NamedTuple):
    """A picture, or the part of a video that is encoded at once: `core.MediaSpan` without its position in the prompt.
    `n_tokens`: its placeholders. `before`, `after`: texts around all of them. `inner`: texts between them; no two stand
    after the same number of placeholders. `whole`: all its tokens attend to each other.

    Pixtral's picture of 3 x 2 tokens is `[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]` in a prompt:

        MediaItem(6, after="[IMG_END]", inner=(InnerText("[IMG_BREAK]", (3,)),))
    """

    n_tokens: int
    grid: tuple[int, int, int] | None = None
    times: tuple[int, ...] = ()
    joined: bool = False
    before: str = ""
    after: str = ""
    whole: bool = False
    inner: tuple[InnerText, ...] = ()

    @property
    def n_inner(self) -> int:
        """The number of tokens between its placeholders, as the family counts them."""
        return sum(len(one.after) * one.n_tokens for one in self.inner)


class ImageAdapter(Protocol):
    """The preprocessing of pictures for one model: stateless, thread-safe, picklable. `parameters`: the resolved
    preprocessing, which is part of a picture's key. `fit` needs only the size, so that a prompt's length is known
    before any picture is resized."""

    parameters: bytes

    def configured(self, options: Mapping[str, Any]) -> ImageAdapter:
        """The adapter with a request's `mm_processor_kwargs`. Raises `InvalidRequest` naming an unknown option."""

    def fit(self, width: int, height: int) -> MediaItem:
        """The tokens and grid of a picture of this size in pixels."""

    def pixels(self, picture: Picture) -> Pixels:
        """The uint8 array that the runtime uploads. Rescaling and normalising happen on the device."""


@runtime_checkable
class Counting(Protocol):
    """An adapter for which it matters how many pictures a prompt has. By itself it is for a prompt with one."""

    def among(self, n_pictures: int) -> ImageAdapter:
        """The adapter for the pictures of a prompt with so many. Where their pixels differ, so do `parameters`."""


class VideoShape(NamedTuple):
    """The number, rate and size of a video's frames. `sampled`: the frames are already those that the model is to see,
    `fps` of them per second."""

    n_frames: int
    fps: float
    width: int
    height: int
    sampled: bool = False


FPS = 24.0  # assumed for a file without a frame rate


def n_sampled(video: VideoShape, num_frames: int | None, fps: float | None, max_frames: int) -> int:
    """The number of frames to take where `num_frames` of the whole video are wanted, or `fps` per second, or, if both
    are None, all."""
    n = num_frames or video.n_frames
    if fps is not None:
        n = max(1, int(video.n_frames / (video.fps or FPS) * fps))
    return min(n, max_frames, video.n_frames)


class VideoAdapter(Protocol):
    """The preprocessing of videos for one model: stateless, thread-safe, picklable. `parameters`: what decides an
    embedding besides the pixels, so not which frames are taken or how large they become. `options`: all settings that a
    request can change. A video's prompt is known before any frame has been decoded."""

    parameters: bytes
    options: bytes

    def configured(self, options: Mapping[str, Any]) -> VideoAdapter:
        """The adapter with a request's `mm_processor_kwargs`. Raises `InvalidRequest` naming an unknown option."""

    def sample(self, video: VideoShape, max_frames: int) -> list[int]:
        """The frames that the model sees, ascending; at least one."""

    def items(self, video: VideoShape, indices: Sequence[int]) -> list[MediaItem]:
        """The items of these frames, in order."""

    def resized(self, video: VideoShape, n_frames: int) -> ResizeTarget:
        """The target size and filter of each of `n_frames` frames."""

    def pixels(self, video: VideoShape, frames: np.ndarray) -> list[Pixels]:
        """One uint8 array per item, from resized frames uint8 [n, height, width, 3]."""


def image_adapter(model: ModelConfig) -> ImageAdapter | None:
    """The adapter that the table of families names for this model; None for a text-only model."""
    pictures = family_of(model).pictures
    return resolve_name(pictures)(model) if pictures else None


def video_adapter(model: ModelConfig, around: Sequence[str]) -> VideoAdapter | None:
    """The video adapter that the table of families names for this model; None if the family or the checkpoint takes no
    videos. `around`: the texts before and after each picture."""
    videos = family_of(model).videos
    return resolve_name(videos)(model, *around) if videos and model.vision.videos is not None else None


FRAME_OPTIONS = ("num_frames", "fps")
"""The options of a request that choose the frames of a video."""


def wrong_option(problem: str) -> InvalidRequest:
    return InvalidRequest(f"mm_processor_kwargs: {problem}", param="mm_processor_kwargs")


def given_options(options: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """The options of a request that are not null; those of `FRAME_OPTIONS` are checked. Raises `InvalidRequest` naming
    the wrong option, and the known ones."""
    unknown = [name for name in options if name not in known]
    if unknown:
        raise wrong_option(f"{unknown[0]!r} is not known; this model takes {', '.join(known)}")
    values = {name: value for name, value in options.items() if value is not None}
    n, fps = values.get("num_frames"), values.get("fps")
    if n is not None and (type(n) is not int or n < 1):
        raise wrong_option("num_frames must be a whole number, at least 1")
    if fps is not None and (type(fps) not in (int, float) or not 0 < fps <= 1000):
        raise wrong_option("fps must be a number over 0 and at most 1000")
    if n is not None and fps is not None:
        raise wrong_option("fps and num_frames exclude each other")
    return values


def without_options(options: Mapping[str, Any], adapter: ImageAdapter) -> ImageAdapter:
    """The `configured` method of a family without options. Raises `InvalidRequest` if options are given."""
    if options:
        raise wrong_option(f"this model takes none, not {', '.join(map(repr, options))}")
    return adapter


def content_key(picture: Picture, pixels: Pixels, parameters: bytes, weights: bytes, dtype: str) -> bytes:
    """The key of a picture's embedding, 32 bytes. It is a digest of the adapter's pixels, which are all that the vision
    tower sees, the picture's original size and mode, the resolved preprocessing, the fingerprint of the model,
    and the dtype."""
    size = "x".join(map(str, picture.size))
    head = f"{picture.mode}|{picture.image.mode}|{size}|{pixels.shape}|{dtype}|".encode()
    return _digest((head, parameters, weights), pixels)


def frames_key(pixels: Pixels, n_tokens: int, parameters: bytes, weights: bytes, dtype: str) -> bytes:
    """The key of the embedding, of `n_tokens` rows, of a video's frames that are encoded together, made like
    `content_key`."""
    head = f"frames|{'x'.join(map(str, pixels.shape))}|{n_tokens}|{dtype}|".encode()
    return _digest((head, parameters, weights), pixels)


def _digest(heads: Sequence[bytes], pixels: Pixels) -> bytes:
    digest = hashlib.sha256()
    for part in heads:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()
