"""A way to the likeliest token of a row without reading the whole head: an int8 copy tells which tokens can be it."""

from __future__ import annotations

import torch
from torch import Tensor

from hydrainfer.ops.int8 import Int8Weight

_PIECE_BYTES = 4 << 20  # of the widened head, made at a time
_ROUNDING = 2.0**-24  # the relative rounding error of float32


class Shortlist:
    """An int8 copy of a head, with error bounds. `narrow`: the head [vocab, hidden] in 8 bits. `errors` float32
    [vocab]: a logit by `narrow` differs from the head's logit by at most this, times the norm of the hidden row."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.narrow = Int8Weight.empty(shape, device)
        self.errors = torch.empty(shape[0], dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return self.narrow.nbytes + self.errors.nbytes

    def take(self, head: Tensor) -> None:
        """Fill from this head. The error bound covers the 8 bits (by Cauchy-Schwarz), and the rounding in the sums of
        both products and of the logit itself."""
        rounded = 4 * (head.shape[1] + 4) * _ROUNDING + torch.finfo(head.dtype).eps / 2
        step = max(1, _PIECE_BYTES // (4 * head.shape[1]))
        for first in range(0, head.shape[0], step):
            part = slice(first, first + step)
            wide, narrow = head[part].float(), self.narrow[part]
            narrow.take(wide)
            off = (wide - narrow.wide(torch.float32)).norm(dim=1)
            self.errors[part] = 1.01 * (off + rounded * wide.norm(dim=1))
