"""How long does the scheduler take per step, for 1 to 256 running requests?

`steady`: everything decodes. `churn`: answers end and new requests of 600 tokens are admitted and prefilled all the
time. Timed is what the engine calls between two batches: `next` and `apply`. No tensors, no device.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.figure import save_lines
from benchmarks.record import write_result
from hydrainfer.cache import CacheSet, CacheSpec
from hydrainfer.core import Lane, Request, Role, SamplingParams, StepResult, TokenWork
from hydrainfer.scheduler import Budgets, Scheduler
from hydrainfer.workload import Percentiles

PROMPT_TOKENS = 600  # a 336 px picture and a question, to LLaVA-1.5
TARGET_S = 100e-6  # for 64 running requests


class Load:
    """Keeps `n` requests in a scheduler and answers every batch at once."""

    def __init__(self, n: int, max_tokens: range, seed: int) -> None:
        self._draw, self._lengths = random.Random(seed), max_tokens
        kv = CacheSpec.full(layers=12, kv_heads=4, head_dim=64, dtype="float32")
        caches = CacheSet({kv: n * kv.blocks_for(PROMPT_TOKENS + max_tokens.stop + 64)})
        self.scheduler = Scheduler(Role.parse("EPD"), caches, Budgets(tokens=1024, running=n))
        self._n_added = 0
        for _ in range(n):
            self._add()

    def _add(self) -> None:
        n = self._draw.choice(self._lengths)
        sampling = SamplingParams(max_tokens=n, ignore_eos=True)
        name = f"r{self._n_added}"
        self._n_added += 1
        request = Request(id=name, prompt_ids=(1,) * PROMPT_TOKENS, sampling=sampling, max_tokens=n, seed=0)
        self.scheduler.add(request, 0.0)

    def step(self) -> tuple[float, float]:
        """Seconds that `next` and `apply` took; ended requests are replaced outside of both."""
        start_s = time.perf_counter()
        batch = self.scheduler.next(0.0, Lane.LANGUAGE)
        next_s = time.perf_counter() - start_s
        assert batch is not None
        n_sampled = sum(isinstance(item, TokenWork) and item.sample for item in batch.work)
        result = StepResult(batch, tokens=[5] * n_sampled)
        start_s = time.perf_counter()
        outcomes = self.scheduler.apply(result, 0.0)
        apply_s = time.perf_counter() - start_s
        self.scheduler.started.clear()  # as the engine does
        for outcome in outcomes:
            if outcome.finish is not None:
                self._add()
        return next_s, apply_s


def measure(n: int, n_steps: int, churn: bool, seed: int) -> dict[str, Any]:
    forever = n_steps + 2 * n + 64
    load = Load(n, range(16, 128) if churn else range(forever, forever + 1), seed)
    for _ in range(n + 32):
        load.step()  # until all have been prefilled
    times = [load.step() for _ in range(n_steps)]
    return {
        "next_s": msgspec.to_builtins(Percentiles.of(t for t, _ in times)),
        "apply_s": msgspec.to_builtins(Percentiles.of(t for _, t in times)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {"target_s": TARGET_S}
    shown = Table(title="µs, p50 (p99)")
    for column in ("running", "steady next", "steady apply", "churn next", "churn apply"):
        shown.add_column(column, justify="right")
    for n in args.running:
        row = results[str(n)] = {
            name: measure(n, args.steps, churn, args.seed) for name, churn in (("steady", False), ("churn", True))
        }
        cells = [row[a][b] for a in ("steady", "churn") for b in ("next_s", "apply_s")]
        shown.add_row(str(n), *(f"{c['p50'] * 1e6:.1f} ({c['p99'] * 1e6:.1f})" for c in cells))
    Console().print(shown)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    path = write_result("b02_scheduler", __doc__.splitlines()[0], settings, results, args.out)
    series = {
        f"{kind} {call.removesuffix('_s')}": [results[str(n)][kind][call]["p50"] * 1e6 for n in args.running]
        for kind in ("steady", "churn")
        for call in ("next_s", "apply_s")
    }
    x = [float(n) for n in args.running]
    title = "Scheduler time per step, median"
    save_lines(path.with_suffix(".png"), title, "running requests", "µs", x, series, log=True)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
