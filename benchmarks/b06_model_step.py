"""How far is each stage of llava-small, or of another model, from its floor?

Encode, a prefill of 600 tokens and decodes with 600 tokens of context, through the runners (packing, hand-over to the
lane's thread and sampling included), with the compiled kernels and without, in turns. The floor of a stage is the
longer of its arithmetic at the rate of a large matrix product and its memory traffic at the rate of a large read, both
measured in every round on the same cores; the best round counts.

Then the decoder's matrices alone, for several numbers of rows, in every way that this machine has to multiply them
(`ops/cpu/products.py`), and how much slower than the best the one is that `ops/cpu/measured.py` chose.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from rich.table import Table

from benchmarks.command import new_console, new_table, options, say_noise
from benchmarks.comparison import cell
from benchmarks.figure import Panel, save_bars, save_lines
from benchmarks.floors import Rates, Work, encode_work, language_work, measure_rates
from benchmarks.record import spread, write_result
from benchmarks.runs import make_model
from benchmarks.servers import CpuWatch
from benchmarks.stages import DTYPES, Stages
from hydrainfer.config.schema import Quantization
from hydrainfer.machine import instruction_sets
from hydrainfer.models import Model
from hydrainfer.models.slots import Weight
from hydrainfer.ops.build import load_kernels
from hydrainfer.ops.cpu.int8 import int8_ways
from hydrainfer.ops.cpu.measured import products
from hydrainfer.ops.cpu.products import ways

KERNELS = ("native", "torch")
PASSES = 3  # over the decoder's matrices, per round; the fastest counts
CHOSEN = "measured"


def cases(args: argparse.Namespace, stages: Stages) -> list[tuple[str, int, int]]:
    """(stage, batch, repetitions per round)."""
    found = [("encode", n, 2) for n in args.encode if stages.picture_tokens]
    return [*found, ("prefill", 1, 2), *(("decode", n, 8) for n in args.decode)]


def work_of(stages: Stages, stage: str, n: int, prompt_tokens: int) -> Work:
    if stage == "encode":
        return encode_work(stages.shape, n, stages.picture_tokens, stages.picture_bytes)
    count, context = (prompt_tokens, 0) if stage == "prefill" else (1, prompt_tokens - 1)
    return language_work(stages.shape, [count] * n, [context] * n)


def measure_stages(args: argparse.Namespace, models: dict[str, Stages]) -> dict[str, Any]:
    """Per case and kernels a median per round; the machine's rates per round."""
    one = next(iter(models.values()))
    times: dict[str, dict[str, list[float]]] = {f"{s} {n}": {k: [] for k in models} for s, n, _ in cases(args, one)}
    rates: list[Rates] = []
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    for _ in range(args.rounds):
        found_rates = [measure_rates(device=device, dtype=dtype)]
        if args.device == "cpu" and dtype != torch.float32:  # torch reads narrow numbers slowly there
            found_rates.append(measure_rates())
        rates.append(Rates(*map(max, zip(*found_rates))))
        for stage, n, repeats in cases(args, one):
            for kernels, stages in models.items():
                step = getattr(stages, stage)
                step(n)
                times[f"{stage} {n}"][kernels].append(float(np.median([step(n) for _ in range(repeats)])))
    best = Rates(max(r.flops_per_s for r in rates), max(r.bytes_per_s for r in rates))
    found: dict[str, Any] = {}
    for stage, n, _ in cases(args, one):
        name = f"{stage} {n}"
        work = work_of(one, stage, n, args.prompt_tokens)
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


def matrices(model: Model) -> dict[str, list[Weight]]:
    """The decoder's weights by kind, in the order of a forward pass within each kind."""
    assert model.language is not None
    layers = model.language.layers
    by_kind = {kind: [getattr(layer, kind) for layer in layers] for kind in ("qkv", "out", "gate_up", "down")}
    by_kind = {kind: [w for w in tensors if w is not None] for kind, tensors in by_kind.items()}  # but for experts
    return {kind: tensors for kind, tensors in by_kind.items() if tensors} | {"head": [model.language.head]}


def one_pass(linear: Callable, weights: dict[str, list[Weight]], inputs: dict[int, torch.Tensor]) -> dict:
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
    dtype, weights, kernels = DTYPES[args.dtype], matrices(model), load_kernels(torch.device("cpu"))[0]
    widths = {w.shape[1] for tensors in weights.values() for w in tensors}
    chosen = model.ops.products
    found = int8_ways(products(dtype, kernels, args.threads), kernels) if model.ops.int8 else ways(dtype, kernels)
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
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/llava-small"), help="made if absent")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--quantization", choices=get_args(Quantization), default="none", help="as of `serve`")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: the stages, no rows")
    parser.add_argument("--encode", type=int, nargs="*", default=[1, 2, 4], help="batch sizes")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 4, 8], help="batch sizes")
    parser.add_argument("--prompt-tokens", type=int, default=600, help="of which one picture takes 576")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def stage_table(results: dict[str, Any]) -> Table:
    best = results["machine"]["best"]
    machine = f"{best['flops_per_s'] / 1e9:.0f} GFLOP/s, {best['bytes_per_s'] / 1e9:.1f} GB/s"
    shown = new_table(
        f"median (least–greatest) over rounds; best round of the machine: {machine}",
        ("stage", "GFLOP", "MB", "floor, ms", "bound by", "native, ms", "torch, ms", "native gap", "torch gap"),
    )
    for name, r in results["stages"].items():
        work = [f"{r['flops'] / 1e9:.2f}", f"{r['bytes'] / 1e6:.0f}", f"{r['floor_s'] * 1e3:.1f}", r["bound_by"]]
        times = [cell(r[k]["step_s"], 1e3) for k in KERNELS]
        shown.add_row(name, *work, *times, *(f"{r[k]['gap']['median']:.2f} ×" for k in KERNELS))
    return shown


def row_table(rows: dict[str, Any]) -> Table:
    names = list(next(iter(rows["by_rows"].values())))
    title = f"the decoder's matrices, ms: {' '.join(rows['chosen'])}"
    shown = new_table(title, ("rows", *names, f"{CHOSEN} / best"))
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
    save_bars(path.with_suffix(".png"), "Stages and their floors", panels)
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
    sizes = n_requests, args.prompt_tokens, args.threads
    how = {"quantization": args.quantization, "device": args.device}
    models = {k: Stages(args.model, args.dtype, *sizes, native=k == "native", **how) for k in KERNELS}
    watch = CpuWatch([])
    try:
        results = measure_stages(args, models)
        results["rows"] = measure_rows(args, models["native"].model) if by_rows else {"chosen": [], "by_rows": {}}
        results["machine"]["other_cores"] = watch.stop().others
    finally:
        for stages in models.values():
            stages.close()
    console = new_console()
    console.print(stage_table(results))
    if by_rows:
        console.print(row_table(results["rows"]))
    console.print(f"instruction sets: {' '.join(instruction_sets())}")
    say_noise(console, results["machine"]["other_cores"])
    path = write_result("b06_model_step", __doc__, args, results)
    figures(path, results)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
