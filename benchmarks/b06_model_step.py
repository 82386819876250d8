"""How far is each stage of llava-small from its floor?

Encode, a prefill of 600 tokens and decodes with 600 tokens of context, through the runners (packing, hand-over to the
lane's thread and sampling included), with the compiled kernels and without, in turns. The floor of a stage is the
longer of its arithmetic at the rate of a large matrix product and its memory traffic at the rate of a large read, both
measured in every round on the same cores; the best round counts.

Then the decoder's matrices alone, for 1 to 48 rows, with the compiled kernel and with what takes over above
`ops.native.FEW_ROWS` (MKL, for float32): where they cross is where that cutoff belongs.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.comparison import cell
from benchmarks.figure import Panel, save_bars, save_lines
from benchmarks.floors import Rates, Work, encode_work, language_work, measure_rates
from benchmarks.record import spread, write_result
from benchmarks.runs import QUIET_CORES, make_model
from benchmarks.servers import CpuWatch
from hydrainfer.checkpoint import read_config
from hydrainfer.core import (
    EncodeWork,
    Lane,
    MediaSpan,
    Request,
    Role,
    SamplingParams,
    Sequence,
    StepBatch,
    StepResult,
    TokenWork,
)
from hydrainfer.models import Model, load_model
from hydrainfer.ops import native, select_ops
from hydrainfer.runtime import LanguageRunner, VisionRunner
from hydrainfer.storage import BlockStore

KERNELS = ("native", "torch")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STEP_LIMIT_S = 120.0
PASSES = 3  # over the decoder's matrices, per round; the fastest counts
TIE = 1.05  # a kernel no more than this much slower has not lost


class Stages:
    """One model behind its runners, with prompts of one picture that are encoded and prefilled."""

    def __init__(self, path: Path, dtype: str, kernels: str, n_requests: int, prompt_tokens: int, threads: int) -> None:
        config = read_config(path)
        ops = select_ops("cpu", DTYPES[dtype], config.text.head_dim, use_native=kernels == "native")
        if kernels == "native" and "native-cpu" not in dict(ops.describe()).values():
            raise SystemExit("; ".join(ops.notes) or "the compiled kernels do not support this")
        self.model: Model = load_model(path, Role.parse("EPD"), "cpu", dtype, ops=ops)
        embed, kv = self.model.cache_specs()
        picture_blocks, blocks = embed.blocks_for(config.vision.tokens), kv.blocks_for(prompt_tokens)
        size = config.vision.image_size
        draw = np.random.default_rng(0)
        pixels = {str(i): draw.integers(0, 256, (size, size, 3), dtype=np.uint8) for i in range(n_requests)}
        embeds, cache = BlockStore(embed, n_requests * picture_blocks), BlockStore(kv, n_requests * blocks)
        self._woken = threading.Event()
        wake = self._woken.set
        self._vision = VisionRunner(self.model, embeds, pixels.__getitem__, wake, threads=lambda: threads)
        self._language = LanguageRunner(self.model, cache, embeds, wake, threads=lambda: threads)
        self._prompt_tokens = prompt_tokens
        self._requests = [self._sequence(i, picture_blocks, blocks) for i in range(n_requests)]
        for i in range(n_requests):  # every block is written: unwritten memory would be read from the processor's cache
            self._run(Lane.VISION, [EncodeWork(self._requests[i], 0)])
            self._run(Lane.LANGUAGE, [TokenWork(self._requests[i], 0, prompt_tokens, True)])

    def _sequence(self, i: int, picture_blocks: int, blocks: int) -> Sequence:
        n_picture = self.model.config.vision.tokens
        text = range(300, 300 + self._prompt_tokens - n_picture - 1)
        request = Request(
            id=f"r{i}",
            prompt_ids=(1, *[self.model.config.media_tokens[0]] * n_picture, *text),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=16,
            seed=1,
            media=(MediaSpan(1, n_picture, b"%d" % i, str(i)),),
        )
        seq = Sequence(request, (0.0, i), 0.0)
        seq.blocks = {
            "embed": list(range(i * picture_blocks, (i + 1) * picture_blocks)),
            "kv": list(range(i * blocks, (i + 1) * blocks)),
        }
        return seq

    def _run(self, lane: Lane, work: list) -> float:
        """Seconds from launch to result. The sequences stay as they are, so that a batch can be repeated."""
        runner = self._vision if lane is Lane.VISION else self._language
        n = len(work) if lane is Lane.VISION else sum(item.count for item in work)
        start_s = time.perf_counter()
        ticket = runner.launch(StepBatch(1, lane, work, n))
        result: StepResult | None
        while (result := ticket.poll(0.0)) is None:
            if not self._woken.wait(STEP_LIMIT_S):
                raise SystemExit(f"a {lane.value} batch did not end within {STEP_LIMIT_S:.0f} s")
            self._woken.clear()
        took_s = time.perf_counter() - start_s
        if result.error is not None:
            raise result.error
        return took_s

    def encode(self, n: int) -> float:
        return self._run(Lane.VISION, [EncodeWork(seq, 0) for seq in self._requests[:n]])

    def prefill(self, n: int) -> float:
        return self._run(Lane.LANGUAGE, [TokenWork(seq, 0, self._prompt_tokens, True) for seq in self._requests[:n]])

    def decode(self, n: int) -> float:
        last = self._prompt_tokens - 1
        return self._run(Lane.LANGUAGE, [TokenWork(seq, last, 1, True) for seq in self._requests[:n]])

    def close(self) -> None:
        self._vision.close()
        self._language.close()


def cases(args: argparse.Namespace) -> list[tuple[str, int, int]]:
    """(stage, batch, repetitions per round)."""
    found = [("encode", n, 2) for n in args.encode]
    return [*found, ("prefill", 1, 2), *(("decode", n, 8) for n in args.decode)]


def work_of(stages: Stages, stage: str, n: int, prompt_tokens: int) -> Work:
    config, item_bytes = stages.model.config, stages.model.dtype.itemsize
    if stage == "encode":
        return encode_work(config, n, item_bytes)
    count, context = (prompt_tokens, 0) if stage == "prefill" else (1, prompt_tokens - 1)
    return language_work(config, [count] * n, [context] * n, item_bytes)


def measure_stages(args: argparse.Namespace, models: dict[str, Stages]) -> dict[str, Any]:
    """Per case and kernels a median per round; the machine's rates per round."""
    times: dict[str, dict[str, list[float]]] = {f"{s} {n}": {k: [] for k in models} for s, n, _ in cases(args)}
    rates: list[Rates] = []
    for _ in range(args.rounds):
        rates.append(measure_rates())
        for stage, n, repeats in cases(args):
            for kernels, stages in models.items():
                step = getattr(stages, stage)
                step(n)
                times[f"{stage} {n}"][kernels].append(float(np.median([step(n) for _ in range(repeats)])))
    best = Rates(max(r.flops_per_s for r in rates), max(r.bytes_per_s for r in rates))
    found: dict[str, Any] = {}
    for stage, n, _ in cases(args):
        name = f"{stage} {n}"
        work = work_of(next(iter(models.values())), stage, n, args.prompt_tokens)
        floor_s = work.floor_s(best)
        found[name] = {"flops": work.flops, "bytes": work.n_bytes, "floor_s": floor_s, "bound_by": work.bound(best)}
        for kernels, seconds in times[name].items():
            found[name][kernels] = {
                "step_s": spread(seconds),
                "gap": spread([s / floor_s for s in seconds]),
                "rounds_s": seconds,
            }
    per_round = {
        "flops_per_s": spread([r.flops_per_s for r in rates]),
        "bytes_per_s": spread([r.bytes_per_s for r in rates]),
    }
    return {"machine": {"best": best._asdict(), "per_round": per_round}, "stages": found}


