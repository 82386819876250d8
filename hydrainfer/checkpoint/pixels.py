"""The preprocessing of a checkpoint's pictures, as preprocessor configurations describe it. Videos: `videos.py`.

`files.preprocessing` has checked each value and left out most nulls. Missing values get the defaults of transformers'
processors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

import msgspec

from hydrainfer.core import CheckpointError, ConfigError

BICUBIC, LANCZOS = 3, 1  # Pillow's numbers of the filters
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's
_HALF = (0.5, 0.5, 0.5)
PixelBackend = Literal["pillow", "torchvision"]
"""The library whose results are reproduced to the last bit, as transformers' image processors do with either."""
DEFAULT_BACKEND: PixelBackend = "torchvision"
"""The backend where nobody has chosen one, as in transformers."""
_FILTERS = {
    1: "Lanczos",
    2: "bilinear",
    3: "bicubic",
}  # those of torch for 8-bit pixels, by Pillow's number


class PixelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all preprocessing has. `resample`: Pillow's number of the filter. `scale`, then `mean` and
    `std` of red, green and blue, are applied on the device; for the processor they are only a part of a picture's
    key. `std` is empty if pixels are only scaled. `backend` decides how pictures are resized, cropped and
    normalised."""

    backend: PixelBackend = DEFAULT_BACKEND
    resample: int = BICUBIC
    scale: float = 1 / 255
    mean: tuple[float, ...] = _MEAN
    std: tuple[float, ...] = _STD

    @property
    def arithmetic(self) -> Literal["scaled", "folded", "divided"]:
        """The way to normalise in float32: "scaled" multiplies by `scale` before it subtracts the mean; "folded" has
        mean and deviation multiplied by 1 / scale instead; "divided" divides by 1 / scale."""
        return "folded" if self.backend == "torchvision" and self.std else "scaled"

    def by(self, backend: PixelBackend) -> Self:
        """The same preprocessing by another backend. Raises `ConfigError` if that lacks the filter."""
        if backend == "torchvision" and self.resample not in _FILTERS:
            supported = ", ".join(f"{number} ({name})" for number, name in _FILTERS.items())
            raise ConfigError(
                f"image_backend torchvision resizes with filters {supported}, and preprocessor_config.json asks for "
                f"{self.resample}; use image_backend pillow",
                param="image_backend",
            )
        return msgspec.structs.replace(self, backend=backend)

    @classmethod
    def _settled(cls, given: Mapping[str, Any], **own: Any) -> Self:
        resize, rescale, normalise = (given.get(f"do_{name}", True) for name in ("resize", "rescale", "normalize"))
        return cls(
            resample=stated(given, "resample", BICUBIC) if resize else BICUBIC,
            scale=stated(given, "rescale_factor", 1 / 255) if rescale else 1.0,
            mean=tuple(map(float, stated(given, "image_mean", _MEAN))) if normalise else (0.0,) * 3,
            std=tuple(map(float, stated(given, "image_std", _STD))) if normalise else (),
            **own,
        )


def stated(given: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of a field, or the default if it is missing. Raises `CheckpointError` if it is null."""
    value = given.get(name, default)
    if value is None:
        raise CheckpointError(f"preprocessor_config.json: {name} is null; give it a value, or leave it out")
    return value


class ClipSettings(PixelSettings, frozen=True, kw_only=True):
    """The preprocessing of CLIP-style towers. Sizes in pixels. `resize` is the length of the short edge, or (height,
    width). `pad`: the picture is first made square with a border in the mean colour."""

    resize: int | tuple[int, int] | None = 224
    crop: tuple[int, int] | None = (224, 224)
    pad: bool = False

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> ClipSettings:
        """Read a preprocessor configuration, in old and new spellings. Raises `CheckpointError`."""
        return cls._settled(
            given,
            resize=_edges(stated(given, "size", 224)) if given.get("do_resize", True) else None,
            crop=_pair(stated(given, "crop_size", 224), "crop_size") if given.get("do_center_crop", True) else None,
            pad=given.get("do_pad", False) and str(given.get("image_processor_type")).startswith("Llava"),
        )


class TileSettings(PixelSettings, frozen=True, kw_only=True):
    """The preprocessing of pictures that are cut into squares of `tile` pixels: `least` to `most` of them, in columns
    and rows whose ratio is nearest to the picture's. If there are several, the whole picture follows as one more.
    `tiles`: whether pictures are cut at all."""

    tile: int
    least: int = 1
    most: int = 12
    tiles: bool = True

    @property
    def squares(self) -> int:
        """The most squares of a picture."""
        return self.most + 1 if self.tiles and self.most > 1 else 1

    @classmethod
    def read(cls, given: Mapping[str, Any], tile: int) -> TileSettings:
        """Read a preprocessor configuration, whose `size` must be that of the tower's squares. Raises
        `CheckpointError`."""
        made, least, most = _pair(stated(given, "size", tile), "size"), *map(given.get, ("min_patches", "max_patches"))
        if made != (tile, tile):
            raise CheckpointError(
                f"preprocessor_config.json makes pictures of {made} pixels, but the vision tower takes ({tile}, {tile})"
            )
        settings = cls._settled(given, tile=tile, least=least or 1, most=most or 12)
        if settings.least > settings.most:
            raise CheckpointError(
                f"preprocessor_config.json: min_patches is {settings.least}, more than max_patches, {settings.most}"
            )
        return settings


