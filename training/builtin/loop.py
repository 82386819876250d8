"""A training run that may be paused, killed and resumed: schedule by time, atomic checkpoints, a JSONL log."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.builtin.muon import Muon

_MUON = 10.0  # its rate, in AdamW's


def processes() -> tuple[int, int]:
    """(rank, number of processes) under `torchrun`: each takes its own batches, and gradients are averaged."""
    n = int(os.environ.get("WORLD_SIZE", "1"))
    if n > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    return (dist.get_rank(), n) if n > 1 else (0, 1)


class Threads:
    """One or all threads, whichever is faster at the time: cores that others use are worse than none."""

    def __init__(self, most: int) -> None:
        self._most, self._times_s = most, {}
        self._now = most
        torch.set_num_threads(most)

    def note(self, step: int, took_s: float) -> None:
        """After `step`, which took so long. Every 60 steps the other number gets three to show its speed."""
        place = step % 60
        if place in (58, 59) or place < 50:
            old = self._times_s.get(self._now, took_s)
            self._times_s[self._now] = took_s if place > 57 else 0.8 * old + 0.2 * took_s
        if place == 56 and self._most > 1:
            self._set(1 if self._now > 1 else self._most)
        elif place == 59 and len(self._times_s) > 1:
            self._set(min(self._times_s, key=self._times_s.__getitem__))

    def _set(self, n: int) -> None:
        self._now = n
        torch.set_num_threads(n)


class Run:
    """Warm-up, constant rate, then a decay to zero ("WSD"). Time is processor time, which neither a pause nor a busy
    machine uses up. The decay starts when its share of `budget_s` is left, or when a file `decay` is in `folder`."""

    def __init__(
        self,
        folder: Path,
        modules: dict[str, nn.Module],
        *,
        rate: float,
        budget_s: float,
        threads: int,
        decay: float = 0.3,
        slow: Sequence[nn.Module] = (),
    ) -> None:
        """`slow`: modules, or parts of them, already trained: they get 0.3 of the rate."""
        self.folder, self._modules, self._rate = folder, modules, rate
        self._rank, self._processes = processes()
        self._threads = Threads(threads)
        self._budget_s, self._decay_s = budget_s, decay * budget_s
        self.step, self.trained_s, self._decay_from_s = 0, 0.0, math.inf
        slower = {id(p) for m in slow for p in m.parameters()}
        named = [(n, p) for m in modules.values() for n, p in m.named_parameters()]
        self._parameters = [p for _, p in named]
        sorts: dict[tuple[bool, float], list[nn.Parameter]] = {}
        for name, p in named:
            sorts.setdefault((".layers." in name and p.ndim == 2, 0.3 if id(p) in slower else 1.0), []).append(p)
        groups = [
            [{"params": found, "share": share} for (inside, share), found in sorts.items() if inside == wanted]
            for wanted in (True, False)
        ]
        self._optimizers = (
            Muon(groups[0], lr=_MUON * rate),
            torch.optim.AdamW(groups[1], lr=rate, betas=(0.9, 0.97), weight_decay=0.01, foreach=True),
        )
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "state.pt").exists():
            self._resume()

    def go(self, loss_of: Callable[[int], tuple[Tensor, dict[str, float]]], *, save_every_s: float = 120.0) -> None:
        """`loss_of(step)` gives the loss to go down and figures to log. SIGTERM saves and ends."""
        asked: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
        saved_s, began_s, used_s, took_s = self.trained_s, time.monotonic(), time.process_time(), 0.0
        shown: dict[str, float] = {}
        stop = False
        while not stop and (scale := self._scale()) > 0:
            for optimizer, full in zip(self._optimizers, (_MUON * self._rate, self._rate)):
                for group in optimizer.param_groups:
                    group["lr"] = full * scale * group["share"]
            loss, figures = loss_of(self.step)
            for p in self._parameters:
                p.grad = None
            loss.backward()
            took_s, stop = self._agree(took_s, bool(asked))
            nn.utils.clip_grad_norm_(self._parameters, 1.0)
            for optimizer in self._optimizers:
                optimizer.step()
            self.trained_s += took_s
            took_s = time.process_time() - used_s
            self._threads.note(self.step, time.monotonic() - began_s)
            began_s, used_s = time.monotonic(), time.process_time()
            self.step += 1
            for key, value in {"loss": float(loss.detach()), **figures}.items():
                shown[key] = 0.95 * shown.get(key, value) + 0.05 * value
            if self.step % 25 == 0:
                self._log({"step": self.step, "trained_s": self.trained_s, "rate": self._rate * scale, **shown})
            if self.trained_s - saved_s > save_every_s:
                self.save()
                saved_s = self.trained_s
        self.save()

    def _agree(self, took_s: float, stop: bool) -> tuple[float, bool]:
        """Average the gradients and `took_s` of all processes; stop, or begin to decay, when one of them is told to."""
        told = (self.folder / "decay").exists()
        if self._processes > 1:
            for p in self._parameters:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            own = torch.tensor([took_s, float(stop), float(told)])
            flat = torch.cat([own, *(p.grad.flatten() for p in self._parameters if p.grad is not None)])
            dist.all_reduce(flat)
            flat /= self._processes
            own, rest = flat.split([3, flat.numel() - 3])
            for p, grad in zip(self._parameters, rest.split([p.numel() for p in self._parameters])):
                p.grad = grad.view_as(p)
            took_s, stop, told = float(own[0]), bool(own[1] > 0), bool(own[2] > 0)
        if self._decay_from_s == math.inf and told:
            self._decay_from_s = self.trained_s
        return took_s, stop

    def _scale(self) -> float:
        """Share of the full learning rate."""
        if self._decay_from_s == math.inf and self.trained_s >= self._budget_s - self._decay_s:
            self._decay_from_s = self.trained_s
        gone = (self.trained_s - self._decay_from_s) / self._decay_s
        return min(1.0, (self.step + 1) / 100) * (1.0 if gone < 0 else max(0.0, 1 - gone))

    def _log(self, figures: dict[str, float]) -> None:
        if self._rank:
            return
        with (self.folder / "log.jsonl").open("a") as f:
            f.write(json.dumps({k: v if k == "step" else float(f"{v:.5g}") for k, v in figures.items()}) + "\n")

    def save(self) -> None:
        if self._rank:
            return
        state: dict[str, Any] = {
            "modules": {name: m.state_dict() for name, m in self._modules.items()},
            "optimizers": [o.state_dict() for o in self._optimizers],
            "numbers": (self.step, self.trained_s, self._decay_from_s),
        }
        part = self.folder / "state.part"
        torch.save(state, part)
        part.replace(self.folder / "state.pt")

    def _resume(self) -> None:
        state = torch.load(self.folder / "state.pt")
        for name, m in self._modules.items():
            m.load_state_dict(state["modules"][name])
        for optimizer, kept in zip(self._optimizers, state["optimizers"]):
            optimizer.load_state_dict(kept)
        self.step, self.trained_s, self._decay_from_s = state["numbers"]


def weights(folder: Path, module: str) -> dict[str, Tensor]:
    """Of a module of a run, as last saved."""
    return torch.load(folder / "state.pt")["modules"][module]
