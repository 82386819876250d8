"""The parts of the five steps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.shapes import MODELS


class Place(NamedTuple):
    """Where a step runs and writes."""

    device: str
    out: Path
    models: Path

    @property
    def dry(self) -> bool:
        return self.device == "cpu"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint that step 4 makes: with LLaVA-1.5-7B's shapes, or a tiny one."""
        return self.models / "llava"


class Part(NamedTuple):
    """`command(place)`: module and arguments."""

    name: str
    limit_s: float
    command: Callable[[Place], list[str]]


def _own(name: str, module: str, limit_s: float, *args: str) -> Part:
    """A module of this package."""

    def command(p: Place) -> list[str]:
        return [f"benchmarks.gpu.{module}", *args, "--device", p.device, "--out", str(p.out / f"{name}.json")]

    return Part(name, limit_s, command)


def _tests(name: str, limit_s: float) -> Part:
    def command(p: Place) -> list[str]:
        return ["pytest", *_gpu_tests(p, name), "--junitxml", str(p.out / f"{name}.xml")]

    return Part(name, limit_s, command)


def _gpu_tests(p: Place, name: str) -> list[str]:
    few = ["--few"] if p.dry else []
    return [f"tests/gpu/{name}.py", "-m", "gpu", "--device", p.device, *few, "-p", "no:cacheprovider"]


_SHORT = "--rounds 1 --prompt-tokens 40"
_ONE_REQUEST = "--rounds 1 --requests 1 --output-tokens 4 --picture-px 56 --threads 1 --keep-noisy"


def _numbered(name: str, module: str, limit_s: float, args: str, tiny: str, model: bool = True) -> Part:
    """One of the numbered experiments, on the checkpoint of step 4 if it takes one; `tiny`: arguments of a dry run."""

    def command(p: Place) -> list[str]:
        chosen = ["--model", str(p.checkpoint)] if model else []
        there = ["--device", p.device, "--out", str(p.out / f"{name}.json")]
        return [f"benchmarks.{module}", *chosen, *there, *(tiny if p.dry else args).split()]

    return Part(name, limit_s, command)


def _again(p: Place) -> list[str]:
    return ["benchmarks.gpu.micro", "--again", str(p.out), "--device", p.device, "--out", str(p.out / "again.json")]


def _sanitizer(p: Place) -> list[str]:
    few = ["-k", "bfloat16 and 28 and 128 or rows or migration"]
    tool = ["benchmarks.gpu.under", "compute-sanitizer", "--error-exitcode", "1", "--"]
    return [*tool, "pytest", *_gpu_tests(p, "test_ops"), *few]


def _dali(p: Place) -> list[str]:
    tests = "tests/processor/pictures/test_dali.py"
    return ["pytest", tests, "-p", "no:cacheprovider", "-s", "--junitxml", str(p.out / "test_dali.xml")]


def _counters(p: Place) -> list[str]:
    tool = ["ncu", "--clock-control", "none", "--launch-count", "5", *_slowest_kernel(p.out / "again.json")]
    runs = ["benchmarks.gpu.micro", "--again", str(p.out), "--device", p.device, "--once"]
    return ["benchmarks.gpu.under", *tool, "--", *runs, "--out", str(p.out / "counters.json")]


def _slowest_kernel(again: Path) -> list[str]:
    """ncu's option for the kernel that took longest when the row ran again; none if that is not known."""
    try:
        profiles = json.loads(again.read_text())["results"]["profile"]
    except (OSError, ValueError, KeyError):
        return []
    kernels = [name for rows in profiles.values() for name, *_ in rows if not name.startswith(("aten::", "cuda"))]
    words = re.findall(r"\w+", re.split(r"[<(]", kernels[0])[0]) if kernels else []
    return ["--kernel-name", words[-1]] if words else []  # without its namespace and parameters


def _step_2() -> tuple[Part, ...]:
    """The fastest mode first: time may run out."""
    return tuple(
        _own(f"micro_{model}_{mode}", "micro", 90, "--model", model, "--mode", mode)
        for mode in ("graphs", "flashinfer", "sdpa")
        for model in MODELS
    )


STEPS: dict[int, tuple[Part, ...]] = {
    1: (
        _own("rates", "truth", 90),
        _own("first", "micro", 150, "--model", "llava-1.5-7b", "--mode", "graphs", "--quick"),
        _tests("test_ops", 120),
        _tests("test_cuda_transports", 60),
        _tests("test_cuda", 120),
        Part("sanitizer", 60, _sanitizer),
        Part("test_dali", 60, _dali),
    ),
    2: _step_2(),
    3: (
        _own("moves", "moves", 90),
        _own("killed", "moves", 60, "--killed"),
        _own("nccl", "moves", 60, "--nccl"),
        _numbered("b07", "b07_transports", 90, "--rounds 40", "--rounds 1 --tiny", model=False),
    ),
    4: (
        Part("checkpoint", 90, lambda p: ["benchmarks.gpu.whole", "--make", str(p.checkpoint), "--device", p.device]),
        _numbered("cost_model", "gpu.cost_file", 150, "", ""),
        _numbered("overlaps", "gpu.whole", 120, "", ""),
        _numbered("b08", "b08_migration", 150, "--rounds 2 --dtype bfloat16 --keep-noisy", _ONE_REQUEST),
        _numbered("b03", "b03_step_overhead", 60, "--batch 1 32 --rounds 2", f"--batch 2 {_SHORT} --output-tokens 20"),
        _numbered("b06", "b06_model_step", 60, "--dtype bfloat16 --rounds 2", f"--encode 1 --decode 1 {_SHORT} --rows"),
        _numbered(
            "b13", "b13_encode_batch", 60, "--rounds 2", "--rounds 1 --batches 1 2 --families llava", model=False
        ),
    ),
    5: (Part("again", 120, _again), Part("counters", 150, _counters)),
}
"""Limits in seconds; what is expected is less. Together a step takes at most eight minutes."""
