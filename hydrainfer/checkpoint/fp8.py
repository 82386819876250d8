"""Weights in FP8 (E4M3, of the OCP 8-bit Floating Point Specification), as config.json describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydrainfer.checkpoint.files import SIZE, check_fields, listed, maybe

_METHODS = ("fp8", "fbgemm_fp8")
_FIELDS = {"weight_block_size": maybe(listed(SIZE, 2))}


@dataclass(frozen=True, slots=True)
class Fp8:
    """A checkpoint in which some tensors are FP8 numbers with scales beside them. `block`: the rows and columns of a
    tensor that share a scale; None if config.json does not say, and the shapes of the scales decide."""

    block: tuple[int, int] | None


def fp8_of(quantization: Any, path: Path) -> Fp8 | None:
    """The description of FP8 weights in the `quantization_config` of the checkpoint at `path`; None if there is none,
    or another method. Raises `CheckpointError`."""
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") not in _METHODS:
        return None
    check_fields(quantization, path / "config.json", _FIELDS, "quantization_config.")
    block = quantization.get("weight_block_size")
    return Fp8(None if block is None else (block[0], block[1]))
