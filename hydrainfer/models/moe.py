"""Layers of experts: a router chooses a few of many MLPs for every token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.checkpoint import Experts
from hydrainfer.models.slots import Slot, Weight, empty, matrix
from hydrainfer.ops import OpSet


@dataclass(slots=True)
class Moe:
    """One layer's experts. The matrices of all lie one below the other: expert i has rows `i * 2 * intermediate` and on
    of `gate_up`, and `i * hidden` and on of `down`. `correction` [experts]: added to scores for the choice only.
    `shared`: gate-up, down, and the gate [1, hidden] of the MLP that all tokens go through."""

    experts: Experts
    hidden: int
    gate: Tensor
    gate_up: Weight
    down: Weight
    gate_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    correction: Tensor | None
    shared: tuple[Weight, Weight, Tensor] | None

    @classmethod
    def make(cls, e: Experts, hidden: int, ops: OpSet, dtype: torch.dtype, device: torch.device) -> Moe:
        m, wide = e.intermediate, torch.float32 if e.router == "sigmoid" else dtype
        shared = (
            matrix(ops, (2 * e.shared, hidden), dtype, device),
            matrix(ops, (hidden, e.shared), dtype, device),
            empty((1, hidden), dtype, device),
        )
        return cls(
            experts=e,
            hidden=hidden,
            gate=empty((e.count, hidden), wide, device),
            gate_up=matrix(ops, (e.count * 2 * m, hidden), dtype, device),
            down=matrix(ops, (e.count * hidden, m), dtype, device),
            gate_bias=empty((e.count,), dtype, device) if e.biased else None,
            gate_up_bias=empty((e.count, 2 * m), dtype, device) if e.biased else None,
            down_bias=empty((e.count, hidden), dtype, device) if e.biased else None,
            correction=empty((e.count,), torch.float32, device) if e.router == "sigmoid" else None,
            shared=shared if e.shared else None,
        )

    def slots(self, prefix: str) -> dict[str, Slot]:
        """`prefix`: the name of the layer's MLP."""
        found = {f"{prefix}.gate.weight": Slot(self.gate)} | dict(self._stored(f"{prefix}.experts"))
        if self.gate_bias is not None and self.gate_up_bias is not None and self.down_bias is not None:
            found[f"{prefix}.gate.bias"] = Slot(self.gate_bias)
            found[f"{prefix}.experts.gate_up_proj_bias"] = Slot(self.gate_up_bias)
            found[f"{prefix}.experts.down_proj_bias"] = Slot(self.down_bias)
        if self.correction is not None:
            found[f"{prefix}.gate.e_score_correction_bias"] = Slot(self.correction)
        if self.shared is not None:
            gate_up, down, gate = self.shared
            found |= _gated_slots(f"{prefix}.shared_expert", gate_up, down)
            found[f"{prefix}.shared_expert_gate.weight"] = Slot(gate)
        return found

    def _stored(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Where the matrices are found in a checkpoint."""
        e = self.experts
        if e.stored == "apart":
            for i in range(e.count):
                yield from _gated_slots(f"{prefix}.{i}", *self._of(i)).items()
            return
        for name, weight in (("gate_up_proj", self.gate_up), ("down_proj", self.down)):
            outer, inner = weight.shape[0] // e.count, weight.shape[1]
            if e.stored == "together":
                yield f"{prefix}.{name}", Slot(weight, (e.count, inner, outer), how="transposed")
            else:
                rows = e.count, outer, inner // _BLOCK
                yield f"{prefix}.{name}_blocks", Slot(weight, (*rows, _BLOCK // 2), how="mxfp4")
                yield f"{prefix}.{name}_scales", Slot(weight, rows, how="mxfp4 scales")

    def run(self, x: Tensor, ops: OpSet) -> Tensor:
        """[rows, hidden] → [rows, hidden], for normalised rows. The rows of an expert are multiplied together."""
        weights, chosen = self.route(x)
        out = torch.zeros_like(x) if self.shared is None else self._shared(x, ops, *self.shared)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        rows, weights = order // chosen.shape[1], weights.flatten()[order, None]
        first = 0
        for i, n in enumerate(flat.bincount(minlength=self.experts.count).tolist()):
            if n:
                mine = rows[first : first + n]
                given = self._expert(i, x[mine], ops).mul_(weights[first : first + n])
                out.index_add_(0, mine, given)
                first += n
        return out

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of the chosen experts in the type of `x`, and which they are, both [rows, chosen]."""
        e = self.experts
        scores = F.linear(x.to(self.gate.dtype), self.gate, self.gate_bias)
        if e.router == "chosen":
            best, chosen = scores.topk(e.chosen)
            return best.softmax(-1), chosen
        if e.router == "softmax":
            weights, chosen = scores.float().softmax(-1).topk(e.chosen)
        else:
            scores = scores.sigmoid()
            chosen = self._corrected(scores).topk(e.chosen)[1]
            weights = scores.gather(1, chosen)
        if e.normed:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        return (weights * e.scale).to(x.dtype), chosen

    def _corrected(self, scores: Tensor) -> Tensor:
        """What experts are chosen by: those of groups whose best two come to little are out."""
        e = self.experts
        assert self.correction is not None
        found = scores + self.correction
        if e.groups == e.groups_chosen:
            return found
        grouped = found.unflatten(1, (e.groups, -1))  # [rows, groups, experts of each]
        best = grouped.topk(2).values.sum(-1).topk(e.groups_chosen)[1]
        out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
        return grouped.masked_fill(out[..., None], float("-inf")).flatten(1)

    def _expert(self, i: int, x: Tensor, ops: OpSet) -> Tensor:
        e, (gate_up, down) = self.experts, self._of(i)
        wide = ops.linear(x, gate_up, None if self.gate_up_bias is None else self.gate_up_bias[i])
        gated = clamped_swiglu(wide, e.limit, e.alpha) if e.limit else ops.silu_and_mul(wide)
        return ops.linear(gated, down, None if self.down_bias is None else self.down_bias[i])

    def _of(self, i: int) -> tuple[Weight, Weight]:
        """The matrices of expert `i`: [2 * intermediate, hidden] and [hidden, intermediate]."""
        h, m = self.hidden, self.experts.intermediate
        return self.gate_up[i * 2 * m : (i + 1) * 2 * m], self.down[i * h : (i + 1) * h]

    def _shared(self, x: Tensor, ops: OpSet, gate_up: Weight, down: Weight, gate: Tensor) -> Tensor:
        given = ops.linear(ops.silu_and_mul(ops.linear(x, gate_up)), down)
        return given.mul_(F.linear(x, gate).sigmoid_())


_BLOCK = 32  # numbers that share a scale in MXFP4


def clamped_swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """[rows, 2 * width], gates and what they multiply by turns → [rows, width]."""
    gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(gate * alpha)


def _gated_slots(prefix: str, gate_up: Weight, down: Weight) -> dict[str, Slot]:
    """The slots of an MLP whose gate and up projections are one matrix."""
    gate, up = gate_up.split([gate_up.shape[0] // 2] * 2)
    named = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    return {f"{prefix}.{name}.weight": Slot(weight) for name, weight in named.items()}
