"""How long does the scheduler take per step, for 1 to 256 running requests?

`steady`: everything decodes. `churn`: answers end and new requests of 600 tokens are admitted and prefilled all the
time. `arrivals`: in every step a request (or `--arrivals`) comes, is admitted and has its picture encoded, another is
prefilled and another ends. `queue`: churn, while 1,000 others wait, half of them with a picture. Timed is what the
engine calls between two batches: `next` of both lanes, and `apply`. No tensors, no device.
"""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec

from benchmarks.command import new_console, new_table, options
from benchmarks.figure import save_lines
from benchmarks.record import write_result
from hydrainfer.cache import CacheSet, EmbedSpec, FullSpec
from hydrainfer.core import (
    Lane,
    MediaSpan,
    Request,
    Role,
    SamplingParams,
    StepBatch,
    StepResult,
    TokenWork,
    chain_of,
    chain_root,
)
from hydrainfer.scheduler import Budgets, Policy, Scheduler
from hydrainfer.workload.results import Percentiles

PROMPT_TOKENS = 600  # a 336 px picture and a question, to LLaVA-1.5
PICTURE_TOKENS = 576
KINDS = ("steady", "churn", "arrivals", "queue")
UNDRAWN = {("steady", "apply"), ("queue", "apply")}  # between the others
N_WAITING = 1000
TARGET_S = 100e-6  # for 64 running requests


class Load:
    """Keeps about `n` requests in a scheduler, and `waiting` more that wait, and answers every batch at once. They
    produce a length drawn from `max_tokens`. With `arrivals`, so many come with a picture in every step; without,
    others replace those that end."""

    def __init__(self, n: int, max_tokens: range, seed: int, arrivals: int = 0, waiting: int = 0) -> None:
        self._draw, self._lengths, self._arrivals = random.Random(seed), max_tokens, arrivals
        self._waiting = waiting
        kv = FullSpec.of(layers=12, kv_heads=4, head_dim=64, dtype="float32")
        embed = EmbedSpec.of(width=768, dtype="float32")
        running = n + 4 * arrivals  # these are in encode, in prefill or ending
        pictures = embed.blocks_for(PICTURE_TOKENS) * (64 + 4 * arrivals)
        caches = CacheSet({kv: running * kv.blocks_for(PROMPT_TOKENS + max_tokens.stop + 64), embed: pictures})
        tokens = max(1024, n + (arrivals + 1) * PROMPT_TOKENS) if arrivals else 1024
        budgets = Budgets(tokens=tokens, images=max(1, arrivals), running=running)
        self.scheduler = Scheduler(Role.parse("EPD"), caches, budgets, Policy(encode_wait_s=0.0))
        self._n_added, self._block_tokens = 0, kv.block_tokens
        for _ in range(0 if arrivals else n + waiting):
            self._add()

    def _add(self) -> None:
        n = self._draw.choice(self._lengths)
        sampling = SamplingParams(max_tokens=n, ignore_eos=True)
        name = f"r{self._n_added}"
        self._n_added += 1
        key = self._n_added.to_bytes(16, "little")
        pictured = self._arrivals or (self._waiting and self._n_added % 2)
        media = (MediaSpan(1, PICTURE_TOKENS, key, name),) if pictured else ()
        ids = (1,) * PROMPT_TOKENS
        keys = chain_of(chain_root(key), ids, self._block_tokens)  # all have their own, and find nothing
        request = Request(id=name, prompt_ids=ids, sampling=sampling, max_tokens=n, seed=0, media=media, keys=keys)
        self.scheduler.add(request, 0.0)

    def step(self) -> tuple[float, float]:
        """Seconds that `next` and `apply` took; requests come outside of both."""
        for _ in range(self._arrivals):
            self._add()
        start_s = time.perf_counter()
        batches = [self.scheduler.next(0.0, lane).batch for lane in (Lane.VISION, Lane.LANGUAGE)]
        next_s = time.perf_counter() - start_s
        results = [StepResult(batch, tokens=[5] * _n_sampled(batch)) for batch in batches if batch is not None]
        start_s = time.perf_counter()
        outcomes = [self.scheduler.apply(result, 0.0) for result in results]
        apply_s = time.perf_counter() - start_s
        ended = sum(o.finish is not None for of_lane in outcomes for o in of_lane)
        for _ in range(0 if self._arrivals else ended):
            self._add()
        return next_s, apply_s


def _n_sampled(batch: StepBatch) -> int:
    return sum(isinstance(item, TokenWork) and item.sample for item in batch.work)


def load_of(kind: str, n: int, n_steps: int, arrivals: int, seed: int) -> Load:
    if kind == "arrivals":
        length = max(1, n // arrivals)
        return Load(n, range(length, length + 1), seed, arrivals)
    forever = n_steps + 2 * n + 64
    lengths = range(forever, forever + 1) if kind == "steady" else range(16, 128)
    return Load(n, lengths, seed, waiting=N_WAITING if kind == "queue" else 0)


def measure(kind: str, n: int, n_steps: int, arrivals: int, seed: int) -> dict[str, Any]:
    load = load_of(kind, n, n_steps, arrivals, seed)
    for _ in range(n + 32):
        load.step()  # until all have been prefilled
    times = [load.step() for _ in range(n_steps)]
    return {
        "next_s": msgspec.to_builtins(Percentiles.of(t for t, _ in times)),
        "apply_s": msgspec.to_builtins(Percentiles.of(t for _, t in times)),
        "running": load.scheduler.n_running,
        "preemptions": load.scheduler.n_preemptions,
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256])
    parser.add_argument("--arrivals", type=int, default=1, help="per step, in the case of that name")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    results: dict[str, Any] = {"target_s": TARGET_S}
    shown = new_table("µs, p50 (p99)", ("running", *(f"{kind} {call}" for kind in KINDS for call in ("next", "apply"))))
    for n in args.running:
        row = results[str(n)] = {kind: measure(kind, n, args.steps, args.arrivals, args.seed) for kind in KINDS}
        cells = [row[a][b] for a in KINDS for b in ("next_s", "apply_s")]
        shown.add_row(str(n), *(f"{c['p50'] * 1e6:.1f} ({c['p99'] * 1e6:.1f})" for c in cells))
    new_console().print(shown)
    path = write_result("b02_scheduler", __doc__, args, results)
    drawn = [(kind, call) for call in ("next", "apply") for kind in KINDS if (kind, call) not in UNDRAWN]
    series = {f"{k} {c}": [results[str(n)][k][f"{c}_s"]["p50"] * 1e6 for n in args.running] for k, c in drawn}
    x = [float(n) for n in args.running]
    title = "Scheduler time per step, median"
    save_lines(path.with_suffix(".png"), title, "running requests", "µs", x, series, log=True)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
