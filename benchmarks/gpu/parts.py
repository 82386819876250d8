"""The parts of the steps, by name: nothing here imports torch, which takes seconds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

PROBES = (
    *("kernels", "attention", "replay", "tower", "grouped", "copies", "ipc", "pinned"),
    *("llava", "three", "qwen2_vl", "gemma3", "gpt_oss", "qwen3_5"),
)
MODELS = ("llava-1.5-7b", "qwen2-vl-7b")
HYBRIDS = ("gpt-oss-20b", "qwen3.5-9b")  # experts, states
WAYS: dict[str, dict[str, Any]] = {
    "off": {"overlap": "off"},
    "free": {"overlap": "free"},
    "1E1P1D": {"layout": "1E1P1D", "launcher": "inproc"},
}


class Place(NamedTuple):
    """Where a session runs, writes, and makes checkpoints."""

    device: str
    results: Path
    models: Path

    @property
    def dry(self) -> bool:
        return self.device == "cpu"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of step `whole`: with LLaVA-1.5-7B's shapes, or a tiny one."""
        return self.models / "llava"


class Part(NamedTuple):
    """`command(place)`: module and arguments. `limit_s`: more than is expected."""

    name: str
    limit_s: float
    command: Callable[[Place], list[str]]


class Step(NamedTuple):
    """Parts, so many of them `at_once`, on a machine with 16 cores; those of more than one must not be disturbed by
    each other. `limit_s`: of all together.
    `told`: the last line of each part is part of the summary."""

    name: str
    limit_s: float
    parts: tuple[Part, ...]
    at_once: int = 1
    told: bool = False


def _own(name: str, module: str, limit_s: float, *args: str) -> Part:
    """A module of this package."""

    def command(p: Place) -> list[str]:
        return [f"benchmarks.gpu.{module}", *args, "--device", p.device, "--out", str(p.results / f"{name}.json")]

    return Part(name, limit_s, command)


def _probe(name: str) -> Part:
    def command(p: Place) -> list[str]:
        return ["benchmarks.gpu.probes", name, "--device", p.device, "--models", str(p.models)]

    return Part(f"probe_{name}", 60, command)


def _tests(name: str, limit_s: float) -> Part:
    def command(p: Place) -> list[str]:
        few = ["--few"] if p.dry else []
        there = ["--device", p.device, "--models", str(p.models), *few]
        return ["pytest", f"tests/gpu/{name}.py", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", "-rP", *there]

    return Part(name, limit_s, command)


def _moving(name: str, limit_s: float, args: str, tiny: str) -> Part:
    def command(p: Place) -> list[str]:
        there = ["--device", p.device, "--out", str(p.results / f"{name}.json")]
        return ["benchmarks.b07_transports", *there, *(tiny if p.dry else args).split()]

    return Part(name, limit_s, command)


def _on_checkpoint(name: str, module: str, limit_s: float, *args: str) -> Part:
    """A module that takes the checkpoint of step `whole`."""

    def command(p: Place) -> list[str]:
        there = ["--model", str(p.checkpoint), "--device", p.device, "--out", str(p.results / f"{name}.json")]
        return [f"benchmarks.gpu.{module}", *args, *there]

    return Part(name, limit_s, command)


def _checkpoint(p: Place) -> list[str]:
    return ["benchmarks.gpu.whole", "--make", str(p.checkpoint), "--device", p.device]


def _sanitizer(p: Place) -> list[str]:
    tool = ["benchmarks.gpu.under", "compute-sanitizer", "--error-exitcode", "1", "--"]
    return [*tool, "benchmarks.gpu.probes", "kernels", "replay", "--device", p.device, "--models", str(p.models)]


def _again(p: Place) -> list[str]:
    there = ["--device", p.device, "--out", str(p.results / "again.json")]
    return ["benchmarks.gpu.micro", "--again", str(p.results), *there]


def _counters(p: Place) -> list[str]:
    tool = ["ncu", "--clock-control", "none", "--launch-count", "5", *_slowest_kernel(p.results / "again.json")]
    runs = ["benchmarks.gpu.micro", "--again", str(p.results), "--device", p.device, "--once"]
    return ["benchmarks.gpu.under", *tool, "--", *runs, "--out", str(p.results / "counters.json")]


def _slowest_kernel(again: Path) -> list[str]:
    """ncu's option for the kernel that took longest when the row ran again; none if that is not known."""
    try:
        profiles = json.loads(again.read_text())["results"]["profile"]
    except (OSError, ValueError, KeyError):
        return []
    kernels = [name for rows in profiles.values() for name, *_ in rows if not name.startswith(("aten::", "cuda"))]
    words = re.findall(r"\w+", re.split(r"[<(]", kernels[0])[0]) if kernels else []
    return ["--kernel-name", words[-1]] if words else []  # without its namespace and parameters


def _micro(models: tuple[str, ...], mode: str, limit_s: float, *args: str) -> tuple[Part, ...]:
    return tuple(
        _own(f"micro_{model}_{mode}", "micro", limit_s, "--model", model, "--mode", mode, *args) for model in models
    )


STEPS: tuple[Step, ...] = (
    Step("look", 150, (_own("look", "look", 120), *map(_probe, PROBES)), at_once=6, told=True),
    Step(
        "truth",
        240,
        (
            _tests("test_whole", 240),
            Part("sanitizer", 150, _sanitizer),
            _tests("test_ops", 120),
            _tests("test_cuda_transports", 90),
            _tests("test_processes", 120),
            _tests("test_cuda", 120),
        ),
        at_once=4,
        told=True,
    ),
    Step(
        "micro",
        400,
        (
            *_micro(MODELS, "graphs", 120),
            *_micro(MODELS, "flashinfer", 40, "--cases", "3"),
            *_micro(MODELS, "sdpa", 40, "--cases", "3"),
        ),
    ),
    Step("hybrids", 120, _micro(HYBRIDS, "graphs", 60, "--cases", "5")),
    Step(
        "moves",
        120,
        (
            _own("rates", "truth", 25),
            _own("moves", "moves", 15),
            _own("killed", "moves", 20, "--killed"),
            _own("nccl", "moves", 15, "--nccl"),
            _moving("b07", 45, "--rounds 15", "--rounds 1 --tiny"),
        ),
    ),
    Step(
        "whole",
        400,
        (
            Part("checkpoint", 60, _checkpoint),
            _on_checkpoint("cost_model", "cost_file", 130),
            *(_on_checkpoint(f"whole_{way}", "whole", 60, "--way", way) for way in WAYS),
        ),
    ),
    Step("again", 200, (Part("again", 90, _again), Part("counters", 110, _counters))),
)
"""In the order of their worth. The parts of a step end within its limit, whatever happens to some of them."""
