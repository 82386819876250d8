"""Recurrent layers, which keep one state instead of each token's KV, as config.json describes them, checked."""

from __future__ import annotations

import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hydrainfer.cache import StateLayout
from hydrainfer.checkpoint.files import require

RecurrentKind = Literal["conv", "delta"]
_ATTENTION = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The recurrent layers of a checkpoint, which have no attention. `kind`: "conv", a convolution between two gates
    (LFM2, LFM3), or "delta", the gated delta rule after a convolution (Qwen3-Next). The convolution sees `width` tokens
    of `channels` values each. For the delta rule: number and width of key heads (queries have the same) and of value
    heads; `grouped`: the rows of the input projection are ordered by key head. `bias`: whether the convolution and the
    projections around it have biases."""

    kind: RecurrentKind
    layers: tuple[int, ...]
    width: int
    channels: int
    bias: bool = False
    key_heads: int = 0
    key_dim: int = 0
    value_heads: int = 0
    value_dim: int = 0
    grouped: bool = False

    @property
    def state(self) -> StateLayout:
        """The state that each of the layers keeps for a request."""
        matrix = (self.value_heads, self.key_dim, self.value_dim) if self.kind == "delta" else ()
        return StateLayout(self.layers, (self.width - 1, self.channels), matrix)

    def weights(self, hidden: int) -> int:
        """The number of weights in the matrices of one layer, without its MLP."""
        if self.kind == "conv":
            return 4 * self.channels * hidden
        values = self.value_heads * self.value_dim
        return (self.channels + 2 * values + 2 * self.value_heads) * hidden


def lfm2_names(hf: Any, path: Path) -> Any:
    """The configuration of LFM2 and LFM3 with the field names of Llama's. Raises `CheckpointError` for settings that no
    published model has."""
    given = types.SimpleNamespace(**hf.to_dict())
    given.rms_norm_eps, given.hidden_act, given.model_type = hf.norm_eps, "silu", hf.model_type
    for field, usual in (("use_sandwich_norm", True), ("attention_bias", False)):
        found = getattr(hf, field, usual)
        require(found == usual, path, f"{field} {found} is not supported; supported: {usual}")
    if getattr(hf, "block_auto_adjust_ff_dim", False):
        multiple = hf.block_multiple_of
        require(multiple > 0, path, f"block_multiple_of is {multiple}")
        width, factor = int(2 * hf.intermediate_size / 3), hf.block_ffn_dim_multiplier
        given.intermediate_size = width if factor is None else -(-int(factor * width) // multiple) * multiple
    return given


def short_convolutions(hf: Any, path: Path) -> Recurrence:
    """The convolution layers (type "conv") of LFM2 and LFM3. Raises `CheckpointError`."""
    require(hf.conv_L_cache > 1, path, f"conv_L_cache {hf.conv_L_cache} is not supported; supported: at least 2")
    layers = _of_type(hf, "conv", path, others=_ATTENTION if hf.model_type == "lfm3" else _ATTENTION[:1])
    return Recurrence("conv", layers, hf.conv_L_cache, hf.hidden_size, bool(hf.conv_bias))


def gated_delta(hf: Any, path: Path) -> Recurrence:
    """The delta-rule layers (type "linear_attention") of Qwen3-Next and Qwen3.5. Raises `CheckpointError`."""
    keys, values, width = hf.linear_num_key_heads, hf.linear_num_value_heads, hf.linear_conv_kernel_dim
    require(width > 1, path, f"linear_conv_kernel_dim {width} is not supported; supported: at least 2")
    require(keys > 0 and values % keys == 0, path, f"{values} value heads over {keys} key heads of linear attention")
    return Recurrence(
        "delta",
        _of_type(hf, "linear_attention", path),
        width,
        2 * keys * hf.linear_key_head_dim + values * hf.linear_value_head_dim,
        key_heads=keys,
        key_dim=hf.linear_key_head_dim,
        value_heads=values,
        value_dim=hf.linear_value_head_dim,
        grouped=hf.model_type == "qwen3_next",
    )


def _of_type(hf: Any, name: str, path: Path, others: tuple[str, ...] = _ATTENTION[:1]) -> tuple[int, ...]:
    """The layers whose entry in `layer_types` is `name`. All others must be of the types in `others`, and at least one
    must have full attention. Raises `CheckpointError`."""
    named, n = list(hf.layer_types or ()), hf.num_hidden_layers
    require(len(named) == n, path, f"layer_types names {len(named)} of {n} layers")
    unknown = " and ".join(sorted(set(named) - {name, *others}))
    require(not unknown, path, f"{unknown} is not supported; supported: {', '.join((name, *others))}")
    require("full_attention" in named, path, "layer_types has no full_attention, which is not supported")
    return tuple(i for i, kind in enumerate(named) if kind == name)
