"""The optimizer of the layers' matrices: momentum whose singular values are all brought to one (Jordan et al., "Muon").
It makes more of each of the few steps that a CPU has time for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315  # the published quintic iteration


class Muon(torch.optim.Optimizer):
    """For matrices inside layers only. `lr`: spectral norm of one step on a square matrix."""

    def __init__(self, parameters: Iterable[dict[str, Any]], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002  # the base class has it
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[p.shape].append(p)
            for same in alike.values():
                self._step(same, group)

    def _step(self, same: list[Tensor], group: dict[str, Any]) -> None:
        updates = []
        for p in same:
            assert p.grad is not None
            kept = self.state[p].setdefault("momentum", torch.zeros_like(p))
            kept.lerp_(p.grad, 1 - group["momentum"])
            updates.append(p.grad.lerp(kept, group["momentum"]))
        scale = group["lr"] * max(1.0, same[0].shape[0] / same[0].shape[1]) ** 0.5
        for p, update in zip(same, orthogonal(torch.stack(updates))):
            p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=scale)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """[n, rows, columns] → the same with singular values near one."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * square @ square) @ x
    return x.mT if tall else x
