"""LLaVA-1.5: CLIP patches through a two-layer projector into a Llama decoder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hydrainfer.models.activations import activation
from hydrainfer.models.clip import Clip
from hydrainfer.models.config import ACTIVATIONS, ClipConfig, ModelConfig, read_json, require, text_config
from hydrainfer.models.llama import Llama
from hydrainfer.models.picture import Picture
from hydrainfer.models.slots import Slot, empty
from hydrainfer.ops import OpSet

_RENAMES = (  # published (before transformers 4.52) and present names → ours
    (re.compile(r"^(?:model\.)?vision_tower\.(?:vision_model\.)?"), "vision."),
    (re.compile(r"^(?:model\.)?multi_modal_projector\."), "projector."),
    (re.compile(r"^(?:model\.)?(?:language_model\.)?lm_head\."), "lm_head."),
    (re.compile(r"^(?:model\.language_model\.model\.|language_model\.model\.|model\.language_model\.)"), "text."),
)
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def canonical(name: str) -> str:
    """`vision_tower.vision_model.pre_layrnorm.bias` → `vision.pre_layrnorm.bias`; unknown names stay."""
    for pattern, ours in _RENAMES:
        renamed, n = pattern.subn(ours, name, count=1)
        if n:
            return renamed
    return name


def read(hf: Any, path: Path) -> ModelConfig:
    """Check and describe a transformers `LlavaConfig`. Raises `CheckpointError`."""
    require(hf.model_type == "llava", path, f"model_type {hf.model_type!r} is not supported; supported: llava")
    tied = bool(hf.tie_word_embeddings or hf.text_config.tie_word_embeddings)
    act = hf.projector_hidden_act
    require(
        act in ACTIVATIONS, path, f"projector_hidden_act {act!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
    )
    return ModelConfig(
        architecture="LlavaForConditionalGeneration",
        text=text_config(hf.text_config, path, tied=tied),
        vision=_vision_config(hf, path),
        media_tokens=(hf.image_token_id if hasattr(hf, "image_token_id") else hf.image_token_index,),
        dtype=str(hf.dtype).removeprefix("torch.") if hf.dtype is not None else "float16",
    )


def _vision_config(hf: Any, path: Path) -> ClipConfig:
    v = hf.vision_config
    require(
        v.model_type in ("clip_vision_model", "clip"),
        path,
        f"vision model {v.model_type!r} is not supported; supported: clip_vision_model",
    )
    require(v.num_channels == 3, path, f"num_channels {v.num_channels} is not supported; supported: 3")
    act = v.hidden_act
    require(
        act in ACTIVATIONS, path, f"vision hidden_act {act!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
    )
    strategy = hf.vision_feature_select_strategy
    require(
        strategy in ("default", "full"),
        path,
        f"vision_feature_select_strategy {strategy!r} is not supported; supported: default, full",
    )
    wanted = hf.vision_feature_layer
    chosen = tuple(wanted) if isinstance(wanted, list | tuple) else (wanted,)
    n = v.num_hidden_layers
    require(
        bool(chosen) and all(isinstance(i, int) and -n - 1 <= i <= n for i in chosen),
        path,
        f"vision_feature_layer {wanted} is out of range; the vision tower has {n} layers",
    )
    mean, std, rescale = _pixel_scaling(path)
    return ClipConfig(
        hidden=v.hidden_size,
        intermediate=v.intermediate_size,
        layers=n,
        heads=v.num_attention_heads,
        norm_eps=v.layer_norm_eps,
        image_size=v.image_size,
        patch_size=v.patch_size,
        activation=act,
        features=tuple(i if i >= 0 else n + 1 + i for i in chosen),
        keep_class=strategy == "full",
        mean=mean,
        std=std,
        rescale=rescale,
        projector_activation=hf.projector_hidden_act,
        projector_bias=bool(hf.multimodal_projector_bias),
    )


def _pixel_scaling(path: Path) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """(mean, std, rescale factor) of preprocessor_config.json (or processor_config.json); CLIP's where it is silent."""
    given: dict[str, Any] = {}
    if (path / "preprocessor_config.json").exists():
        given = read_json(path / "preprocessor_config.json")
    elif (path / "processor_config.json").exists():
        given = read_json(path / "processor_config.json").get("image_processor") or {}
    normalise = given.get("do_normalize", True)
    mean = tuple(given.get("image_mean") or _CLIP_MEAN) if normalise else (0.0, 0.0, 0.0)
    std = tuple(given.get("image_std") or _CLIP_STD) if normalise else (1.0, 1.0, 1.0)
    require(len(mean) == 3 and len(std) == 3 and all(std), path, "image_mean and image_std need three values each")
    return mean, std, float(given.get("rescale_factor", 1 / 255)) if given.get("do_rescale", True) else 1.0


def language(config: ModelConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> Llama:
    return Llama(config.text, ops, dtype, device)


class LlavaVision:
    """Vision tower and projector: uint8 pictures → rows of the language model's width."""

    def __init__(self, config: ModelConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config.vision
        self.clip = Clip(config.vision, ops, dtype, device)
        self._ops = ops
        self._activation = activation(config.vision.projector_activation, ops)
        width, inner, bias = (
            config.text.hidden,
            config.vision.hidden * len(config.vision.features),
            config.vision.projector_bias,
        )
        self.linear_1 = empty((width, inner), dtype, device)
        self.linear_2 = empty((width, width), dtype, device)
        self.bias_1 = empty((width,), dtype, device) if bias else None
        self.bias_2 = empty((width,), dtype, device) if bias else None

    @property
    def width(self) -> int:
        return self.linear_2.shape[0]

    def slots(self) -> dict[str, Slot]:
        found = self.clip.slots() | {
            "projector.linear_1.weight": Slot(self.linear_1),
            "projector.linear_2.weight": Slot(self.linear_2),
        }
        if self.bias_1 is not None and self.bias_2 is not None:
            found |= {"projector.linear_1.bias": Slot(self.bias_1), "projector.linear_2.bias": Slot(self.bias_2)}
        return found

    def rows(self, picture: Picture) -> int | None:
        """Of its embedding; None if it is no picture that this tower takes."""
        side = self.config.image_size
        return self.config.tokens if picture.pixels.shape == (side, side, 3) else None

    def encode(self, pictures: list[Picture]) -> list[Tensor]:
        """uint8 [image_size, image_size, 3] each → [tokens, width] each."""
        features = self.clip.forward([p.pixels for p in pictures])  # [pictures, tokens, vision hidden * features]
        rows = features.flatten(0, 1)
        hidden = self._activation(self._ops.linear(rows, self.linear_1, self.bias_1))
        return list(self._ops.linear(hidden, self.linear_2, self.bias_2).unflatten(0, features.shape[:2]))
