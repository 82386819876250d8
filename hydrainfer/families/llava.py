"""LLaVA-1.5 and LLaVA-NeXT: a CLIP tower and its projector. LLaVA-NeXT encodes a picture whole and in tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
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

Points = tuple[tuple[int, int], ...]
PINPOINTS: Points = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


@dataclass(frozen=True)
class AnyresConfig(VisionConfig):
    """The vision tower of LLaVA-NeXT, whose `tower` encodes a picture whole and in tiles. `pinpoints`: each
    (height, width) in pixels that a picture may be resized to, multiples of the tower's square."""

    tower: TowerConfig
    pinpoints: Points

    @property
    def tokens(self) -> int:
        """The rows of the largest picture."""
        size, side = self.tower.image_size, self.tower.side
        return self.tower.patches + max(h // size * side * (w // size * side + 1) for h, w in self.pinpoints)

    def by(self, backend: PixelBackend) -> Self:
        return replace(self, tower=self.tower.by(backend))

    def shape(self, width: int, fit: Fit) -> VisionShape:
        """The tower for a picture and its tiles, each a square; padding is removed after the tower. Patches per token
        are those of a picture of 4:3, which takes five squares. Per token, a square picture has a fifth fewer and one
        of 3:2 a tenth more."""
        one = self.tower.shape(width, lambda *_: self.tower.patches)
        squares = 1 + max(h * w for h, w in self.pinpoints) // self.tower.image_size**2
        return msgspec.structs.replace(
            one,
            rows_per_token=squares * one.window_rows / fit(*REFERENCE),
            picture_tokens=max(fit(w, h) for h, w in self.pinpoints),
        )


def llava(hf: Any, path: Path) -> TowerConfig:
    """The checked vision tower of a `LlavaConfig`. Raises `CheckpointError`."""
    pixels = ClipSettings.read(_preprocessing(hf, path))
    made = pixels.crop or (pixels.resize if isinstance(pixels.resize, tuple) else None)
    side = hf.vision_config.image_size
    require(
        made == (side, side),
        path,
        f"preprocessor_config.json makes pictures of {made or 'varying'} pixels, "
        f"but the vision tower takes ({side}, {side})",
    )
    return _clip(hf, pixels, path)


def llava_next(hf: Any, path: Path) -> AnyresConfig:
    """The checked vision tower of a `LlavaNextConfig`. Raises `CheckpointError`."""
    given = _preprocessing(hf, path)
    clip = _clip(hf, ClipSettings.read(given | {"do_resize": True, "do_center_crop": True, "do_pad": False}), path)
    require(
        not clip.keep_class, path, "vision_feature_select_strategy 'full' is not supported for LLaVA-NeXT; use default"
    )
    side, points, size, crop = clip.image_size, hf.image_grid_pinpoints, clip.pixels.resize, clip.pixels.crop
    require(
        bool(points) and all(n % side == 0 for p in points for n in p),
        path,
        f"image_grid_pinpoints {points} must be pairs of multiples of the vision tower's {side} pixels",
    )
    require(
        size in (side, (side, side)) and crop == (side, side),
        path,
        f"preprocessor_config.json has size {size} and crop_size {crop}, but the vision tower takes ({side}, {side})",
    )
    expected, found = (tuple(tuple(p) for p in ps) for ps in (points, stated(given, "image_grid_pinpoints", PINPOINTS)))
    require(
        expected == found,
        path,
        f"image_grid_pinpoints of preprocessor_config.json are {[*found]}, those of config.json {[*expected]}; "
        "they must be the same",
    )
    return AnyresConfig(clip, expected)


def _preprocessing(hf: Any, path: Path) -> dict[str, Any]:
    """The preprocessor configuration. If there is none, the one that fits the tower."""
    v = hf.vision_config
    require(
        v.model_type in ("clip_vision_model", "clip"),
        path,
        f"vision model {v.model_type!r} is not supported; supported: clip_vision_model",
    )
    given = preprocessing(path)
    if given is None:
        points = getattr(hf, "image_grid_pinpoints", PINPOINTS)
        return {"size": v.image_size, "crop_size": v.image_size, "image_grid_pinpoints": points}
    return given


def _clip(hf: Any, pixels: ClipSettings, path: Path) -> TowerConfig:
    v, n = hf.vision_config, hf.vision_config.num_hidden_layers
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
        positions="learned",
        class_row=True,
        keep_class=strategy == "full",
        pre_norm=True,
        features=tuple(i if i >= 0 else n + 1 + i for i in chosen),
        steps=(
            Matrix("projector.linear_1", hf.text_config.hidden_size, bool(hf.multimodal_projector_bias)),
            Activation(hf.projector_hidden_act),
            Matrix("projector.linear_2", hf.text_config.hidden_size, bool(hf.multimodal_projector_bias)),
        ),
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
        n_template=10,  # BOS, USER:, the newline after the picture, ASSISTANT:
    ),
    "LlavaNextForConditionalGeneration": Family(
        "llava_next",
        NAMES,
        tower="hydrainfer.models.anyres:AnyresVision",
        vision=llava_next,
        pictures=f"{_PICTURES}.anyres:llava_next_images",
        n_template=45,  # the same, after "A chat between a curious human and an artificial intelligence assistant. ..."
    ),
}
SERVED = (
    Served(
        ("LlavaForConditionalGeneration",),
        "LLaVA-1.5",
        "Llama (Mistral, Qwen2, Qwen3: accepted, untested)",
        "CLIP, projector",
        "the same for all",
        "pictures",
    ),
    Served(
        ("LlavaNextForConditionalGeneration",),
        "LLaVA-NeXT, LLaVA-1.6",
        "Llama, Mistral, Qwen2 (Qwen3: accepted, untested)",
        "CLIP over the picture and its tiles, projector, newline",
        "by size and shape",
        "pictures",
    ),
)
