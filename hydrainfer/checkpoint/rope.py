"""Rotary embeddings as config.json describes them, checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydrainfer.checkpoint.files import require
from hydrainfer.core import CheckpointError

ORIGINAL = "original_max_position_embeddings"
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "proportional", "longrope")


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of the first `fraction` of each head. `kind`: "default", "linear" (positions divided by
    `factor`), "llama3" (by the low and high `freq_factor`), "yarn" (by the betas; `truncate`: their bounds are rounded
    to whole pairs), "longrope" (each pair by one of `divisors`) or "proportional" (`fraction` is the share of a head's
    pairs that are rotated; the others stay). cos and sin are multiplied by `scale`. `sections`: numbers of pairs
    rotated by (time, row, column), which sum to half of the rotated dimensions; None if there is one position per
    token. `interleaved`: the sections alternate instead of following each other."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    scale: float = 1.0
    divisors: tuple[float, ...] = ()
    fraction: float = 1.0
    sections: tuple[int, int, int] | None = None
    interleaved: bool = False

    def dim(self, head_dim: int) -> int:
        """The number of a head's dimensions that the rotation covers, including pairs with angle 0."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.fraction)


def rope_config(parameters: Mapping[str, Any] | None, context: int, partial: bool, path: Path) -> Rope:
    """The rotary embedding that `rope_parameters` (transformers 5) describes; the `rope_scaling` of older files is part
    of it. `partial`: whether every kind may rotate only a part of each head."""
    given = {name: value for name, value in (parameters or {}).items() if value is not None}
    kind = given.get("rope_type") or given.get("type") or "default"
    require(kind in ROPE_KINDS, path, f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    fraction = float(given.get("partial_rotary_factor", 1.0))
    whole = partial or kind == "proportional" or fraction == 1.0
    require(whole, path, f"partial_rotary_factor {fraction} is not supported; supported: 1.0")
    rope = Rope(theta=float(given.get("rope_theta", 10000.0)), kind=kind, fraction=fraction)
    try:
        if kind == "proportional":
            return dataclasses.replace(rope, factor=float(given.get("factor", 1.0)))
        if kind == "linear":
            return dataclasses.replace(rope, factor=float(given["factor"]))
        if kind == "llama3":
            return dataclasses.replace(
                rope,
                factor=float(given["factor"]),
                low_freq_factor=float(given["low_freq_factor"]),
                high_freq_factor=float(given["high_freq_factor"]),
                original_context=int(given[ORIGINAL]),
            )
        if kind == "longrope":
            return _longrope(rope, given, context)
        return _yarn(rope, given, context) if kind == "yarn" else rope
    except KeyError as e:
        raise CheckpointError(f"{path}: rope type {kind!r} lacks {e.args[0]}") from None


def _longrope(rope: Rope, given: Mapping[str, Any], context: int) -> Rope:
    """`rope` with LongRoPE's parameters for sequences within the original context (https://arxiv.org/abs/2402.13753).
    `context`: the model's context length."""
    original = int(given[ORIGINAL])
    factor = float(given.get("factor") or context / original)
    usual = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return dataclasses.replace(
        rope,
        original_context=original,
        divisors=tuple(map(float, given["short_factor"])),
        scale=float(given.get("attention_factor", usual)),
    )


def _yarn(rope: Rope, given: Mapping[str, Any], context: int) -> Rope:
    """`rope` with YaRN's parameters. `context`: the model's context length. If no factor is given, it is the ratio of
    `context` to the original context length."""
    original = int(given[ORIGINAL])
    factor = float(given.get("factor") or context / original)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    both = bool(given.get("mscale") and given.get("mscale_all_dim"))
    usual = scale(given["mscale"]) / scale(given["mscale_all_dim"]) if both else scale(1.0)
    return dataclasses.replace(
        rope,
        factor=factor,
        original_context=original,
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=bool(given.get("truncate", True)),
        scale=float(given.get("attention_factor", usual)),
    )
