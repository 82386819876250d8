"""The preprocessing of SmolVLM2's videos, as the configuration of `SmolVLMVideoProcessor` describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hydrainfer.checkpoint.pixels import IdeficsSettings, PixelBackend
from hydrainfer.core import CheckpointError

_FILE = "video_preprocessor_config.json"
_CLASS = "SmolVLMVideoProcessor"
_FPS, _FRAMES = 1.0, 64  # where no file names them; the class then takes all frames


class SmolVideoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The preprocessing of videos as single frames, each of them one tile. `fps`: how many frames per second are taken;
    `num_frames`: the most of them."""

    frames: IdeficsSettings
    num_frames: int = _FRAMES
    fps: float = _FPS

    def by(self, backend: PixelBackend) -> SmolVideoSettings:
        """`PixelSettings.by` for frames."""
        return msgspec.structs.replace(self, frames=self.frames.by(backend))

    @classmethod
    def read(cls, given: Mapping[str, Any], pictures: IdeficsSettings) -> SmolVideoSettings:
        """Read the configuration of a video preprocessor. As in transformers, the number and rate of `video_sampling`
        come first, but a `size` beside it comes before its `video_size`. `pictures`: the tile and the normalisation
        that the tower takes. Raises `CheckpointError`."""
        kind, sampling = given.get("video_processor_type", _CLASS), given.get("video_sampling", {})
        if kind != _CLASS:
            raise CheckpointError(
                f"{_FILE}: video_processor_type {str(kind)[:60]!r} is not supported; supported: {_CLASS}"
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
            num_frames=sampling.get("max_frames") or given.get("num_frames") or _FRAMES,
            fps=float(sampling.get("fps") or given.get("fps") or _FPS),
        )
