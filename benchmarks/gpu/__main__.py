"""Runs steps part by part, each in a process of its own with a time limit, and says what failed and what is off target.

All parts write to one folder, which outlives a call. After every part it is packed into `results.tar.gz` beside
`summary.txt`, so that a call that is cut off loses nothing that was done.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import STEPS, Part, Place, Step
from benchmarks.gpu.targets import summary
from benchmarks.record import ROOT
from hydrainfer.machine import n_cores

DRY = 10.0  # times the limits: a rehearsal measures nothing, and may share its processors
RESERVE_S = 5.0  # of the time of a call: to pack and to print
TAIL = 3  # lines of a part that failed
LARGEST_BYTES = 4 << 20  # of a file in the archive
NO_TESTS = 5  # pytest's exit status
FINE = ("ok", "skipped")
HOME = ROOT / ".cache" / "gpu-session"
Ends = dict[str, dict[str, dict[str, Any]]]
"""How each part ended, by step."""


_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def _die_with_us() -> None:
    """In a part's process: it ends when this one is killed."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


def run(part: Part, place: Place, limit_s: float) -> dict[str, Any]:
    """How the part ended. What it prints goes to a file beside its results; it has a process group of its own, so that
    nothing of it is left when its time is up."""
    log, command = place.results / f"{part.name}.log", part.command(place)
    start_s = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=_die_with_us,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    no_tests = command[0] == "pytest" and code == NO_TESTS
    ended = "ok" if code == 0 else "timed out" if code is None else "skipped" if no_tests else f"failed ({code})"
    return {"ended": ended, "seconds": round(time.monotonic() - start_s, 1), "last": last_lines(log)}


def last_lines(log: Path) -> list[str]:
    """The last lines of a log; of one with failed tests, the lines that say why each failed."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    why = [line for line in lines if line.startswith(("E  ", "FAILED ", "ERROR "))]
    return (why[-3 * TAIL :] or lines)[-3 * TAIL if why else -TAIL :]


class Session:
    """Steps that share a folder of results. `end_s`: when the call must have ended, by the monotonic clock."""

    def __init__(self, place: Place, out: Path, end_s: float) -> None:
        self.place, self.out, self.end_s = place, out, end_s
        self._stretch = DRY if place.dry else 1.0
        self._lock = threading.Lock()
        self._ends_at = place.results / "ends.json"
        self.ends: Ends = json.loads(self._ends_at.read_text()) if self._ends_at.exists() else {}

    def run(self, step: Step, only: list[str]) -> bool:
        """Whether all of its parts ended well. Some run side by side, in the order in which they are listed."""
        parts = [part for part in step.parts if not only or part.name in only]
        end_s = min(self.end_s, time.monotonic() + step.limit_s * self._stretch)
        self.ends[step.name] = self.ends.get(step.name, {}) if only else {}
        with ThreadPoolExecutor(min(step.at_once, n_cores())) as threads:
            ended = list(threads.map(lambda part: self._part(step, part, end_s), parts))
        return all(ended)

    def _part(self, step: Step, part: Part, end_s: float) -> bool:
        left_s = end_s - time.monotonic()
        if left_s > 1:
            print(f"{part.name}: {shlex.join(part.command(self.place))}", flush=True)
            end = run(part, self.place, min(part.limit_s * self._stretch, left_s))
        else:
            end = {"ended": "no time left", "seconds": 0.0, "last": []}
        with self._lock:
            self.ends[step.name][part.name] = end
            self._ends_at.write_text(json.dumps(self.ends, indent=2) + "\n")
            print(f"  {part.name}: {end['ended']} after {end['seconds']:.0f} s", flush=True)
            self.pack()
        return end["ended"] in FINE

    def words(self) -> list[str]:
        """What failed, what the probes found, then what is off target."""
        by_part = [(f"{step}, {name}", end) for step, ends in self.ends.items() for name, end in ends.items()]
        ill = [(name, end) for name, end in by_part if end["ended"] != "ok"]
        failed = [line for name, end in ill for line in (f"{name}: {end['ended']}", *(f"  {x}" for x in end["last"]))]
        told = [step.name for step in STEPS if step.told]
        found = [
            f"{name}: {end['last'][-1]} ({end['seconds']:.0f} s)"
            for step in told
            for name, end in self.ends.get(step, {}).items()
            if end["ended"] == "ok" and end["last"]
        ]
        return [*failed, *found, *summary(self.place.results)]

    def pack(self) -> None:
        """Write the archive and the summary."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "summary.txt").write_text("\n".join(self.words()) + "\n")
        part = self.place.results.parent / "results.tar.gz.part"
        with tarfile.open(part, "w:gz", compresslevel=6) as archive:
            for path in sorted(p for p in self.place.results.rglob("*") if p.is_file()):
                if path.stat().st_size <= LARGEST_BYTES:
                    archive.add(path, Path("results") / path.relative_to(self.place.results))
        archive_at = self.out / "results.tar.gz"
        archive_at.write_bytes(part.read_bytes())
        part.unlink()


def has_cuda() -> bool:
    """Asked of the driver, because to import torch takes seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    n = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(n)) == 0 and n.value > 0


def main(argv: list[str] | None = None) -> int:
    by_name = {step.name: step for step in STEPS}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", nargs="+", choices=by_name, metavar="STEP", help=", ".join(by_name))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run, tiny shapes")
    parser.add_argument("--results", type=Path, help="where all parts write; default: $RESULTS, or below .cache")
    parser.add_argument("--out", type=Path, help="where archive and summary go; default: $OUT, or beside the results")
    parser.add_argument("--models", type=Path, help="where checkpoints are made; default: in memory, if it is a GPU's")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="of the whole call; parts are cut short")
    parser.add_argument("--only", nargs="*", default=[], help="names of parts")
    args = parser.parse_args(argv)
    end_s = time.monotonic() + args.limit_s - RESERVE_S
    if args.device == "cuda" and not has_cuda():
        print("no CUDA device: not run")
        return 3
    results = args.results or Path(os.environ.get("RESULTS") or HOME / "results")
    out = args.out or Path(os.environ.get("OUT") or HOME / "out")
    place = Place(args.device, results.resolve(), (args.models or _models(args.device)).resolve())
    place.results.mkdir(parents=True, exist_ok=True)
    place.models.mkdir(parents=True, exist_ok=True)
    session = Session(place, out.resolve(), end_s)
    fine = [session.run(by_name[name], args.only) for name in args.steps]
    session.pack()
    print(*session.words(), sep="\n")
    return 0 if all(fine) else 1


def _models(device: str) -> Path:
    """Memory rather than a disk: some of the checkpoints have 14 GB."""
    memory = Path("/dev/shm")
    place = memory if device == "cuda" and memory.is_dir() else Path(tempfile.gettempdir())
    return place / f"hydrainfer-gpu-session-{device}"


if __name__ == "__main__":
    sys.exit(main())
