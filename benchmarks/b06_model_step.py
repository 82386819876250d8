"""How far is each stage of llava-small from its floor?

Encode, a prefill of 600 tokens and decodes with 600 tokens of context, through the runners (packing, hand-over to the
lane's thread and sampling included), with the compiled kernels and without, in turns. The floor of a stage is the
longer of its arithmetic at the rate of a large matrix product and its memory traffic at the rate of a large read, both
measured in every round on the same cores; the best round counts.

Then the decoder's matrices alone, for several numbers of rows, in every way that this machine has to multiply them
(`ops/products.py`), and how much slower than the best the one is that `ops/measured.py` chose.
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
    LiveSequence,
    MediaSpan,
    Request,
    Role,
    SamplingParams,
    StepBatch,
    StepResult,
    TokenWork,
)
from hydrainfer.machine import instruction_sets
from hydrainfer.models import Model, load_model
from hydrainfer.ops import select_ops
from hydrainfer.ops.build import load_kernels
from hydrainfer.ops.products import ways
from hydrainfer.runtime import LaneThread, LanguageRunner, VisionRunner
from hydrainfer.storage import BlockStore

KERNELS = ("native", "torch")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STEP_LIMIT_S = 120.0
PASSES = 3  # over the decoder's matrices, per round; the fastest counts
CHOSEN = "measured"


class Stages:
    """One model behind its runners, with prompts of one picture that are encoded and prefilled."""

    def __init__(self, args: argparse.Namespace, kernels: str, n_requests: int) -> None:
        path, device, threads, prompt_tokens = args.model, args.device, args.threads, args.prompt_tokens
        config = read_config(path)
        native, head_dim = kernels == "native", config.text.head_dim
        ops = select_ops(device, DTYPES[args.dtype], head_dim, use_native=native, threads=threads)
        if native and f"native-{device}" not in dict(ops.describe()).values():
            raise SystemExit("; ".join(ops.notes) or "the compiled kernels do not support this")
        self.model: Model = load_model(path, Role.parse("EPD"), device, args.dtype, ops=ops)
        embed, kv = self.model.cache_specs()
        picture_blocks, blocks = embed.blocks_for(config.vision.tokens), kv.blocks_for(prompt_tokens)
        size = config.vision.image_size
        draw = np.random.default_rng(0)
        pixels = {str(i): draw.integers(0, 256, (size, size, 3), dtype=np.uint8) for i in range(n_requests)}
        embeds = BlockStore(embed, n_requests * picture_blocks, device)
        cache = BlockStore(kv, n_requests * blocks, device)
        self._woken = threading.Event()
        lanes = [LaneThread(lane, self.model.device, self._woken.set, lambda: threads) for lane in Lane]
        self._vision = VisionRunner(self.model, embeds, pixels.__getitem__, lanes[0])
        self._language = LanguageRunner(self.model, (cache, embeds), lanes[1])
        self._prompt_tokens = prompt_tokens
        self._requests = [self._sequence(i, picture_blocks, blocks) for i in range(n_requests)]
        for i in range(n_requests):  # every block is written: unwritten memory would be read from the processor's cache
            self._run(Lane.VISION, [EncodeWork(self._requests[i], 0)])
            self._run(Lane.LANGUAGE, [TokenWork(self._requests[i], 0, prompt_tokens, True)])

    def _sequence(self, i: int, picture_blocks: int, blocks: int) -> LiveSequence:
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
        seq = LiveSequence(request, (0.0, i), 0.0)
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
    product = torch.float32 if args.device == "cpu" else DTYPES[args.dtype]
    for _ in range(args.rounds):
        rates.append(measure_rates(device=torch.device(args.device), dtype=product))
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


def measure_rows(args: argparse.Namespace, model: Model) -> dict[str, Any]:
    """Per row count: seconds of all the decoder's matrices by way, and which way was chosen."""
    torch.set_num_threads(args.threads)
    dtype, weights = DTYPES[args.dtype], matrices(model)
    widths = {w.shape[1] for tensors in weights.values() for w in tensors}
    found, chosen = ways(dtype, load_kernels(torch.device("cpu"))[0]), model.ops.products
    assert chosen is not None, "a model on a CPU"
    linears = {name: way.linear for name, way in found.items()} | {CHOSEN: chosen.linear}
    times: dict[int, dict[str, list[dict[str, float]]]] = {n: {k: [] for k in linears} for n in args.rows}
    with torch.inference_mode():
        for _ in range(args.rounds):
            for n in args.rows:
                inputs = {width: torch.rand(n, width).to(dtype) for width in widths}
                for name, linear in linears.items():
                    passes = [one_pass(linear, weights, inputs) for _ in range(1 + PASSES)]
                    times[n][name].append(min(passes[1:], key=lambda took: sum(took.values())))
    by_rows = {}
    for n, of_n in times.items():
        by_rows[str(n)] = {
            name: {
                "all_s": spread([sum(took.values()) for took in passes]),
                **{f"{kind}_s": spread([took[kind] for took in passes]) for kind in weights},
            }
            for name, passes in of_n.items()
        }
    return {"chosen": chosen.describe(), "by_rows": by_rows}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(".cache/models/llava-small"), help="made if absent")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: the stages, no rows")
    parser.add_argument("--encode", type=int, nargs="*", default=[1, 2, 4], help="batch sizes")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 4, 8], help="batch sizes")
    parser.add_argument("--prompt-tokens", type=int, default=600, help="of which one picture takes 576")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128])
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
    shown = Table(title=f"the decoder's matrices, ms: {' '.join(rows['chosen'])}")
    names = list(next(iter(rows["by_rows"].values())))
    for column in ("rows", *names, f"{CHOSEN} / best"):
        shown.add_column(column, justify="right")
    for n, r in rows["by_rows"].items():
        times = {name: r[name]["all_s"]["median"] for name in names}
        ratio = times[CHOSEN] / min(t for name, t in times.items() if name != CHOSEN)
        shown.add_row(n, *(f"{t * 1e3:.1f}" for t in times.values()), f"{ratio:.2f}")
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
        names = next(iter(by_rows.values()))
        lines = {k: [r[k]["all_s"]["median"] * 1e3 for r in by_rows.values()] for k in names}
        file = path.with_name(f"{path.stem}_rows.png")
        save_lines(file, "The decoder's matrices", "rows", "ms", [float(n) for n in by_rows], lines, log=False)


def main() -> None:
    args = arguments()
    make_model(args.model)
    torch.set_num_threads(args.threads)
    by_rows = bool(args.rows) and args.device == "cpu"
    n_requests = max([1, *args.encode, *args.decode])
    models = {k: Stages(args, k, n_requests) for k in KERNELS}
    watch = CpuWatch([])
    try:
        results = measure_stages(args, models)
        results["rows"] = measure_rows(args, models["native"].model) if by_rows else {"chosen": [], "by_rows": {}}
        results["machine"]["other_cores"] = watch.stop().others
    finally:
        for stages in models.values():
            stages.close()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    console.print(stage_table(results))
    if by_rows:
        console.print(row_table(results["rows"]))
    console.print(f"instruction sets: {' '.join(instruction_sets())}")
    if results["machine"]["other_cores"] > QUIET_CORES:
        console.print(f"not quiet: other processes took {results['machine']['other_cores']:.2f} cores", style="red")
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    path = write_result("b06_model_step", __doc__.splitlines()[0], settings, results, args.out)
    figures(path, results)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
