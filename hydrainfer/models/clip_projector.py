"""CLIP and a two-layer projector: how the LLaVA family sees. Reading what config.json says of them, and the tower."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hydrainfer.config import preprocessing
from hydrainfer.models.activations import activation
from hydrainfer.models.clip import Clip
from hydrainfer.models.config import ACTIVATIONS, ClipConfig, pixel_scaling, require
from hydrainfer.models.slots import Slot, empty
from hydrainfer.ops import OpSet

_AT_ONCE = 16  # squares through CLIP in one pass: what bounds its memory, however many come together


def clip_config(hf: Any, path: Path) -> ClipConfig:
    """The vision part of a transformers configuration of the LLaVA family. Raises `CheckpointError`."""
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
    projector = hf.projector_hidden_act
    require(
        projector in ACTIVATIONS,
        path,
        f"projector_hidden_act {projector!r} is not supported; supported: {', '.join(ACTIVATIONS)}",
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
    mean, std, rescale = pixel_scaling(preprocessing(path) or {}, path)
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
        projector_activation=projector,
        projector_bias=bool(hf.multimodal_projector_bias),
    )


class ClipProjector:
    """uint8 squares → rows of the language model's width."""

    def __init__(self, config: ClipConfig, width: int, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._clip = Clip(config, ops, dtype, device)
        self._ops = ops
        self._activation = activation(config.projector_activation, ops)
        inner = config.hidden * len(config.features)
        self.linear_1 = empty((width, inner), dtype, device)
        self.linear_2 = empty((width, width), dtype, device)
        self.bias_1 = empty((width,), dtype, device) if config.projector_bias else None
        self.bias_2 = empty((width,), dtype, device) if config.projector_bias else None

    def slots(self) -> dict[str, Slot]:
        found = self._clip.slots() | {
            "projector.linear_1.weight": Slot(self.linear_1),
            "projector.linear_2.weight": Slot(self.linear_2),
        }
        if self.bias_1 is not None and self.bias_2 is not None:
            found |= {"projector.linear_1.bias": Slot(self.bias_1), "projector.linear_2.bias": Slot(self.bias_2)}
        return found

    def encode(self, squares: Sequence[np.ndarray]) -> Tensor:
        """uint8 [image_size, image_size, 3] each → [squares, tokens, width]."""
        parts = [self._pass(squares[i : i + _AT_ONCE]) for i in range(0, len(squares), _AT_ONCE)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _pass(self, squares: Sequence[np.ndarray]) -> Tensor:
        features = self._clip.forward(squares)  # [squares, tokens, vision hidden * features]
        hidden = self._activation(self._ops.linear(features.flatten(0, 1), self.linear_1, self.bias_1))
        return self._ops.linear(hidden, self.linear_2, self.bias_2).unflatten(0, features.shape[:2])
