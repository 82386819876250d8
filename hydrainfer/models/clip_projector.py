"""CLIP and a two-layer projector, the vision tower of the LLaVA family."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hydrainfer.families.llava import ClipConfig
from hydrainfer.models.activations import activation
from hydrainfer.models.clip import Clip
from hydrainfer.models.picture import PassSize, Squares
from hydrainfer.models.slots import Slot, empty
from hydrainfer.ops import OpSet

_AT_ONCE = 16  # squares


class ClipProjector:
    """CLIP and its projector: from uint8 squares to rows of the language model's width."""

    def __init__(self, config: ClipConfig, width: int, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._clip = Clip(config, ops, dtype, device)
        self._ops = ops
        self.passes = Squares(self._pass, config.image_size, device, _AT_ONCE)
        self._activation = activation(config.projector_activation, ops)
        inner = config.hidden * len(config.features)
        self.linear_1 = empty((width, inner), dtype, device)
        self.linear_2 = empty((width, width), dtype, device)
        self.bias_1 = empty((width,), dtype, device) if config.projector_bias else None
        self.bias_2 = empty((width,), dtype, device) if config.projector_bias else None

    @staticmethod
    def pass_size(c: ClipConfig) -> PassSize:
        rows = c.patches + 1
        return PassSize(_AT_ONCE * rows, Squares.sizes[-1] * rows, c.hidden, c.intermediate, rotates=False)

    def slots(self) -> dict[str, Slot]:
        found = self._clip.slots() | {
            "projector.linear_1.weight": Slot(self.linear_1),
            "projector.linear_2.weight": Slot(self.linear_2),
        }
        if self.bias_1 is not None and self.bias_2 is not None:
            found |= {"projector.linear_1.bias": Slot(self.bias_1), "projector.linear_2.bias": Slot(self.bias_2)}
        return found

    def multiplied(self) -> list[Tensor]:
        return [*self._clip.multiplied(), self.linear_1, self.linear_2]

    def encode(self, squares: Sequence[np.ndarray]) -> Tensor:
        """The embeddings [squares, tokens, width] of squares, uint8 [image_size, image_size, 3] each."""
        parts = self.passes.encode(squares)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _pass(self, pixels: Tensor) -> Tensor:
        features = self._clip.forward(pixels)  # [squares, tokens, vision hidden * features]
        hidden = self._activation(self._ops.linear(features.flatten(0, 1), self.linear_1, self.bias_1))
        return self._ops.linear(hidden, self.linear_2, self.bias_2).unflatten(0, features.shape[:2])