def matrices(model: Model) -> dict[str, list[torch.Tensor]]:
    """The decoder's weights by kind, in the order of a forward pass within each kind."""
    assert model.language is not None
    layers = model.language.layers
    by_kind = {kind: [getattr(layer, kind) for layer in layers] for kind in ("qkv", "out", "gate_up", "down")}
    return by_kind | {"head": [model.language.head]}


def one_pass(linear: Callable, weights: dict[str, list[torch.Tensor]], inputs: dict[int, torch.Tensor]) -> dict:
    """Seconds per kind of matrix in one pass over all, layer by layer, so that every weight comes from memory."""
    took = dict.fromkeys(weights, 0.0)
    for i in range(max(map(len, weights.values()))):
        for kind, tensors in weights.items():
            if i < len(tensors):
                x = inputs[tensors[i].shape[1]]
                start_s = time.perf_counter()
                linear(x, tensors[i])
                took[kind] += time.perf_counter() - start_s
    return took


def measure_rows(args: argparse.Namespace, models: dict[str, Stages]) -> dict[str, Any]:
    """Per row count: seconds of all the decoder's matrices, with the kernel whatever its cutoff, and with torch."""
    torch.set_num_threads(args.threads)
    weights = matrices(models["native"].model)
    widths = {w.shape[1] for tensors in weights.values() for w in tensors}
    linears = {kernels: stages.model.ops.linear for kernels, stages in models.items()}
    times: dict[int, dict[str, list[dict[str, float]]]] = {n: {k: [] for k in KERNELS} for n in args.rows}
    with mock.patch.object(native, "FEW_ROWS", max(args.rows)), torch.inference_mode():
        for _ in range(args.rounds):
            for n in args.rows:
                inputs = {width: torch.rand(n, width).to(DTYPES[args.dtype]) for width in widths}
                for kernels in KERNELS:
                    passes = [one_pass(linears[kernels], weights, inputs) for _ in range(1 + PASSES)]
                    times[n][kernels].append(min(passes[1:], key=lambda took: sum(took.values())))
    by_rows = {
        str(n): {
            kernels: {
                "all_s": spread([sum(took.values()) for took in passes]),
                **{f"{kind}_s": spread([took[kind] for took in passes]) for kind in weights},
            }
            for kernels, passes in of_n.items()
        }
        for n, of_n in times.items()
    }
    kinds = ["all_s", *(f"{kind}_s" for kind in weights)]
    return {"cutoff": native.FEW_ROWS, "crossing": {k: crossing(by_rows, k) for k in kinds}, "by_rows": by_rows}


