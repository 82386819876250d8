"""The likeliest token of a row without reading a whole head: a copy of it in 8 bits tells which tokens it can be."""

from __future__ import annotations

import torch
from torch import Tensor

from hydrainfer.ops.int8 import Int8Weight

_PIECE_BYTES = 4 << 20  # of a head that are widened at a time
_ROUNDING = 2.0**-24  # of float32


class Shortlist:
    """`narrow`: a head [vocab, hidden] in 8 bits. `errors` float32 [vocab]: a logit by it is at most so far from the
    one by the head, times the length of the hidden row."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.narrow = Int8Weight.empty(shape, device)
        self.errors = torch.empty(shape[0], dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return self.narrow.nbytes + self.errors.nbytes

    def take(self, head: Tensor) -> None:
        """Become that of this head. The error is that of the 8 bits (Cauchy and Schwarz), and what the sums of both
        products and the logit itself can lose to rounding."""
        rounded = 4 * (head.shape[1] + 4) * _ROUNDING + torch.finfo(head.dtype).eps / 2
        step = max(1, _PIECE_BYTES // (4 * head.shape[1]))
        for first in range(0, head.shape[0], step):
            part = slice(first, first + step)
            wide, narrow = head[part].float(), self.narrow[part]
            narrow.take(wide)
            off = (wide - narrow.wide(torch.float32)).norm(dim=1)
            self.errors[part] = 1.01 * (off + rounded * wide.norm(dim=1))
