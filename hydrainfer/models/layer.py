"""One decoder layer's weights, in all families."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hydrainfer.checkpoint import TextConfig
from hydrainfer.models.mixers import Mixer, mixer_of
from hydrainfer.models.moe import Moe
from hydrainfer.models.per_layer import LayerInput
from hydrainfer.models.slots import Slot, Weight, empty, matrix
from hydrainfer.ops import HeadNorms, OpSet, PlainLayer


@dataclass(slots=True)
class LlamaLayer:
    """One layer's weights. The query, key and value projections are fused, and so are gate and up. A layer with experts
    has no MLP. If a `mixer` replaces attention, `qkv` and `out` are the matrices before and after it. `row_norms`: of
    all queries and of all keys of a token; `head_norms`: of each head. `at`: the number of the layer whose keys and
    values it attends to, its own or another's. `beside`: the norms of the MLP's output, of what the experts beside it
    get, and of theirs."""

    qkv: Weight
    out: Weight
    widths: tuple[int, int, int]
    """The widths of the parts of a `qkv` row: queries with their gates, keys, and values."""
    number: int
    at: int
    head_dim: int
    value_dim: int
    mixer: Mixer | None = None
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    input_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    out_norm: Tensor | None = None
    down_norm: Tensor | None = None
    head_norms: HeadNorms | None = None
    row_norms: tuple[Tensor, Tensor] | None = None
    sinks: Tensor | None = None
    gate_up: Weight | None = None
    down: Weight | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    experts: Moe | None = None
    beside: tuple[Tensor, Tensor, Tensor] | None = None
    per_layer: LayerInput | None = None
    scalar: Tensor | None = None

    @classmethod
    def make(cls, c: TextConfig, i: int, ops: OpSet, dtype: torch.dtype, device: torch.device) -> LlamaLayer:
        """The empty weights of layer number `i`."""

        def tensor(*shape: int) -> Tensor:
            return empty(shape, dtype, device)

        def norm(width: int) -> Tensor:
            return empty((width,), norm_dtype(c, dtype), device)

        window, at, h = c.windows[i], c.cache_of(i), c.hidden
        head_dim, value_dim = c.head_dims(window)
        widths = _widths(c, i)
        mixer = mixer_of(c, i, ops, dtype, device)
        if mixer is None:
            into, out = sum(widths), c.heads * value_dim
            into_bias, out_bias = c.qkv_bias, c.out_bias
        else:
            into, out = mixer.in_width, mixer.out_width
            into_bias = out_bias = mixer.bias
        layer = cls(
            qkv=matrix(ops, (into, h), dtype, device),
            out=matrix(ops, (h, out), dtype, device),
            widths=widths,
            number=i,
            at=at,
            head_dim=head_dim,
            value_dim=value_dim,
            mixer=mixer,
        )
        if into_bias:
            layer.qkv_bias = tensor(into)
        if out_bias:
            layer.out_bias = tensor(h)
        if c.norms != "after":
            layer.input_norm, layer.mlp_norm = norm(h), norm(h)
        if c.norms != "before":
            layer.out_norm, layer.down_norm = norm(h), norm(h)
        if mixer is None and c.qk_norm == "head":
            layer.head_norms = HeadNorms(norm(head_dim), norm(head_dim), c.norm_eps)
        if mixer is None and c.qk_norm == "row":
            layer.row_norms = norm(widths[0]), norm(widths[1])
        if c.has_sinks(i):
            layer.sinks = empty((c.heads,), torch.float32, device)
        if c.has_experts(i):
            assert c.experts is not None
            layer.experts = Moe.make(c.experts, h, c.norm_eps, ops, dtype, device)
            if c.experts.router == "scaled":
                layer.beside = norm(h), norm(h), norm(h)
        if layer.experts is None or layer.beside is not None:
            m = c.intermediate_of(i)
            layer.gate_up = matrix(ops, (2 * m, h), dtype, device)
            layer.down = matrix(ops, (h, m), dtype, device)
            if c.mlp_bias:
                layer.gate_up_bias, layer.down_bias = tensor(2 * m), tensor(h)
        if c.per_layer:
            layer.per_layer = LayerInput.make(c, ops, dtype, device)
        if c.scaled_layers:
            layer.scalar = tensor(1)
        return layer

    def plain(self, c: TextConfig) -> PlainLayer | None:
        """This layer as `OpSet.decoder` takes it; None if it has a part that `PlainLayer` lacks."""
        if self.mixer is not None or self.gate_up is None or self.down is None or self.out_norm is not None:
            return None
        if c.gate_dim or c.centred_norms or c.activation != "silu" or c.growth is not None or c.attention_cap:
            return None
        if self.per_layer is not None or self.scalar is not None or self.at != self.number or c.value_norm:
            return None
        if self.row_norms is not None or c.value_scale != 1.0 or c.residual_scale != 1.0:
            return None
        assert self.input_norm is not None and self.mlp_norm is not None
        q_norm = k_norm = None
        if self.head_norms is not None:
            q_norm, k_norm = self.head_norms.q, self.head_norms.k
        norms = self.input_norm, self.mlp_norm, q_norm, k_norm, self.sinks
        mlp = self.gate_up, self.gate_up_bias, self.down, self.down_bias
        return PlainLayer(*norms, self.qkv, self.qkv_bias, self.out, self.out_bias, *mlp)

    def multiplied(self) -> list[Weight]:
        """The matrices that rows are multiplied by; of the experts, those of one and of the shared one."""
        weights = [weight for weight in (self.qkv, self.out, self.gate_up, self.down) if weight is not None]
        if self.experts is not None:
            weights += self.experts.multiplied()
        return weights

    def slots(self, prefix: str, c: TextConfig) -> dict[str, Slot]:
        """The slots of all tensors. `prefix`: the name of the layer."""
        slots = self._norm_slots(prefix, c)
        slots |= self._attention_slots(prefix, c, "weight", self.qkv, self.out)
        slots |= self._attention_slots(prefix, c, "bias", self.qkv_bias, self.out_bias)
        slots |= _mlp_slots(f"{prefix}.mlp", c, "weight", self.gate_up, self.down)
        slots |= _mlp_slots(f"{prefix}.mlp", c, "bias", self.gate_up_bias, self.down_bias)
        if self.sinks is not None:
            slots[f"{prefix}.self_attn.sinks"] = Slot(self.sinks)
        if self.mixer is not None:
            slots |= self.mixer.slots(prefix)
        if self.experts is not None:
            slots |= self.experts.slots(f"{prefix}.mlp")
        if self.per_layer is not None:
            slots |= self.per_layer.slots(prefix)
        if self.scalar is not None:
            slots[f"{prefix}.layer_scalar"] = Slot(self.scalar)
        return slots

    def _norm_slots(self, prefix: str, c: TextConfig) -> dict[str, Slot]:
        norms = {"input_layernorm": self.input_norm}
        if self.out_norm is None:
            norms["post_attention_layernorm"] = self.mlp_norm
        else:
            norms["post_attention_layernorm"] = self.out_norm
            norms["pre_feedforward_layernorm"] = self.mlp_norm
            norms["post_feedforward_layernorm"] = self.down_norm
        if self.head_norms is not None:
            norms["self_attn.q_norm"] = self.head_norms.q
        if self.head_norms is not None and self.at == self.number:
            norms["self_attn.k_norm"] = self.head_norms.k
        if self.row_norms is not None:
            norms["self_attn.q_norm"], norms["self_attn.k_norm"] = self.row_norms
        if self.beside is not None:
            ends = "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"
            norms |= dict(zip(ends, self.beside))
        plus = float(c.centred_norms)
        return {f"{prefix}.{name}.weight": Slot(norm, plus=plus) for name, norm in norms.items() if norm is not None}

    def _attention_slots(
        self, prefix: str, c: TextConfig, leaf: str, qkv: Weight | None, out: Weight | None
    ) -> dict[str, Slot]:
        """The slots before and after attention, or before and after the mixer. `leaf`: "weight" or "bias"."""
        if self.mixer is not None and qkv is not None and out is not None:
            return {f"{prefix}.{name}.{leaf}": Slot(part) for name, part in self.mixer.around(qkv, out).items()}
        prefix = f"{prefix}.self_attn"
        slots = {}
        if qkv is not None and "qkv_proj" in c.fused:
            slots[f"{prefix}.qkv_proj.{leaf}"] = Slot(qkv)
        elif qkv is not None:
            parts = dict(zip("qkv", qkv.split(self.widths)))
            if c.gate_dim == 1:
                parts["g"], parts["q"] = parts["q"].split([c.heads, c.heads * self.head_dim])
            for letter, part in parts.items():
                if not part.shape[0]:
                    continue
                pairs = None
                if c.paired and letter in "qk":
                    pairs = self.head_dim, c.rope.dim(self.head_dim)
                slots[f"{prefix}.{letter}_proj.{leaf}"] = Slot(part, pairs=pairs)
        if out is not None:
            slots[f"{prefix}.o_proj.{leaf}"] = Slot(out)
        return slots


def _widths(c: TextConfig, i: int) -> tuple[int, int, int]:
    """`LlamaLayer.widths` of layer number `i`. A layer that attends to another's keys and values has none."""
    window = c.windows[i]
    head_dim, value_dim = c.head_dims(window)
    q = c.heads * (head_dim + c.gate_dim)
    if c.cache_of(i) != i:
        return q, 0, 0
    kv_heads = c.kv_heads_of(window)
    if c.keys_as_values and not window:
        value_dim = 0
    return q, kv_heads * head_dim, kv_heads * value_dim


def _mlp_slots(prefix: str, c: TextConfig, leaf: str, gate_up: Weight | None, down: Weight | None) -> dict[str, Slot]:
    if gate_up is None or down is None:
        return {}
    if "gate_up_proj" in c.fused:
        parts = {"gate_up": gate_up}
    else:
        parts = dict(zip(("gate", "up"), gate_up.split([gate_up.shape[0] // 2] * 2)))
    parts["down"] = down
    return {f"{prefix}.{name}_proj.{leaf}": Slot(part) for name, part in parts.items()}


def norm_dtype(c: TextConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of norm weights. It is float32 where they are one plus a small weight, which 16 bits would round
    off."""
    if c.centred_norms:
        return torch.float32
    return dtype
