"""LLaVA-1.5 and LLaVA-NeXT: a CLIP tower and its projector. LLaVA-NeXT encodes a picture whole and in tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import msgspec

from hydrainfer.checkpoint import (
    ACTIVATIONS,
    REFERENCE,
    Activation,
    ClipSettings,
    Family,
    Fit,
    Matrix,
    Names,
    PixelBackend,
    Served,
    TowerConfig,
    VisionConfig,
    VisionShape,
    preprocessing,
    require,
    stated,
)
from hydrainfer.families.granite import FIELDS
from hydrainfer.families.mistral3 import PIXTRAL

Points = tuple[tuple[int, int], ...]
_MUCH_MORE = 1.1
CLIP, SIGLIP = ("clip_vision_model", "clip"), ("siglip_vision_model",)
PINPOINTS: Points = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


@dataclass(frozen=True)
class AnyresConfig(VisionConfig):
    """The vision tower of LLaVA-NeXT, whose `tower` encodes a picture whole and in tiles. `pinpoints`: each (height,
    width) in pixels that a picture may be resized to, multiples of the tower's square. `most`: the most squares' worth
    of rows that the tiles have, about; 0 for no limit. `alone`: only the picture of a prompt that has no other is cut
    into tiles."""

    tower: TowerConfig
    pinpoints: Points
    most: int = 0
    alone: bool = False

    @cached_property
    def tokens(self) -> int:
        """The rows of the largest picture. Its tiles have padding on opposite sides, or none."""
        size, side = self.tower.image_size, self.tower.side
        canvases = [(h // size * side, w // size * side) for h, w in self.pinpoints]
        kept = [(h - n, w) for h, w in canvases for n in range(0, h, 2)]
        kept += [(h, w - n) for h, w in canvases for n in range(0, w, 2)]
        return self.tower.square_tokens + max(h * (w + 1) for h, w in (self.shrunk(*rows) for rows in kept))

    def shrunk(self, rows: int, columns: int) -> tuple[int, int]:
        """(rows, columns) of features that the tiles keep, of so many patches without padding."""
        return shrunk(rows, columns, self.most * self.tower.patches)

    def by(self, backend: PixelBackend) -> Self:
        return replace(self, tower=self.tower.by(backend))

    def shape(self, width: int, fit: Fit) -> VisionShape:
        """The tower for a picture and its tiles, each a square; padding is removed after the tower. Patches per token
        are those of a picture of 4:3. Where it takes five squares, a square picture has a fifth fewer per token and one
        of 3:2 a tenth more. Where many tiles are shrunk to `most` squares' worth of rows, a picture has up to five
        times as many."""
        one = self.tower.shape(width, lambda *_: self.tower.patches)
        high, wide = best_pinpoint(*REFERENCE, self.pinpoints)
        squares = 1 + high * wide // self.tower.image_size**2
        return msgspec.structs.replace(
            one, rows_per_token=squares * one.window_rows / fit(*REFERENCE), picture_tokens=self.tokens
        )


def shrunk(rows: int, columns: int, most: int) -> tuple[int, int]:
    """(rows, columns) of features, made fewer if they are much more than `most`, unless that is 0."""
    ratio = math.sqrt(rows * columns / most) if most else 0.0
    return (int(rows // ratio), int(columns // ratio)) if ratio > _MUCH_MORE else (rows, columns)


def best_pinpoint(width: int, height: int, pinpoints: Points) -> tuple[int, int]:
    """The (height, width) that keeps most of a picture's pixels and, among those, has the least padding."""
    best, most = pinpoints[0], (-1, 0)
    for high, wide in pinpoints:
        scale = min(wide / width, high / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        if (kept, kept - high * wide) > most:
            best, most = (high, wide), (kept, kept - high * wide)
    return best


def llava(hf: Any, path: Path) -> TowerConfig:
    """The checked vision tower of a `LlavaConfig`. Raises `CheckpointError`."""
    pixels = ClipSettings.read(_preprocessing(hf, CLIP, path))
    made = pixels.crop or (pixels.resize if isinstance(pixels.resize, tuple) else None)
    side = hf.vision_config.image_size
    require(
        made == (side, side),
        path,
        f"preprocessor_config.json makes pictures of {made or 'varying'} pixels, "
        f"but the vision tower takes ({side}, {side})",
    )
    return _tower(hf, pixels, path)


def llava_next(hf: Any, path: Path) -> AnyresConfig:
    """The checked vision tower of a `LlavaNextConfig`. Raises `CheckpointError`."""
    return anyres(hf, CLIP + SIGLIP, {"image_grid_pinpoints": PINPOINTS}, {"do_center_crop": True}, path)


def anyres(
    hf: Any, towers: tuple[str, ...], defaults: Mapping[str, Any], settled: Mapping[str, Any], path: Path
) -> AnyresConfig:
    """The checked vision tower, one of `towers`, of a configuration with `image_grid_pinpoints`. `defaults`: what
    preprocessing does if its file does not say; `settled`: what it does whatever the file says. Raises
    `CheckpointError`."""
    given = {**defaults, **_preprocessing(hf, towers, path)}
    tower = _tower(hf, ClipSettings.read(given | {"do_resize": True, "do_pad": False, **settled}), path)
    require(
        not tower.keep_class, path, "vision_feature_select_strategy 'full' is not supported for LLaVA-NeXT; use default"
    )
    side, chosen, size, crop = tower.image_size, hf.image_grid_pinpoints, tower.pixels.resize, tower.pixels.crop
    require(
        bool(chosen) and all(n % side == 0 for p in chosen for n in p),
        path,
        f"image_grid_pinpoints {chosen} must be pairs of multiples of the vision tower's {side} pixels",
    )
    require(
        size in (side, (side, side)) and crop in (None, (side, side)),
        path,
        f"preprocessor_config.json has size {size} and crop_size {crop}, but the vision tower takes ({side}, {side})",
    )
    expected, found = (tuple(tuple(p) for p in ps) for ps in (chosen, stated(given, "image_grid_pinpoints", chosen)))
    require(
        expected == found,
        path,
        f"image_grid_pinpoints of preprocessor_config.json are {[*found]}, those of config.json {[*expected]}; "
        "they must be the same",
    )
    return AnyresConfig(tower, expected)


def _preprocessing(hf: Any, towers: tuple[str, ...], path: Path) -> dict[str, Any]:
    """The preprocessor configuration. If there is none, the one that fits the tower. `towers`: the supported types."""
    v = hf.vision_config
    known = [name for name in towers if name != "clip"]
    require(
        v.model_type in towers,
        path,
        f"vision model {v.model_type!r} is not supported; supported: {', '.join(known)}",
    )
    given = preprocessing(path)
    if given is None:
        points = getattr(hf, "image_grid_pinpoints", PINPOINTS)
        return {"size": v.image_size, "crop_size": v.image_size, "image_grid_pinpoints": points}
    return given


def _tower(hf: Any, pixels: ClipSettings, path: Path) -> TowerConfig:
    """CLIP, or SigLIP, which has no class row and no norm before its layers; and two matrices."""
    v, n, siglip = hf.vision_config, hf.vision_config.num_hidden_layers, hf.vision_config.model_type in SIGLIP
    require(v.num_channels == 3, path, f"num_channels {v.num_channels} is not supported; supported: 3")
    require(
        v.patch_size <= v.image_size,
        path / "config.json",
        f"vision_config.patch_size is {v.patch_size}, more than image_size, {v.image_size}",
    )
    for field, act in (("vision hidden_act", v.hidden_act), ("projector_hidden_act", hf.projector_hidden_act)):
        require(act in ACTIVATIONS, path, f"{field} {act!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    strategy, wanted = hf.vision_feature_select_strategy, hf.vision_feature_layer
    require(
        strategy in ("default", "full"),
        path,
        f"vision_feature_select_strategy {strategy!r} is not supported; supported: default, full",
    )
    require(
        strategy == "full" or not siglip,
        path,
        "vision_feature_select_strategy 'default' leaves out the class row, which SigLIP does not have; use full",
    )
    chosen = tuple(wanted) if isinstance(wanted, list | tuple) else (wanted,)
    require(
        bool(chosen) and all(isinstance(i, int) and -n - 1 <= i <= n for i in chosen),
        path,
        f"vision_feature_layer {wanted} is out of range; the vision tower has {n} layers",
    )
    return TowerConfig(
        hidden=v.hidden_size,
        intermediate=v.intermediate_size,
        layers=n,
        heads=v.num_attention_heads,
        norm_eps=v.layer_norm_eps,
        activation=v.hidden_act,
        pixels=pixels,
        patch=v.patch_size,
        image_size=v.image_size,
        patch_bias=siglip,
        positions="learned",
        class_row=not siglip,
        keep_class=strategy == "full" and not siglip,
        pre_norm=not siglip,
        features=tuple(i if i >= 0 else n + 1 + i for i in chosen),
        steps=(
            Matrix("projector.linear_1", hf.text_config.hidden_size, bool(hf.multimodal_projector_bias)),
            Activation(hf.projector_hidden_act),
            Matrix("projector.linear_2", hf.text_config.hidden_size, bool(hf.multimodal_projector_bias)),
        ),
        scale=float(getattr(hf.text_config, "embedding_multiplier", 1.0)),
    )


NAMES = Names(  # published (before transformers 4.52) and present names
    rooms=(
        (r"(?:model\.)?vision_tower\.(?:vision_model\.)?", "vision."),
        (r"(?:model\.)?image_newline$", "projector.newline"),
        (r"(?:model\.)?multi_modal_projector\.", "projector."),
        (r"(?:model\.)?(?:language_model\.)?lm_head\.", "lm_head."),
        (r"(?:model\.language_model\.model\.|language_model\.model\.|model\.language_model\.)", "text."),
    ),
    vision=(
        (r"\.embeddings\.class_embedding$", ".class_row"),
        (r"\.embeddings\.patch_embedding\.", ".patch."),
        (r"\.embeddings\.position_embedding\.weight$", ".positions"),
        (r"\.pre_layrnorm\.", ".pre_norm."),
        (r"\.post_layernorm\.", ".post_norm."),
        (r"\.encoder\.layers\.", ".blocks."),
        (r"\.layer_norm([12])\.", r".norm_\1."),
        (r"\.self_attn\.([qkv])_proj\.", r".\1."),
        (r"\.self_attn\.out_proj\.", ".out."),
        (r"\.mlp\.fc1\.", ".up."),
        (r"\.mlp\.fc2\.", ".down."),
    ),
)
"""The names of LLaVA, and of families whose parts have the same names, among them SigLIP's."""
_PICTURES = "hydrainfer.processor.pictures"
FAMILIES = {
    "LlavaForConditionalGeneration": Family(
        "llava",
        NAMES,
        tower="hydrainfer.models.vit:SquareVision",
        vision=llava,
        pictures=f"{_PICTURES}.clip:llava_images",
        variants={"pixtral": PIXTRAL},
        n_template=10,  # BOS, USER:, the newline after the picture, ASSISTANT:
    ),
    "LlavaNextForConditionalGeneration": Family(
        "llava_next",
        NAMES,
        tower="hydrainfer.models.anyres:AnyresVision",
        vision=llava_next,
        pictures=f"{_PICTURES}.anyres:anyres_images",
        fields=FIELDS,
        n_template=45,  # the same, after "A chat between a curious human and an artificial intelligence assistant. ..."
    ),
}
SERVED = (
    Served(
        ("LlavaForConditionalGeneration",),
        "LLaVA-1.5, Pixtral-12B",
        "Llama, Mistral (Qwen2, Qwen3: accepted, untested)",
        "CLIP, projector; Pixtral: own ViT of any size, projector",
        "the same for all; Pixtral: one per 16 x 16 pixels, and a text after each row",
        "pictures",
    ),
    Served(
        ("LlavaNextForConditionalGeneration",),
        "LLaVA-NeXT, LLaVA-1.6, Granite Vision 3",
        "Llama, Mistral, Qwen2, Granite (Qwen3: accepted, untested)",
        "CLIP or SigLIP over the picture and its tiles, projector, newline",
        "by size and shape",
        "pictures",
    ),
)
