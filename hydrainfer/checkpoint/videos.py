"""The preprocessing of a checkpoint's videos, as preprocessor configurations describe it. See `pixels.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from hydrainfer.checkpoint.pixels import (
    GLM_BOUNDS,
    BudgetSettings,
    ClipSettings,
    IdeficsSettings,
    PixelBackend,
    PixelBounds,
    PixelSettings,
    QwenSettings,
)
from hydrainfer.core import CheckpointError

_HALF = (0.5, 0.5, 0.5)
_GLM_FRAMES = 2 * 30_000 * 28 * 28  # of all frames of a video, by default
_GLM_SECONDS, _MAX_FPS = 300, 1000
_FILE = "video_preprocessor_config.json"
_SMOL = "SmolVLMVideoProcessor"
_SMOL_FPS, _SMOL_FRAMES = 1.0, 64  # where no file names them; the class then takes all frames
FrameTimes = Literal["counted", "timed", "told"]
_FRAME_BOUNDS = {
    "counted": PixelBounds(128 * 28 * 28, 768 * 28 * 28),
    "timed": PixelBounds(128 * 28 * 28, 768 * 28 * 28),
    "told": PixelBounds(128 * 32 * 32, 768 * 32 * 32),
}


class QwenVideoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The preprocessing of videos. `times`: how the time of a pair of frames enters the prompt: as the number of the
    pair ("counted"), as a position in time ("timed"), or as text ("told"). `shared`: every frame has at most an equal
    share of `max_tokens`. `start` and `end` are the texts around each pair whose time is told."""

    frames: QwenSettings
    times: FrameTimes
    fps: float = 2.0
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    shared: bool = False
    max_tokens: int = 128_000
    tokens_per_second: float = 1.0
    start: str = "<|vision_start|>"
    end: str = "<|vision_end|>"

    def by(self, backend: PixelBackend) -> QwenVideoSettings:
        """`PixelSettings.by` for frames."""
        return msgspec.structs.replace(self, frames=self.frames.by(backend))

    @classmethod
    def read(
        cls, given: Mapping[str, Any], times: FrameTimes, tokens_per_second: float, pictures: QwenSettings
    ) -> QwenVideoSettings:
        """Read the configuration of a video preprocessor. `pictures`: the patch sizes and normalisation that the vision
        tower takes. Qwen3-VL's has other defaults than that of pictures, and bounds only as a size. Raises
        `CheckpointError`."""
        told = times == "told"
        if told:
            given = {"image_mean": _HALF, "image_std": _HALF} | dict(given)
        frames = QwenSettings.read(given, _FRAME_BOUNDS[times], pictures.patch, in_time=told)
        frames.check_like(pictures)
        return cls(
            frames=frames,
            times=times,
            fps=float(given.get("fps", 2.0)),
            num_frames=given.get("num_frames"),
            min_frames=given.get("min_frames", 4),
            max_frames=given.get("max_frames", 768),
            shared=given.get("cap_pixels_per_frame", False),
            max_tokens=given.get("max_video_tokens", 768 if told else 128_000),
            tokens_per_second=tokens_per_second,
        )


class BudgetVideoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The preprocessing of videos as single frames, each with its time before it. `fps`: how many frames per second are
    taken, else at most `num_frames` of the whole video. `start` and `end` are the texts around each frame."""

    frames: BudgetSettings
    num_frames: int | None = 32
    fps: float | None = None
    start: str = ""
    end: str = ""

    def by(self, backend: PixelBackend) -> BudgetVideoSettings:
        """`PixelSettings.by` for frames."""
        return msgspec.structs.replace(self, frames=self.frames.by(backend))

    @classmethod
    def read(cls, given: Mapping[str, Any], patch: int, merge: int) -> BudgetVideoSettings:
        """Read the configuration of a video preprocessor. Raises `CheckpointError`."""
        fps = given.get("fps")
        num_frames = given.get("num_frames", 32) if fps is None else None
        return cls(frames=BudgetSettings.read(given, patch, merge, 70), num_frames=num_frames, fps=fps)


class GlmVideoSettings(QwenVideoSettings, frozen=True, kw_only=True):
    """The preprocessing of videos of the GLM families. `sampler`: how frames are chosen, and their times written.
    "glm4v" takes `fps` frames per second of up to `max_duration` seconds, "glm46v" decides by the video's length."""

    sampler: Literal["glm4v", "glm46v"]
    max_duration: int = _GLM_SECONDS

    @classmethod
    def read_glm(cls, given: Mapping[str, Any], pictures: QwenSettings) -> GlmVideoSettings:
        """Read the configuration of a video preprocessor, whose class decides the sampler. Raises `CheckpointError`."""
        bounds = PixelBounds(GLM_BOUNDS.least, _GLM_FRAMES)
        frames = QwenSettings.read(given, bounds, pictures.patch, in_time=True)
        frames.check_like(pictures)
        names = given.get("video_processor_type"), given.get("processor_class")
        newer = str(next(filter(None, names), "")).startswith("Glm46V")
        fps, longest = given.get("fps", 2.0), given.get("max_duration", _GLM_SECONDS)
        if fps > _MAX_FPS:
            raise CheckpointError(f"video_preprocessor_config.json: fps is {fps}; it must be at most {_MAX_FPS}")
        return cls(
            frames=frames,
            times="told",
            fps=float(fps),
            max_duration=longest,
            sampler="glm46v" if newer else "glm4v",
        )


class SquareVideoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The preprocessing of videos as single frames, each a square of the tower. `num_frames` of the whole video are
    taken, or `fps` per second, at equal distances. `shift`: by how much later each is taken, in frames of the video, or
    "half" a distance; "none" for whole numbers, where 0.0 rounds as torch does."""

    frames: ClipSettings
    num_frames: int | None
    fps: float | None = None
    shift: float | Literal["none", "half"] = "none"

    def by(self, backend: PixelBackend) -> SquareVideoSettings:
        """`PixelSettings.by` for frames."""
        return msgspec.structs.replace(self, frames=self.frames.by(backend))

    @classmethod
    def read(
        cls, given: Mapping[str, Any], side: int, pictures: PixelSettings, num_frames: int, *, shifted: bool = False
    ) -> SquareVideoSettings:
        """Read the configuration of a video preprocessor. `side`: of the tower's squares, in pixels. `pictures`: the
        normalisation that the tower has. `num_frames`: how many are taken if the file names neither a number nor a
        rate. `shifted`: the processor has `initial_shift`. Raises `CheckpointError`."""
        usual = {"size": {"height": side, "width": side}, "do_center_crop": False}
        frames = ClipSettings.read(usual | dict(given) | {"do_pad": False})
        square = frames.resize in (side, (side, side)) and frames.crop is None
        if not square and not frames.resize == frames.crop == (side, side):
            raise CheckpointError(
                f"video_preprocessor_config.json has size {frames.resize} and crop_size {frames.crop}, but the vision "
                f"tower takes ({side}, {side})"
            )
        made, wanted = ((s.scale, s.mean, s.std) for s in (frames, pictures))
        if made != wanted:
            raise CheckpointError(
                "video_preprocessor_config.json normalises frames otherwise than pictures are; give it the scale, mean "
                "and deviation of preprocessor_config.json"
            )
        n, fps = given.get("num_frames"), given.get("fps")
        n = num_frames if n is None and fps is None else n
        shift = given.get("initial_shift", True)
        if not shifted:
            shift = "none"
        elif shift is True:
            shift = "half"
        else:
            shift = float(shift)
        return cls(frames=frames, num_frames=n, fps=fps if n is None else None, shift=shift)


class SmolVideoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The preprocessing of videos as single frames, each of them one tile. `fps`: how many frames per second are taken;
    `num_frames`: the most of them."""

    frames: IdeficsSettings
    num_frames: int = _SMOL_FRAMES
    fps: float = _SMOL_FPS

    def by(self, backend: PixelBackend) -> SmolVideoSettings:
        """`PixelSettings.by` for frames."""
        return msgspec.structs.replace(self, frames=self.frames.by(backend))

    @classmethod
    def read(cls, given: Mapping[str, Any], pictures: IdeficsSettings) -> SmolVideoSettings:
        """Read the configuration of a video preprocessor. As in transformers, the number and rate of `video_sampling`
        come first, but a `size` beside it comes before its `video_size`. `pictures`: the tile and the normalisation
        that the tower takes. Raises `CheckpointError`."""
        kind, sampling = given.get("video_processor_type", _SMOL), given.get("video_sampling", {})
        if kind != _SMOL:
            raise CheckpointError(
                f"{_FILE}: video_processor_type {str(kind)[:60]!r} is not supported; supported: {_SMOL}"
            )
        if not given.get("do_resize", True):
            raise CheckpointError(f"{_FILE}: do_resize false is not supported; supported: true")
        if "size" not in given and "video_size" in sampling:
            given = {**given, "size": sampling["video_size"]}
        frames = IdeficsSettings.read({**given, "do_image_splitting": False})
        made, wanted = ((s.tile, s.scale, s.mean, s.std) for s in (frames, pictures))
        if made != wanted:
            raise CheckpointError(
                f"{_FILE} makes or normalises frames otherwise than pictures are; give it max_image_size, scale, mean "
                "and deviation of preprocessor_config.json"
            )
        if frames.edge is None:
            raise CheckpointError(f"{_FILE}: longest_edge of the size of frames is null; give it a value")
        return cls(
            frames=frames,
            num_frames=sampling.get("max_frames") or given.get("num_frames") or _SMOL_FRAMES,
            fps=float(sampling.get("fps") or given.get("fps") or _SMOL_FPS),
        )
