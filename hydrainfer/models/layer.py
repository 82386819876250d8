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

    mixer: Mixer | None
    input_norm: Tensor | None
    qkv: Weight
    out: Weight
    mlp_norm: Tensor | None
    gate_up: Weight | None
    down: Weight | None
    qkv_bias: Tensor | None
    out_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    head_norms: HeadNorms | None
    row_norms: tuple[Tensor, Tensor] | None
    out_norm: Tensor | None
    down_norm: Tensor | None
    sinks: Tensor | None
    experts: Moe | None
    widths: tuple[int, int, int]
    """The widths of the parts of a `qkv` row: queries with their gates, keys, and values."""
    number: int
    at: int
    head_dim: int
    value_dim: int
    beside: tuple[Tensor, Tensor, Tensor] | None = None
    per_layer: LayerInput | None = None
    scalar: Tensor | None = None

    @classmethod
    def make(cls, c: TextConfig, i: int, ops: OpSet, dtype: torch.dtype, device: torch.device) -> LlamaLayer:
        """The empty weights of layer number `i`."""
        window, at = c.windows[i], c.cache_of(i)
        heads, kv_heads, h, m = c.heads, c.kv_heads_of(window) if at == i else 0, c.hidden, c.intermediate_of(i)
        head_dim, value_dim = c.head_dims(window)
        q, k, v = heads * (head_dim + c.gate_dim), kv_heads * head_dim, kv_heads * value_dim
        if c.keys_as_values and not window:
            v = 0
        into, out, into_bias, out_bias = q + k + v, heads * value_dim, c.qkv_bias, c.out_bias
        mixer = mixer_of(c, i, ops, dtype, device)
        if mixer is not None:
            into, out, into_bias, out_bias = mixer.in_width, mixer.out_width, mixer.bias, mixer.bias
        qk_norm, routed = c.qk_norm if mixer is None else "none", c.has_experts(i)
        beside = routed and c.experts is not None and c.experts.router == "scaled"
        dense = beside or not routed
        first, after = c.norms != "after", c.norms != "before"

        def tensor(*shape: int) -> Tensor:
            return empty(shape, dtype, device)

        def norm(width: int) -> Tensor:
            return empty((width,), norm_dtype(c, dtype), device)

        return cls(
            mixer=mixer,
            input_norm=norm(h) if first else None,
            qkv=matrix(ops, (into, h), dtype, device),
            out=matrix(ops, (h, out), dtype, device),
            mlp_norm=norm(h) if first else None,
            gate_up=matrix(ops, (2 * m, h), dtype, device) if dense else None,
            down=matrix(ops, (h, m), dtype, device) if dense else None,
            qkv_bias=tensor(into) if into_bias else None,
            out_bias=tensor(h) if out_bias else None,
            gate_up_bias=tensor(2 * m) if c.mlp_bias and dense else None,
            down_bias=tensor(h) if c.mlp_bias and dense else None,
            head_norms=HeadNorms(norm(head_dim), norm(head_dim), c.norm_eps) if qk_norm == "head" else None,
            row_norms=(norm(q), norm(k)) if qk_norm == "row" else None,
            out_norm=norm(h) if after else None,
            down_norm=norm(h) if after else None,
            sinks=empty((heads,), torch.float32, device) if c.has_sinks(i) else None,
            experts=Moe.make(c.experts, h, c.norm_eps, ops, dtype, device) if c.experts and routed else None,
            widths=(q, k, v),
            number=i,
            at=at,
            head_dim=head_dim,
            value_dim=value_dim,
            beside=(norm(h), norm(h), norm(h)) if beside else None,
            per_layer=LayerInput.make(c, ops, dtype, device) if c.per_layer else None,
            scalar=tensor(1) if c.scaled_layers else None,
        )

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
        q_norm, k_norm = (None, None) if self.head_norms is None else self.head_norms[:2]
        norms = self.input_norm, self.mlp_norm, q_norm, k_norm, self.sinks
        mlp = self.gate_up, self.gate_up_bias, self.down, self.down_bias
        return PlainLayer(*norms, self.qkv, self.qkv_bias, self.out, self.out_bias, *mlp)

    def multiplied(self) -> list[Weight]:
        found = [weight for weight in (self.qkv, self.out, self.gate_up, self.down) if weight is not None]
        return found if self.experts is None else found + self.experts.multiplied()

    def slots(self, prefix: str, c: TextConfig) -> dict[str, Slot]:
        m, attention, mlp = c.intermediate_of(self.number), f"{prefix}.self_attn", f"{prefix}.mlp"
        norms = {"input_layernorm": self.input_norm, "post_attention_layernorm": self.mlp_norm}
        if self.out_norm is not None:
            norms |= {"post_attention_layernorm": self.out_norm, "post_feedforward_layernorm": self.down_norm}
            norms["pre_feedforward_layernorm"] = self.mlp_norm
        if self.head_norms is not None:
            norms |= {"self_attn.q_norm": self.head_norms.q} | (
                {"self_attn.k_norm": self.head_norms.k} if self.at == self.number else {}
            )
        if self.beside is not None:
            ends = "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"
            norms |= dict(zip(ends, self.beside))
        if self.row_norms is not None:
            norms |= dict(zip(("self_attn.q_norm", "self_attn.k_norm"), self.row_norms))
        plus = float(c.centred_norms)
        found = {f"{prefix}.{name}.weight": Slot(norm, plus=plus) for name, norm in norms.items() if norm is not None}
        for leaf, qkv, out, gate_up, down in (
            ("weight", self.qkv, self.out, self.gate_up, self.down),
            ("bias", self.qkv_bias, self.out_bias, self.gate_up_bias, self.down_bias),
        ):
            if self.mixer is not None and qkv is not None and out is not None:
                found |= {f"{prefix}.{name}.{leaf}": Slot(part) for name, part in self.mixer.around(qkv, out).items()}
                qkv = out = None
            if qkv is not None and "qkv_proj" in c.fused:
                found[f"{attention}.qkv_proj.{leaf}"] = Slot(qkv)
            elif qkv is not None:
                parts = dict(zip("qkv", qkv.split(self.widths)))
                if c.gate_dim == 1:
                    parts["g"], parts["q"] = parts["q"].split([c.heads, c.heads * self.head_dim])
                for letter, part in parts.items():
                    if not part.shape[0]:
                        continue
                    pairs = (self.head_dim, c.rope.dim(self.head_dim)) if c.paired and letter in "qk" else None
                    found[f"{attention}.{letter}_proj.{leaf}"] = Slot(part, pairs=pairs)
            if out is not None:
                found[f"{attention}.o_proj.{leaf}"] = Slot(out)
            if gate_up is not None and down is not None:
                parts = dict(zip(("gate", "up"), gate_up.split([m, m])))
                parts = {"gate_up": gate_up} if "gate_up_proj" in c.fused else parts
                for name, part in (*parts.items(), ("down", down)):
                    found[f"{mlp}.{name}_proj.{leaf}"] = Slot(part)
        if self.sinks is not None:
            found[f"{attention}.sinks"] = Slot(self.sinks)
        if self.mixer is not None:
            found |= self.mixer.slots(prefix)
        if self.per_layer is not None:
            found |= self.per_layer.slots(prefix)
        if self.scalar is not None:
            found[f"{prefix}.layer_scalar"] = Slot(self.scalar)
        return found if self.experts is None else found | self.experts.slots(mlp)


def norm_dtype(c: TextConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of norm weights. It is float32 where they are one plus a small weight, which 16 bits would round
    off."""
    return torch.float32 if c.centred_norms else dtype