class PixelBounds(msgspec.Struct, frozen=True):
    """The least and most pixels of a picture, a frame or a whole video after resizing."""

    least: int
    most: int


MAX_ASPECT = 200
"""The highest ratio of a picture's sides, for Qwen's and GLM's towers."""
PICTURE_BOUNDS = PixelBounds(56 * 56, 28 * 28 * 1280)
GLM_BOUNDS = PixelBounds(112 * 112, 28 * 28 * 15_000)


class QwenSettings(PixelSettings, frozen=True, kw_only=True):
    """The preprocessing of Qwen's towers. `patch`: side of a patch in pixels. `merge` squared patches of `temporal`
    frames are one token. `in_time`: `bounds` are for all frames together, so for the `temporal` equal ones that a
    picture stands for."""

    patch: int = 14
    merge: int = 2
    temporal: int = 2
    bounds: PixelBounds = PICTURE_BOUNDS
    resize: bool = True
    in_time: bool = False

    @property
    def factor(self) -> int:
        """The side of a token's square, in pixels."""
        return self.patch * self.merge

    @property
    def tokens(self) -> int:
        """The rows of the largest picture. This is the picture with the most pixels, or a narrow one, whose short side
        is at least one token."""
        frames = self.temporal if self.in_time else 1
        least, most, side = self.bounds.least / frames, self.bounds.most / frames, self.factor
        narrow = (math.sqrt(least / MAX_ASPECT) // side + 1) * (math.sqrt(max(least, most) * MAX_ASPECT) // side + 1)
        return int(max(most // side**2, narrow, 1))

    @classmethod
    def read(
        cls, given: Mapping[str, Any], default: PixelBounds = PICTURE_BOUNDS, patch: int = 14, *, in_time: bool = False
    ) -> QwenSettings:
        """Read the configuration of a picture or video preprocessor, in old and new spellings. Bounds `in_time` are
        given as a size only. Raises `CheckpointError`."""
        if in_time:
            given = {name: value for name, value in given.items() if name not in ("min_pixels", "max_pixels")}
        size = given.get("size") or {}
        if not isinstance(size, Mapping):
            raise CheckpointError("preprocessor_config.json: size must give shortest_edge and longest_edge")
        least, most = (
            given.get(f"{end}_pixels") or size.get(edge) or size.get(f"{end}_pixels") or otherwise
            for end, edge, otherwise in (("min", "shortest_edge", default.least), ("max", "longest_edge", default.most))
        )
        return cls._settled(
            given,
            patch=stated(given, "patch_size", patch),
            merge=stated(given, "merge_size", 2),
            temporal=stated(given, "temporal_patch_size", 2),
            bounds=PixelBounds(least, most),
            resize=given.get("do_resize", True),
            in_time=in_time,
        )

    def check_like(self, pictures: QwenSettings) -> None:
        """Raise `CheckpointError` unless frames with these settings are cut and normalised as pictures are."""
        cut, wanted = ((s.patch, s.merge, s.temporal, s.scale, s.mean, s.std) for s in (self, pictures))
        if cut != wanted:
            raise CheckpointError(
                "video_preprocessor_config.json cuts or normalises frames otherwise than pictures are; "
                "give it the patch sizes, scale, mean and deviation of preprocessor_config.json"
            )


class IdeficsSettings(PixelSettings, frozen=True, kw_only=True):
    """The preprocessing of Idefics3 and SmolVLM. `edge`: the longest edge in pixels after the first resize; None if
    there is none. `tile`: the side of a tile in pixels. `split`: whether a larger picture becomes several tiles."""

    resample: int = LANCZOS
    edge: int | None = 4 * 364
    tile: int = 364
    split: bool = True

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> IdeficsSettings:
        """Read a preprocessor configuration. Raises `CheckpointError`."""
        size, tile = stated(given, "size", {"longest_edge": 4 * 364}), stated(given, "max_image_size", {})
        if not isinstance(size, Mapping) or "longest_edge" not in size:
            raise CheckpointError("preprocessor_config.json: size must give longest_edge for this model")
        if not isinstance(tile, Mapping):
            raise CheckpointError("preprocessor_config.json: max_image_size must give longest_edge")
        usual = {"resample": LANCZOS, "image_mean": _HALF, "image_std": _HALF}
        return cls._settled(
            usual | dict(given) | {"do_resize": True},  # pictures are resized in any case
            edge=size["longest_edge"] if given.get("do_resize", True) else None,
            tile=tile.get("longest_edge") or 364,
            split=given.get("do_image_splitting", True),
        )


class PixtralSettings(PixelSettings, frozen=True, kw_only=True):
    """The preprocessing of Pixtral's tower. `edge`: the longest side in pixels; larger pictures are made smaller. Then
    both sides are rounded up to multiples of `factor` pixels, of which `patch` is a divisor. `side`: of a token's
    square, in pixels. What is left behind the last whole square, at right and lower edges, becomes no token."""

    edge: int = 1024
    factor: int = 16
    side: int = 16
    patch: int = 16

    @property
    def tokens(self) -> int:
        """The rows of the largest picture."""
        return (-(-self.edge // self.factor) * self.factor // self.side) ** 2

    @classmethod
    def read(cls, given: Mapping[str, Any], patch: int, merge: int, limit: int, factor: int = 0) -> PixtralSettings:
        """Read a preprocessor configuration. `limit`: the longest side that the tower takes. `factor`: as above; 0 for
        `side`. The `patch_size` of the file does not count here, as in transformers. Raises `CheckpointError`."""
        size = stated(given, "size", {"longest_edge": 1024})
        longest = size.get("longest_edge") if isinstance(size, Mapping) else None
        edge = longest or square_side(given, "size", limit)
        if edge > limit:
            raise CheckpointError(
                f"preprocessor_config.json: size has a longest_edge of {edge} pixels, but image_size of the vision "
                f"tower is {limit}"
            )
        for name, usual in (("do_resize", True), ("do_center_crop", False)):
            if given.get(name, usual) is not usual:
                raise CheckpointError(f"preprocessor_config.json: {name} {given[name]} is not supported; leave it out")
        return cls._settled(given, edge=edge, factor=factor or patch * merge, side=patch * merge, patch=patch)


BUDGETS = (70, 140, 280, 560, 1120)
"""The numbers of tokens that Gemma 4 takes pictures of."""


class BudgetSettings(PixelSettings, frozen=True, kw_only=True):
    """The preprocessing of towers that take as many patches as fit `budget` tokens, as Gemma 4's. `patch`: side of a
    patch in pixels; `merge` squared patches are one token. Pixels are between -1 and 1."""

    patch: int = 16
    merge: int = 3
    budget: int = 280

    @property
    def arithmetic(self) -> Literal["scaled", "folded", "divided"]:
        """As the reference's tower, which gets pixels times `scale`: from Pillow's backend in float64."""
        return "scaled" if self.backend == "torchvision" else "divided"

    @property
    def factor(self) -> int:
        """The side of a token's square, in pixels."""
        return self.patch * self.merge

    @property
    def tokens(self) -> int:
        """The rows of the largest picture, which a request may ask for."""
        return max(BUDGETS)

    @classmethod
    def read(cls, given: Mapping[str, Any], patch: int, merge: int, budget: int) -> BudgetSettings:
        """Read the configuration of a picture or video preprocessor for a tower with these sizes. `budget`: the
        default. Raises `CheckpointError`."""
        wanted = given.get("patch_size", 16), given.get("pooling_kernel_size", 3)
        if wanted != (patch, merge):
            raise CheckpointError(
                f"preprocessor_config.json has patch_size and pooling_kernel_size {wanted}, the vision tower "
                f"{patch, merge}"
            )
        plain = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        found = tuple(stated(given, "image_mean", plain[0])), tuple(stated(given, "image_std", plain[1]))
        if given.get("do_normalize", False) and found != plain:
            raise CheckpointError(
                "preprocessor_config.json: image_mean and image_std must be 0 and 1: the vision tower normalises"
            )
        if not given.get("do_resize", True):
            raise CheckpointError("preprocessor_config.json: do_resize false is not supported; supported: true")
        budget = given.get("max_soft_tokens", budget)
        if budget not in BUDGETS:
            known = ", ".join(map(str, BUDGETS))
            raise CheckpointError(f"preprocessor_config.json: max_soft_tokens is {budget}; it must be one of {known}")
        scale = stated(given, "rescale_factor", 1 / 255) if given.get("do_rescale", True) else 1.0
        resample = stated(given, "resample", BICUBIC)
        return cls(resample=resample, scale=scale, mean=_HALF, std=_HALF, patch=patch, merge=merge, budget=budget)


def _edges(size: Any) -> int | tuple[int, int]:
    """The length of the short edge, or (height, width). Raises `CheckpointError` for a bound on the long edge."""
    if not isinstance(size, Mapping):
        return size
    if "longest_edge" in size:
        raise CheckpointError("preprocessor_config.json: size.longest_edge is not supported for this model")
    return size.get("shortest_edge") or _pair(size, "size", "shortest_edge, or ")


def square_side(given: Mapping[str, Any], name: str, default: int) -> int:
    """The side of a square that a field gives as one number, or as height and width. Raises `CheckpointError`."""
    height, width = _pair(stated(given, name, default), name)
    if height != width:
        raise CheckpointError(f"preprocessor_config.json: {name} is {height} x {width}; it must be a square")
    return height


def _pair(size: Any, name: str, before: str = "") -> tuple[int, int]:
    """(height, width) given by one number for both, or by an object."""
    if not isinstance(size, Mapping):
        return size, size
    if "height" not in size or "width" not in size:
        raise CheckpointError(f"preprocessor_config.json: {name} must give {before}height and width")
    return size["height"], size["width"]
