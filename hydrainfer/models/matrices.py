"""Reading tensors that hold many matrices: [out, in], [in, out], or in MXFP4; of the first two also in FP8."""

from __future__ import annotations

from io import FileIO

import torch
from torch import Tensor

from hydrainfer.models.fp8 import widened
from hydrainfer.models.safetensors_file import StoredTensor, read_into
from hydrainfer.models.slots import Slot
from hydrainfer.ops import Int8Weight

_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_BIAS = 127


def copy_matrices(file: FileIO, stored: StoredTensor, slot: Slot, kind: torch.dtype) -> None:
    """Copy the matrices of a tensor [matrices, ...] of dtype `kind`, uint8 if quantised, to its slot, one at a time,
    each brought to [out, in]. The scales of MXFP4 multiply the numbers that are already there."""
    n, *shape = stored.shape
    buffer, outer = torch.empty(shape, dtype=kind), slot.into.shape[0] // n
    for i in range(n):
        read_into(file, stored.offset + i * buffer.nbytes, buffer.view(-1).view(torch.uint8).numpy().data)
        into = slot.into[i * outer : (i + 1) * outer]
        rows = buffer if stored.scales is None else widened(buffer, stored.scales, matrix=i)
        rows = rows.t() if slot.how == "transposed" else rows
        if isinstance(into, Int8Weight):
            into.take(rows)
        elif slot.how in ("stacked", "transposed"):
            into.copy_(rows)
        elif slot.how == "mxfp4":
            into.copy_(_numbers(buffer).flatten(1))
        else:
            wide = into.unflatten(1, (buffer.shape[1], -1))  # [out, blocks, numbers of each]
            exponents = (buffer.int() - _BIAS).to(wide.device)
            wide.copy_(torch.ldexp(wide.float(), exponents[..., None]))


def _numbers(packed: Tensor) -> Tensor:
    """[..., bytes] uint8 → [..., 2 * bytes] float32: two numbers per byte, the lower half first, not yet scaled (E2M1
    of the OCP Microscaling Formats, version 1.0)."""
    numbers = torch.tensor(_E2M1 + [-x for x in _E2M1])
    return numbers[torch.stack([packed & 15, packed >> 4], -1).int()].flatten(-2)
