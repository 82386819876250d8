"""Runs one step part by part, each in a process of its own with a time limit, and says what is off target."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.parts import STEPS, Part, Place
from benchmarks.gpu.targets import summary
from benchmarks.record import ROOT

STEP_LIMIT_S = 480.0
TAIL = 15  # lines of a part that failed
NO_TESTS = 5  # pytest's exit status
FINE = ("ok", "skipped")


def run(part: Part, place: Place, limit_s: float) -> dict[str, object]:
    """How the part ended. What it writes goes to a file beside its results; it has a process group of its own, so that
    nothing of it is left when its time is up."""
    log = place.out / f"{part.name}.log"
    command = [sys.executable, "-m", *part.command(place)]
    print(f"{part.name}, at most {limit_s:.0f} s: {shlex.join(command[1:])}", flush=True)
    start_s = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    nothing = part.command(place)[0] == "pytest" and code == NO_TESTS
    ended = "ok" if code == 0 else "timed out" if code is None else "skipped" if nothing else f"failed ({code})"
    print(f"  {ended} after {time.monotonic() - start_s:.0f} s", flush=True)
    if ended not in FINE:
        print(*log.read_text(errors="replace").splitlines()[-TAIL:], sep="\n")
    return {"ended": ended, "seconds": round(time.monotonic() - start_s, 1)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", type=int, choices=sorted(STEPS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run, tiny shapes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, help="where checkpoints are made; default: the temporary folder")
    parser.add_argument("--only", nargs="*", default=[], help="names of parts")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: not run")
        return 3
    models = args.models or Path(tempfile.gettempdir()) / f"hydrainfer-gpu-session-{args.device}"
    place = Place(args.device, args.out.resolve(), models.resolve())
    place.out.mkdir(parents=True, exist_ok=True)
    ends, end_s = {}, time.monotonic() + STEP_LIMIT_S
    for part in STEPS[args.step]:
        if args.only and part.name not in args.only:
            continue
        left_s = end_s - time.monotonic()
        ends[part.name] = run(part, place, min(part.limit_s, left_s)) if left_s > 1 else {"ended": "no time left"}
        (place.out / f"step{args.step}.json").write_text(json.dumps(ends, indent=2) + "\n")
    ill = [f"{name}: {one['ended']}" for name, one in ends.items() if one["ended"] != "ok"]
    words = "\n".join([*ill, *summary(place.out)])
    (place.out / "summary.txt").write_text(words + "\n")
    print(words)
    return 0 if all(one["ended"] in FINE for one in ends.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
