"""Layers of experts: a router chooses a few of many MLPs for every token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.checkpoint import Experts
from hydrainfer.models.slots import Slot, Weight, empty, matrix
from hydrainfer.ops import ExpertWeights, OpSet, rows_in_steps, with_more_rows


@dataclass(slots=True)
class Moe:
    """One layer's experts. `vector` [hidden] and `factors` [experts]: what a "scaled" router multiplies hidden states
    and weights by. `correction` [experts]: added to the scores that experts are chosen by, not to their weights.
    `shared`: gate-up, down and, if it has one, the gate [1, hidden] of the MLP that all tokens go through."""

    experts: Experts
    hidden: int
    eps: float
    gate: Tensor
    matrices: ExpertWeights
    gate_bias: Tensor | None = None
    correction: Tensor | None = None
    shared: tuple[Weight, Weight, Tensor | None] | None = None
    vector: Tensor | None = None
    factors: Tensor | None = None

    @classmethod
    def make(cls, e: Experts, hidden: int, eps: float, ops: OpSet, dtype: torch.dtype, device: torch.device) -> Moe:
        """The empty weights of `e`, for hidden states [rows, hidden]. `eps`: of the norm before a "scaled" router."""

        def tensor(*shape: int) -> Tensor:
            return empty(shape, dtype, device)

        def weight(n_out: int, n_in: int) -> Weight:
            return matrix(ops, (n_out, n_in), dtype, device)

        sigmoid, m = e.router == "sigmoid", e.intermediate
        matrices = ExpertWeights(
            n=e.count,
            gate_up=weight(e.count * 2 * m, hidden),
            down=weight(e.count * hidden, m),
            limit=e.limit,
            alpha=e.alpha,
            gelu=e.gelu,
        )
        gate = empty((e.count, hidden), torch.float32 if sigmoid else dtype, device)
        moe = cls(experts=e, hidden=hidden, eps=eps, gate=gate, matrices=matrices)
        if e.biased:
            moe.gate_bias = tensor(e.count)
            moe.matrices = matrices._replace(gate_up_bias=tensor(e.count, 2 * m), down_bias=tensor(e.count, hidden))
        if sigmoid and e.corrected:
            moe.correction = empty((e.count,), torch.float32, device)
        if e.shared:
            shared_gate = tensor(1, hidden) if e.shared_gate else None
            moe.shared = weight(2 * e.shared, hidden), weight(hidden, e.shared), shared_gate
        if e.router == "scaled":
            moe.vector, moe.factors = tensor(hidden), tensor(e.count)
        return moe

    def slots(self, prefix: str) -> dict[str, Slot]:
        """The slots of all tensors. `prefix`: the name of the layer's MLP."""
        slots = {f"{prefix}.gate.weight": Slot(self.gate)} | dict(self._stored(f"{prefix}.experts"))
        biases = {
            "gate.bias": self.gate_bias,
            "experts.gate_up_proj_bias": self.matrices.gate_up_bias,
            "experts.down_proj_bias": self.matrices.down_bias,
        }
        slots |= {f"{prefix}.{name}": Slot(bias) for name, bias in biases.items() if bias is not None}
        if self.vector is not None and self.factors is not None:
            slots |= {f"{prefix}.gate.scale": Slot(self.vector), f"{prefix}.gate.per_expert_scale": Slot(self.factors)}
        if self.correction is not None:
            slots[f"{prefix}.gate.e_score_correction_bias"] = Slot(self.correction)
        if self.shared is not None:
            gate_up, down, gate = self.shared
            slots |= _gated_slots(f"{prefix}.shared_expert", gate_up, down)
            if gate is not None:
                slots[f"{prefix}.shared_expert_gate.weight"] = Slot(gate)
        return slots

    def _stored(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """The slots of the experts' matrices, by their names in a checkpoint."""
        e = self.experts
        if e.stored == "apart":
            for i in range(e.count):
                yield from _gated_slots(f"{prefix}.{i}", *self.matrices.of(i)).items()
            return
        for name, weight in (("gate_up_proj", self.matrices.gate_up), ("down_proj", self.matrices.down)):
            outer, inner = weight.shape[0] // e.count, weight.shape[1]
            if e.stored == "stacked":
                yield f"{prefix}.{name}", Slot(weight, (e.count, outer, inner), how="stacked")
            elif e.stored == "together":
                yield f"{prefix}.{name}", Slot(weight, (e.count, inner, outer), how="transposed")
            else:
                rows = e.count, outer, inner // _BLOCK
                yield f"{prefix}.{name}_blocks", Slot(weight, (*rows, _BLOCK // 2), how="mxfp4")
                yield f"{prefix}.{name}_scales", Slot(weight, rows, how="mxfp4 scales")

    def multiplied(self) -> list[Weight]:
        """The weights of one expert, and of the shared one."""
        weights = [*self.matrices.of(0)]
        if self.shared is not None:
            weights += self.shared[:2]
        return weights

    def run(self, x: Tensor, ops: OpSet) -> Tensor:
        """The experts' output for normalised rows: [rows, hidden] → [rows, hidden]."""
        weights, chosen = self.route(x)
        if self.shared is None:
            out = torch.zeros_like(x)
        else:
            out = self._shared(x, ops, *self.shared)
        return ops.experts(out, x, weights, chosen, self.matrices, ops)

    def beside(self, x: Tensor, normed: Tensor, ops: OpSet) -> Tensor:
        """The output of experts beside an MLP, which are chosen by hidden states `x` and run on `normed` ones, both
        [rows, hidden]."""
        weights, chosen = self.route(x)
        return ops.experts(torch.zeros_like(normed), normed, weights, chosen, self.matrices, ops)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of the chosen experts, in the dtype of `x`, and the experts' ids, both [rows, chosen]."""
        e = self.experts
        if self.vector is not None:
            x = F.rms_norm(x.float(), (self.hidden,), eps=self.eps).to(x.dtype) * self.vector * self.hidden**-0.5
        scores = _gate(x.to(self.gate.dtype), self.gate, self.gate_bias)
        if e.router == "chosen":
            best, chosen = scores.topk(e.chosen)
            return best.softmax(-1), chosen
        if e.router in ("softmax", "scaled"):
            weights, chosen = scores.float().softmax(-1).topk(e.chosen)
        else:
            scores = scores.sigmoid()
            chosen = self._corrected(scores).topk(e.chosen)[1]
            weights = scores.gather(1, chosen)
        if e.normed:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        if self.factors is not None:
            weights = weights * self.factors[chosen]
        return (weights * e.scale).to(x.dtype), chosen

    def _corrected(self, scores: Tensor) -> Tensor:
        """The scores that experts are chosen by. All but the `groups_chosen` best groups, by the sum of their two best
        scores, get -inf."""
        e = self.experts
        if self.correction is not None:
            scores = scores + self.correction
        if e.groups == e.groups_chosen:
            return scores
        grouped = scores.unflatten(1, (e.groups, -1))  # [rows, groups, experts of each]
        best = grouped.topk(2).values.sum(-1).topk(e.groups_chosen)[1]
        out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
        return grouped.masked_fill(out[..., None], float("-inf")).flatten(1)

    def _shared(self, x: Tensor, ops: OpSet, gate_up: Weight, down: Weight, gate: Tensor | None) -> Tensor:
        out = ops.linear(ops.silu_and_mul(ops.linear(x, gate_up)), down)
        if gate is not None:
            out.mul_(_gate(x, gate, None).sigmoid_())
        return out


def _gate(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, on a CPU for few numbers of rows, as in `ops.stepping`."""
    n = len(x)
    if x.is_cpu:
        x = with_more_rows(x, rows_in_steps(n) - n)
    return F.linear(x, weight, bias)[:n]


_BLOCK = 32  # numbers that share a scale in MXFP4


def _gated_slots(prefix: str, gate_up: Weight, down: Weight) -> dict[str, Slot]:
    """The slots of an MLP whose gate and up projections are one matrix."""
    gate, up = gate_up.split([gate_up.shape[0] // 2] * 2)
    named = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    return {f"{prefix}.{name}.weight": Slot(weight) for name, weight in named.items()}
