"""How far is each stage of a 7B model from its floor on this device?

Batches go through the runners: packing, the hand-over to the lane's thread and sampling count. The floor is the longer
of arithmetic and memory traffic (`planner.costs.cost_of`) at the rates that the device was just seen to reach. Modes:
`sdpa`, attention by torch; `flashinfer`; `graphs`, FlashInfer with decodes and few pictures replayed from CUDA graphs;
`cuda-cores`, the same with FlashInfer's other decode kernel (for LLaVA's heads). With `graphs` also encode beside
decode, with and without priority of the language lane, and what each stage spends its time on. Every case is written as
soon as it is measured.

A case has up to three times: `p50_s`, a batch alone, from its launch to its result; for decodes `ahead_s`, from result
to result with two batches in flight, as a server computes them; on a GPU `device_s`, what a batch takes the lane's
stream. `of_floor` is `ahead_s` by the floor for decodes, `p50_s` by the floor for others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.floors import Rates, measure_rates
from benchmarks.gpu.shapes import MODELS, PICTURES, TINY, Shape, device_of, folder_of, random_model
from benchmarks.record import write_result
from hydrainfer.checkpoint import ModelConfig
from hydrainfer.config import ServeConfig
from hydrainfer.core import CostModel, Role
from hydrainfer.costing.rig import Rig, pictures_of
from hydrainfer.families import read_config
from hydrainfer.models import DTYPES, Model, attentions_of
from hydrainfer.ops import OpSet, select_ops, torch_variants
from hydrainfer.ops.cuda.flashinfer import FlashInfer
from hydrainfer.planner.costs import BatchShape, Hardware, cost_of
from hydrainfer.planner.inputs import shape_of

MODES = ("graphs", "flashinfer", "sdpa", "cuda-cores")
QUESTION = (__doc__ or "").splitlines()[0]
_LEAST_S, _LEAST_RUNS, _MOST_RUNS = 0.4, 5, 30
_BESIDE_S = 1.5
_TOP = 20
_TIMES = {"p50_s": "alone", "ahead_s": "with two in flight", "device_s": "on the device"}


def title(work: BatchShape) -> str:
    if work.is_vision:
        return f"encode {work.pictures}"
    return f"prefill {work.chunk}" if work.chunk else f"decode {work.decodes} x {work.context}"


class Bench:
    """One model in one mode. `say(name, result)` is called after each case."""

    def __init__(self, name: str, mode: str, device: torch.device, out: Path) -> None:
        self.name, self.mode, self.device, self.out = name, mode, device, out
        self.dry = device.type == "cpu"
        shape: Shape = MODELS[name]
        self.shape = TINY._replace(size=shape.size and TINY.size) if self.dry else shape
        folder = folder_of(name, out.parent / "models" if self.dry else None)
        dtype: Literal["float32", "bfloat16"] = "float32" if self.dry else "bfloat16"
        config = read_config(folder)
        self.ops = _ops(mode, device, DTYPES[dtype], config)
        self.model: Model = random_model(folder, device, dtype, self.ops, config)
        self.config = ServeConfig(
            model=str(folder),
            device="cpu" if self.dry else "cuda",
            dtype=dtype,
            cuda_graphs=mode in ("graphs", "cuda-cores"),
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

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Those of pictures; none if the model takes text only."""
        return [] if self.shape.size is None else [self.shape.size]

    def pictures(self, n: int) -> BatchShape:
        (tokens,) = pictures_of(self.model.config, self.sizes)
        return BatchShape(pictures=n, tokens=tokens)

    def works(self, n_cases: int | None = None) -> list[BatchShape]:
        """The batches to measure; of `n_cases`, a decode, a prefill and an encode in turn."""
        pictures = [self.pictures(n) for n in PICTURES if self.sizes]
        language = [*self.shape.works, *self.shape.more]
        if n_cases is None:
            return [*pictures, *language]
        decodes, chunks = [w for w in language if w.decodes], [w for w in language if not w.decodes]
        turns = itertools.chain.from_iterable(itertools.zip_longest(decodes, chunks, pictures))
        return [work for work in turns if work is not None][:n_cases]

    def on_rig(self, works: Sequence[BatchShape], use: Callable[[Rig], None], priority: int = -1) -> None:
        """Call `use` with a rig for these batches, which is freed before this returns: two do not fit a GPU."""
        n_pictures = max((work.pictures for work in works), default=0)
        language = [work for work in works if not work.is_vision]
        rig = Rig(self.config, self.sizes, n_pictures, language, self.model, priority)
        try:
            use(rig)
        finally:
            rig.close()

    def floor_s(self, work: BatchShape) -> float:
        if work.is_vision:
            return self.floor.encode_s([work.tokens] * work.pictures)
        pairs, contexts = work.chunk * work.chunk, work.decodes * (work.context + 1)
        return self.floor.language_s(work.chunk, pairs, work.decodes, contexts)

    def alone(self, rig: Rig, work: BatchShape) -> list[float]:
        """The seconds of each run of a batch by itself."""
        rig.run(work)
        took = [rig.run(work)]
        least_s, most = (0.0, 2) if self.dry else (_LEAST_S, _MOST_RUNS)
        while (sum(took) < least_s or len(took) < _LEAST_RUNS) and len(took) < most:
            took.append(rig.run(work))
        return took

    def measure(self, rig: Rig, work: BatchShape) -> None:
        """Run one case and keep it."""
        took, least_s = self.alone(rig, work), 0.0 if self.dry else _LEAST_S
        p50_s, floor_s = statistics.median(took), self.floor_s(work)
        case = {"p50_s": p50_s, "min_s": min(took), "n": len(took), "floor_s": floor_s}
        judged = "p50_s"
        if work.decodes and not work.chunk:
            judged = "ahead_s"
            case[judged] = statistics.median(rig.run_ahead(work, least_s, 2 if self.dry else _LEAST_RUNS))
        if device_s := rig.device_times(work, min(len(took), _LEAST_RUNS)):
            case["device_s"] = statistics.median(device_s)
        case["of_floor"] = case[judged] / floor_s
        self.results["cases"][title(work)] = case
        times = ", ".join(f"{case[key] * 1e3:.2f} ms {words}" for key, words in _TIMES.items() if key in case)
        print(f"{title(work)}: {times}; {case['of_floor']:.2f} × its floor", flush=True)
        self.keep()

    def beside(self, priority: int) -> None:
        """Encode beside decode: the sum of both lanes' speeds, where 1 is taking turns."""
        decode = max((w for w in self.shape.works if w.decodes), key=lambda w: (w.decodes, -w.context))
        vision = self.pictures(8)

        def both(rig: Rig) -> None:
            alone = [statistics.median(self.alone(rig, work)) for work in (vision, decode)]
            vision_s, decode_s = rig.run_beside(vision, decode, 0.05 if self.dry else _BESIDE_S, 2)
            medians = [statistics.median(vision_s), statistics.median(decode_s)]
            speed = sum(a / b for a, b in zip(alone, medians))
            self.results[f"beside, priority {priority}"] = {"alone_s": alone, "beside_s": medians, "speed": speed}
            print(f"encode beside decode, priority {priority}: {speed:.2f} × one after the other", flush=True)
            self.keep()

        self.on_rig([vision, decode], both, priority)

    def profile(self, rig: Rig, work: BatchShape, runs: int = 3) -> None:
        """Keep what takes longest in a case: (operator or kernel, microseconds on the device, calls) as `profile`, the
        same on the host, of all threads, as `host`."""
        activities = [ProfilerActivity.CPU] if self.dry else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        rig.run(work)
        with profile(activities=activities, experimental_config=threads) as seen:
            for _ in range(runs):
                rig.run(work)
        for name, key in (("profile", "self_device_time_total"), ("host", "self_cpu_time_total")):
            rows = sorted(seen.key_averages(), key=lambda row: getattr(row, key), reverse=True)
            longest = [(row.key, getattr(row, key) / runs, row.count // runs) for row in rows[:_TOP]]
            self.results.setdefault(name, {})[title(work)] = longest
        self.keep()


def _ops(mode: str, device: torch.device, dtype: torch.dtype, config: ModelConfig) -> OpSet:
    attentions = attentions_of(config, Role.parse("EPD"), dtype)
    ops = select_ops(device, dtype, config.text.head_dim, attentions=attentions)
    if mode == "cuda-cores" and ops.captures:
        other = FlashInfer(device, cuda_cores=True)
        other.check(attentions)
        return replace(ops, prepare=other.prepare, attention=other.attention)
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
    """(model, case) of step `micro` that is furthest from its floor, of those in the fastest mode that ran."""
    for mode in MODES:
        files = [json.loads(f.read_text())["results"] for f in sorted(out.glob(f"micro_*_{mode}.json"))]
        rows = [(case["of_floor"], r["model"], name) for r in files for name, case in r["cases"].items()]
        if rows:
            return max(rows)[1:]
    raise SystemExit(f"no results of step micro in {out}")


def again(bench: Bench, case: str, once: bool) -> None:
    work = next(work for work in bench.works() if title(work) == case)

    def run(rig: Rig) -> None:
        if once:
            rig.run(work)
            return
        bench.measure(rig, work)
        bench.profile(rig, work)

    bench.on_rig([work], run)


def measure_all(bench: Bench, n_cases: int | None) -> None:
    """Measure every case, or `n_cases`. With graphs and all cases, also the profiles of the largest of each stage, and
    both lanes side by side."""
    works, whole = bench.works(n_cases), bench.mode == "graphs" and n_cases is None

    def run(rig: Rig) -> None:
        for work in works:
            bench.measure(rig, work)
        if whole:
            for work in {title(w).split()[0]: w for w in works}.values():  # the largest of each stage
                bench.profile(rig, work)

    bench.on_rig(works, run)
    for priority in (-1, 0) if whole and bench.sizes else ():
        bench.beside(priority)


def main() -> None:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--model", choices=list(MODELS))
    parser.add_argument("--mode", choices=MODES, default="graphs")
    parser.add_argument("--cases", type=int, help="only so many cases: a decode, a prefill, an encode, and so on")
    parser.add_argument(
        "--again", type=Path, help="the case furthest from its floor, of the results of step micro here"
    )
    parser.add_argument("--case", nargs="+", default=[], help="only these cases, with what each spends its time on")
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
    elif args.case:
        for case in args.case:
            again(bench, case, once=False)
    else:
        measure_all(bench, args.cases)


if __name__ == "__main__":
    main()
