"""Which part of a decode step is spent outside the model's forward pass?

A step lasts from the start of one forward pass to the start of the next, while a fixed number of requests decodes.
Inside are the model's embedding, layers and output head; everything else is overhead: sampling, packing, scheduling,
the hand-over between threads, and detokenisation by the same process, as in the server.

On CUDA the device is synchronised before and after each of these calls, so that a call's time is its work's and not its
launch's; a forward pass is then what the runner does for one, since a graph calls no layer. Host work that would have
run beside the device then runs after it: the overhead is an upper bound.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch

from benchmarks.command import new_console, new_table, options
from benchmarks.figure import Panel, save_bars
from benchmarks.floors import waits_for
from benchmarks.record import spread, write_result
from benchmarks.runs import make_model
from hydrainfer import LLM, SamplingParams
from hydrainfer.models import Model
from hydrainfer.runtime import LanguageRunner
from hydrainfer.runtime.packing import PackedTokens
from hydrainfer.workload.results import Percentiles

TARGET = 0.05  # of a step at batch 8
PROMPT_TOKENS = 600  # a 336 px picture and a question, to LLaVA-1.5
SETTLE_STEPS = 5  # after the last prefill


@dataclass
class Spans:
    """Calls into the model: (rows, start, end) of forward passes; start and end of anything, in order of their end.
    `wait()` returns once the device has done all it was given."""

    wait: Callable[[], object]
    forwards: list[tuple[int, float, float]] = field(default_factory=list)
    inside: list[tuple[float, float]] = field(default_factory=list)

    def timed(self, call: Callable[..., Any], forward: bool) -> Callable[..., Any]:
        def run(model: object, first: Any, *args: Any) -> Any:
            self.wait()
            start_s = time.perf_counter()
            result = call(model, first, *args)
            self.wait()
            end_s = time.perf_counter()
            self.inside.append((start_s, end_s))
            if forward:
                rows = first.ids if isinstance(first, PackedTokens) else first
                self.forwards.append((len(rows), start_s, end_s))
            return result

        return run

    def steps(self, n: int) -> list[tuple[float, float]]:
        """(seconds of the step, of it inside the model) for steps that decode `n` rows, as do their neighbours."""
        found = []
        decoding = 0
        for (rows, start_s, _), (next_rows, next_start_s, _) in pairwise(self.forwards):
            decoding = decoding + 1 if rows == n == next_rows else 0
            if decoding > SETTLE_STEPS:
                inside_s = sum(b - a for a, b in self.inside if start_s <= a < next_start_s)
                found.append((next_start_s - start_s, inside_s))
        return found


@contextlib.contextmanager
def watched(device: str) -> Iterator[Spans]:
    """Time every call into a model."""
    spans = Spans(waits_for(torch.device(device)))
    calls: list[tuple[type, str]] = [(Model, "embed"), (Model, "forward"), (Model, "logits")]
    if device == "cuda":
        calls = [(LanguageRunner, "_forward"), (Model, "logits")]
    with contextlib.ExitStack() as stack:
        for owner, name in calls:
            timed = spans.timed(getattr(owner, name), name.endswith("forward"))
            stack.enter_context(mock.patch.object(owner, name, timed))
        yield spans


def measure(llm: LLM, args: argparse.Namespace, n: int, output_tokens: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    prompts = [[1] + [draw.randrange(300, 2_000) for _ in range(args.prompt_tokens - 1)] for _ in range(n)]
    sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=0.0)
    with watched(args.device) as spans:
        llm.generate(prompts, sampling, use_tqdm=False)
    steps = spans.steps(n)
    return {
        "step_s": msgspec.to_builtins(Percentiles.of(step_s for step_s, _ in steps)),
        "outside_s": msgspec.to_builtins(Percentiles.of(step_s - inside_s for step_s, inside_s in steps)),
        "outside_fraction": sum(s - i for s, i in steps) / sum(s for s, _ in steps),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/llava-small"), help="made if absent")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, 16 bit on CUDA")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--output-tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    make_model(args.model)
    runs: dict[int, list[dict[str, Any]]] = {n: [] for n in args.batch}
    with LLM(str(args.model), device=args.device, dtype=args.dtype) as llm:
        measure(llm, args, 1, 16, seed=0)  # buffers made at first use
        for rank in range(args.rounds):
            for n in args.batch:
                runs[n].append(measure(llm, args, n, args.output_tokens, args.seed * 1000 + rank))
    results: dict[str, Any] = {
        str(n): {
            "outside_fraction": spread([r["outside_fraction"] for r in of_n]),
            "step_s": spread([r["step_s"]["p50"] for r in of_n]),
            "outside_s": spread([r["outside_s"]["p50"] for r in of_n]),
            "runs": of_n,
        }
        for n, of_n in runs.items()
    }
    shown = new_table(
        f"decode steps, median of {args.rounds} rounds (least–greatest)",
        ("batch", "step, ms", "outside, ms", "outside, %"),
    )
    for n, r in results.items():
        cells = [(r["step_s"], 1e3), (r["outside_s"], 1e3), (r["outside_fraction"], 100)]
        shown.add_row(n, *(f"{s['median'] * f:.2f} ({s['min'] * f:.2f}–{s['max'] * f:.2f})" for s, f in cells))
    new_console().print(shown)
    results["target_fraction"] = TARGET
    path = write_result("b03_step_overhead", __doc__, args, results)
    percent = [[r["outside_fraction"] * 100 for r in runs[n]] for n in args.batch]
    panel = Panel("% of a decode step", [f"batch {n}" for n in args.batch], {"outside the model": percent})
    save_bars(path.with_suffix(".png"), "Time outside the model", [panel])
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