def crossing(by_rows: dict[str, Any], kind: str) -> dict[str, int | None]:
    """`native_up_to`: the largest measured row count up to which the kernel nowhere lost (0: at once); `torch_from`:
    the least from which it lost everywhere (None: nowhere). MKL's time jumps between row counts, so both are told."""
    rows = sorted(map(int, by_rows))
    of = [by_rows[str(n)] for n in rows]
    lost = [r["native"][kind]["median"] > TIE * r["torch"][kind]["median"] for r in of]
    n_before = lost.index(True) if True in lost else len(rows)
    n_after = lost[::-1].index(False) if False in lost else len(rows)
    return {
        "native_up_to": rows[n_before - 1] if n_before else 0,
        "torch_from": rows[len(rows) - n_after] if n_after else None,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(".cache/models/llava-small"), help="made if absent")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--encode", type=int, nargs="*", default=[1, 2, 4], help="batch sizes")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 4, 8], help="batch sizes")
    parser.add_argument("--prompt-tokens", type=int, default=600, help="of which one picture takes 576")
    parser.add_argument("--rows", type=int, nargs="*", default=list(range(1, 49)))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def stage_table(results: dict[str, Any]) -> Table:
    best = results["machine"]["best"]
    machine = f"{best['flops_per_s'] / 1e9:.0f} GFLOP/s, {best['bytes_per_s'] / 1e9:.1f} GB/s"
    shown = Table(title=f"median (least–greatest) over rounds; best round of the machine: {machine}")
    for column in (
        "stage",
        "GFLOP",
        "MB",
        "floor, ms",
        "bound by",
        "native, ms",
        "torch, ms",
        "native gap",
        "torch gap",
    ):
        shown.add_column(column, justify="right")
    for name, r in results["stages"].items():
        work = [f"{r['flops'] / 1e9:.2f}", f"{r['bytes'] / 1e6:.0f}", f"{r['floor_s'] * 1e3:.1f}", r["bound_by"]]
        times = [cell(r[k]["step_s"], 1e3) for k in KERNELS]
        shown.add_row(name, *work, *times, *(f"{r[k]['gap']['median']:.2f} ×" for k in KERNELS))
    return shown


