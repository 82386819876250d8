"""The weights of a layer's experts, stacked along their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from hydrainfer.ops.int8 import Int8Weight


class ExpertWeights(NamedTuple):
    """`n` gated MLPs. The rows of expert i start at `i * 2 * width` in `gate_up` and at `i * hidden` in `down`. Biases:
    [n, rows per expert]. `limit`, `alpha`: parameters of GPT-OSS's gate; without a limit the gate is SiLU."""

    n: int
    gate_up: Tensor | Int8Weight
    down: Tensor | Int8Weight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    limit: float = 0.0
    alpha: float = 1.0

    def of(self, i: int) -> tuple[Tensor | Int8Weight, Tensor | Int8Weight]:
        """The matrices of expert `i`: [2 * width, hidden] and [hidden, width]."""
        wide, narrow = (weight.shape[0] // self.n for weight in (self.gate_up, self.down))
        return self.gate_up[i * wide : (i + 1) * wide], self.down[i * narrow : (i + 1) * narrow]
