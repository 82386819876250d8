"""The facts that every experiment keeps with its numbers: command, revision, hardware, versions, date."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydrainfer.machine import cpu_name, instruction_sets, memory_bytes, n_cores, versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = (
    *("hydrainfer", "torch", "transformers", "numpy", "fastapi", "uvicorn", "msgspec", "orjson", "httptools"),
    *("av", "decord"),
)

_TOLD = ("OMP_", "KMP_", "MKL_", "WEIGHTS")  # of the environment; the last says what llama.cpp is to load


def write_result(
    name: str, doc: str | None, settings: argparse.Namespace | Mapping[str, Any], results: Any, out: Path | None = None
) -> Path:
    """Write `results/NAME.json`, or `out`, and return which. The first line of `doc` is the question. `settings`: what
    the experiment was run with, defaults included; of a parser of `command.options`, `out` is among them."""
    values = dict(vars(settings) if isinstance(settings, argparse.Namespace) else settings)
    path = out or values.pop("out", None) or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "question": (doc or "").partition("\n")[0],
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "revision": revision(),
        "hardware": hardware(),
        "versions": versions(PACKAGES),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_TOLD)},
        "settings": {k: from_root(v) if isinstance(v, Path) else v for k, v in values.items()},
        "results": results,
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def from_root(path: Path) -> str:
    """The path as it is named from the root of the repository, if it lies there."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def revision() -> str:
    """`$HYDRAINFER_REVISION`, which comes with a copy of the tree, else the commit, marked `+changes` if tracked files
    differ from it or package files are untracked; "unknown" where git cannot tell."""
    if told := os.environ.get("HYDRAINFER_REVISION"):
        return told
    try:
        head, status = (
            subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
            for args in (
                ["rev-parse", "HEAD"],
                ["status", "--porcelain", "--", "hydrainfer", "kernels", "benchmarks/*.py"],
            )
        )
    except OSError:  # there is no git
        head = status = ""
    return (head or "unknown") + ("+changes" if status else "")


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, memory; the accelerator if torch sees one."""
    found = {
        "cpu": cpu_name(),
        "vector_instructions": list(instruction_sets()),
        "cores": n_cores(),
        "memory_bytes": memory_bytes(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def spread(samples: Sequence[float]) -> dict[str, float] | None:
    """Median, least and greatest of repeated measurements; None if there are none."""
    if not samples:
        return None
    ordered, n = sorted(samples), len(samples)
    median = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return {"n": n, "median": median, "min": ordered[0], "max": ordered[-1]}