def row_table(rows: dict[str, Any]) -> Table:
    title = f"the decoder's matrices: ms for all, and native / torch by kind; the cutoff is {rows['cutoff']} rows"
    shown = Table(title=title)
    kinds = list(rows["crossing"])
    for column in ("rows", "native", "torch", *(k.removesuffix("_s") for k in kinds)):
        shown.add_column(column, justify="right")
    for n, r in rows["by_rows"].items():
        ratios = [f"{r['native'][k]['median'] / r['torch'][k]['median']:.2f}" for k in kinds]
        shown.add_row(n, *(f"{r[k]['all_s']['median'] * 1e3:.1f}" for k in KERNELS), *ratios)
    return shown


def figures(path: Path, results: dict[str, Any]) -> None:
    panels = []
    for stage in ("encode", "prefill", "decode"):
        of_stage = {name: r for name, r in results["stages"].items() if name.startswith(stage)}
        if of_stage:
            floor = {"floor": [[r["floor_s"] * 1e3] for r in of_stage.values()]}
            timed = {k: [[s * 1e3 for s in r[k]["rounds_s"]] for r in of_stage.values()] for k in KERNELS}
            groups = [f"batch {name.split()[1]}" for name in of_stage]
            panels.append(Panel(f"{stage}, ms", groups, floor | timed))
    save_bars(path.with_suffix(".png"), "Stages of llava-small and their floors", panels)
    by_rows = results["rows"]["by_rows"]
    if by_rows:
        lines = {k: [r[k]["all_s"]["median"] * 1e3 for r in by_rows.values()] for k in KERNELS}
        file = path.with_name(f"{path.stem}_rows.png")
        save_lines(file, "The decoder's matrices", "rows", "ms", [float(n) for n in by_rows], lines, log=False)


def main() -> None:
    args = arguments()
    make_model(args.model)
    torch.set_num_threads(args.threads)
    n_requests = max([1, *args.encode, *args.decode])
    models = {k: Stages(args.model, args.dtype, k, n_requests, args.prompt_tokens, args.threads) for k in KERNELS}
    watch = CpuWatch([])
    try:
        results = measure_stages(args, models)
        results["rows"] = measure_rows(args, models)
        results["machine"]["other_cores"] = watch.stop().others
    finally:
        for stages in models.values():
            stages.close()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    console.print(stage_table(results))
    console.print(row_table(results["rows"]))
    if results["machine"]["other_cores"] > QUIET_CORES:
        console.print(f"not quiet: other processes took {results['machine']['other_cores']:.2f} cores", style="red")
    for kind, c in results["rows"]["crossing"].items():
        console.print(
            f"{kind.removesuffix('_s'):<8} native up to {c['native_up_to']} rows, torch from {c['torch_from']}"
        )
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    path = write_result("b06_model_step", __doc__.splitlines()[0], settings, results, args.out)
    figures(path, results)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
