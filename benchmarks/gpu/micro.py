"""How far is each stage of a 7B model from its floor on this device?

Batches go through the runners: packing, the hand-over to the lane's thread and sampling count. The floor is the longer
of arithmetic and memory traffic (`planner.costs.cost_of`) at the rates that the device was just seen to reach. Modes:
`sdpa`, attention by torch; `flashinfer`; `graphs`, FlashInfer with decodes and few pictures replayed from CUDA
graphs. With `graphs` also encode beside decode, with and without priority of the language lane, and what each stage
spends its time on. Every case is written as soon as it is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.floors import Rates, measure_rates
from benchmarks.gpu.shapes import MODELS, PICTURES, TINY, Room, Shape, device_of, folder_of, random_model
from benchmarks.record import write_result
from hydrainfer.assemble.rig import Rig
from hydrainfer.checkpoint import read_config
from hydrainfer.config import ServeConfig
from hydrainfer.core import CostModel
from hydrainfer.models import DTYPES, Model
from hydrainfer.ops import OpSet, select_ops, torch_variants
from hydrainfer.planner.costs import BatchShape, Hardware, cost_of
from hydrainfer.planner.inputs import shape_of

MODES = ("graphs", "flashinfer", "sdpa")
QUESTION = (__doc__ or "").splitlines()[0]
_LEAST_S, _LEAST_RUNS, _MOST_RUNS = 0.4, 5, 30
_BESIDE_S = 1.5
_TOP = 20


def title(work: BatchShape) -> str:
    if work.is_vision:
        return f"encode {work.pictures}"
    return f"prefill {work.chunk}" if work.chunk else f"decode {work.decodes} x {work.context}"


class Bench:
    """One model in one mode. `say(name, result)` is called after each case."""

    def __init__(self, name: str, mode: str, device: torch.device, out: Path) -> None:
        self.name, self.mode, self.device, self.out = name, mode, device, out
        self.dry = device.type == "cpu"
        self.shape: Shape = TINY if self.dry else MODELS[name]
        folder = folder_of(name, out.parent / "models" if self.dry else None)
        dtype: Literal["float32", "bfloat16"] = "float32" if self.dry else "bfloat16"
        config = read_config(folder)
        self.ops = _ops(mode, device, DTYPES[dtype], config.text.head_dim)
        self.model: Model = random_model(folder, device, dtype, self.ops, config)
        self.config = ServeConfig(
            model=str(folder), device="cpu" if self.dry else "cuda", dtype=dtype, cuda_graphs=mode == "graphs"
        )
        self.rates = measure_rates(device=device, dtype=DTYPES[dtype], tiny=self.dry)
        self.floor = _floors(str(folder), dtype, self.rates)
        self.results: dict[str, Any] = {
            "model": name,
            "mode": mode,
            "operators": dict(self.ops.chosen),
            "notes": list(self.ops.notes),
            "rates": self.rates._asdict(),
            "cases": {},
        }

    def keep(self) -> None:
        settings = {"model": self.name, "mode": self.mode, "device": self.device.type}
        write_result("gpu.micro", QUESTION, settings, self.results, self.out)

    def rig(self, room: Room, n_pictures: int, priority: int = -1) -> Rig:
        return Rig(self.config, [self.shape.size], n_pictures, room.n_sequences, room.n_context, self.model, priority)

    def works(self, quick: bool = False) -> Iterator[tuple[Rig, list[BatchShape]]]:
        """Rigs, one after the other, with the batches to run on each."""
        for i, room in enumerate(self.shape.rooms[:1] if quick else self.shape.rooms):
            rig = self.rig(room, (1 if quick else max(PICTURES)) if i == 0 else 1)
            pictures = [BatchShape(pictures=n, tokens=rig.picture_tokens[0]) for n in ((1,) if quick else PICTURES)]
            language = list(room.works)
            if quick:
                language = [next(w for w in language if w.decodes), next(w for w in language if w.chunk)]
            try:
                yield rig, [*(pictures if i == 0 else ()), *language]
            finally:
                rig.close()
                del rig
                gc.collect()
                if not self.dry:
                    torch.cuda.empty_cache()

    def floor_s(self, work: BatchShape) -> float:
        if work.is_vision:
            return self.floor.encode_s([work.tokens] * work.pictures)
        pairs, contexts = work.chunk * work.chunk, work.decodes * (work.context + 1)
        return self.floor.language_s(work.chunk, pairs, work.decodes, contexts)

    def measure(self, rig: Rig, work: BatchShape) -> float:
        """Run one case, keep it, and return its median."""
        rig.run(work)
        took = [rig.run(work)]
        least_s, most = (0.0, 2) if self.dry else (_LEAST_S, _MOST_RUNS)
        while (sum(took) < least_s or len(took) < _LEAST_RUNS) and len(took) < most:
            took.append(rig.run(work))
        p50_s, floor_s = statistics.median(took), self.floor_s(work)
        case = {"p50_s": p50_s, "min_s": min(took), "n": len(took), "floor_s": floor_s, "of_floor": p50_s / floor_s}
        self.results["cases"][title(work)] = case
        print(f"{title(work)}: {p50_s * 1e3:.2f} ms, {p50_s / floor_s:.2f} × its floor", flush=True)
        self.keep()
        return p50_s

    def beside(self, priority: int) -> None:
        """Encode beside decode: the sum of both lanes' speeds, where 1 is taking turns."""
        room = self.shape.rooms[0]
        rig = self.rig(room, 8, priority)
        try:
            decode = max((w for w in room.works if w.decodes), key=lambda w: (w.decodes, -w.context))
            vision = BatchShape(pictures=8, tokens=rig.picture_tokens[0])
            alone = [self.measure(rig, vision), self.measure(rig, decode)]
            vision_s, decode_s = rig.run_beside(vision, decode, 0.05 if self.dry else _BESIDE_S, 2)
            medians = [statistics.median(vision_s), statistics.median(decode_s)]
        finally:
            rig.close()
        speeds = [a / b for a, b in zip(alone, medians)]
        self.results[f"beside, priority {priority}"] = {"alone_s": alone, "beside_s": medians, "speed": sum(speeds)}
        print(f"encode beside decode, priority {priority}: {sum(speeds):.2f} × one after the other", flush=True)
        self.keep()

    def profile(self, rig: Rig, work: BatchShape, runs: int = 3) -> list[tuple[str, float, int]]:
        """(operator or kernel, microseconds, calls) of what takes longest, of all threads."""
        activities = [ProfilerActivity.CPU] if self.dry else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        rig.run(work)
        with profile(activities=activities, experimental_config=threads) as seen:
            for _ in range(runs):
                rig.run(work)
        key = "self_cpu_time_total" if self.dry else "self_device_time_total"
        rows = sorted(seen.key_averages(), key=lambda row: getattr(row, key), reverse=True)
        return [(row.key, getattr(row, key) / runs, row.count // runs) for row in rows[:_TOP]]


def _ops(mode: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> OpSet:
    ops = select_ops(device, dtype, head_dim)
    if mode != "sdpa":
        return ops
    ours = ("prepare", "attention")
    chosen = tuple((op, "torch-sdpa" if op in ours else variant) for op, variant in ops.chosen)
    return replace(ops, prepare=torch_variants.prepare, attention=torch_variants.attention_sdpa, chosen=chosen)


def _floors(model: str, dtype: str, rates: Rates) -> CostModel:
    """Seconds of batches on a device that has nothing but these rates, all of which is reached."""
    ideal = Hardware(
        name="measured",
        flops_per_s=rates.flops_per_s,
        bytes_per_s=rates.bytes_per_s,
        memory_bytes=1.0,
        link_bytes_per_s=1.0,
        language_efficiency=1.0,
        vision_efficiency=1.0,
        bandwidth_efficiency=1.0,
        step_base_s=0.0,
        encode_base_s=0.0,
    )
    return cost_of(shape_of(model, dtype), ideal)


def furthest(out: Path) -> tuple[str, str]:
    """(model, case) of step 2 that is furthest from its floor, of those in the fastest mode that ran."""
    for mode in MODES:
        files = [json.loads(f.read_text())["results"] for f in sorted(out.glob(f"micro_*_{mode}.json"))]
        rows = [(case["of_floor"], r["model"], name) for r in files for name, case in r["cases"].items()]
        if rows:
            return max(rows)[1:]
    raise SystemExit(f"no results of step 2 in {out}")


def again(bench: Bench, case: str, once: bool) -> None:
    for rig, works in bench.works():
        for work in works:
            if title(work) == case and once:
                rig.run(work)
            elif title(work) == case:
                bench.measure(rig, work)
                bench.results["profile"] = {case: bench.profile(rig, work)}
                bench.keep()


def measure_all(bench: Bench, quick: bool) -> None:
    for i, (rig, works) in enumerate(bench.works(quick)):
        for work in works:
            bench.measure(rig, work)
        if i == 0 and bench.mode == "graphs" and not quick:
            last = {title(w).split()[0]: w for w in works}  # the largest of each stage
            bench.results["profile"] = {title(w): bench.profile(rig, w) for w in last.values()}
            bench.keep()
    if bench.mode == "graphs" and not quick:
        for priority in (-1, 0):
            bench.beside(priority)


def main() -> None:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--model", choices=list(MODELS))
    parser.add_argument("--mode", choices=MODES, default="graphs")
    parser.add_argument("--quick", action="store_true", help="one case of each stage: everything is compiled")
    parser.add_argument("--again", type=Path, help="the case furthest from its floor, of step 2's results here")
    parser.add_argument("--once", action="store_true", help="with --again: run it once")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    start_s = time.perf_counter()
    if args.again:
        args.model, case = furthest(args.again)
    bench = Bench(args.model, args.mode, device_of(args.device), args.out)
    print(f"{args.model}, {args.mode}: ready after {time.perf_counter() - start_s:.0f} s", flush=True)
    bench.keep()
    if args.again:
        print(f"{case} of {args.model}")
        again(bench, case, args.once)
    else:
        measure_all(bench, args.quick)


if __name__ == "__main__":
    main()
