"""What is on this machine: the device, its tools, room, and how long imports take?"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.record import write_result

TOOLS = ("git", "ninja", "nvcc", "g++", "make", "nvidia-smi", "ncu", "compute-sanitizer")
COMMANDS = (("nvidia-smi",), ("df", "-h"), ("free", "-m"), ("nvcc", "--version"))
IMPORTS = ("torch", "transformers", "flashinfer", "hydrainfer.serving", "hydrainfer")
PACKAGES = (
    *IMPORTS[:3],
    "tvm_ffi",
    "msgspec",
    "zmq",
    "fastapi",
    "uvicorn",
    "orjson",
    "llguidance",
    "ray",
    "av",
    "gguf",
)
_COMMAND_S = 15.0


def tools() -> dict[str, str | None]:
    """Where each tool is, also if it is only in CUDA's folder."""
    beside = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    return {name: shutil.which(name) or shutil.which(name, path=beside) for name in TOOLS}


def said_by(command: tuple[str, ...]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{type(e).__name__}: {e}"


def import_s() -> dict[str, float | str]:
    """Seconds of each import, one after the other in this process: the first reads from the disk."""
    seconds: dict[str, float | str] = {}
    for name in IMPORTS:
        start_s = time.perf_counter()
        try:
            importlib.import_module(name)
            seconds[name] = round(time.perf_counter() - start_s, 2)
        except Exception as e:  # whatever a broken package raises
            seconds[name] = f"{type(e).__name__}: {e}"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    stubs = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64" / "stubs"
    found: dict[str, Any] = {
        "python": sys.version,
        "tools": tools(),
        "stubs": sorted(path.name for path in stubs.glob("*")) if stubs.is_dir() else None,
        "packages": {name: importlib.util.find_spec(name) is not None for name in PACKAGES},
        "commands": {" ".join(command): said_by(command) for command in COMMANDS},
        "import_s": import_s(),
    }
    for name in ("tools", "stubs", "packages", "import_s"):
        print(name, found[name])
    print(*found["commands"].values(), sep="\n")
    write_result("gpu.look", __doc__, {"device": args.device}, found, args.out)
    absent = [name for name, path in found["tools"].items() if path is None]
    print(f"absent: {', '.join(absent) or 'nothing'}; imports {found['import_s']}")


if __name__ == "__main__":
    main()
