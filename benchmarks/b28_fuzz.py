"""Does any input, however wrong, end in a 500, a lost connection or a dead worker?

    make fuzz [ARGS="--http 100000 --media 100000 --frames 100000 --predicted 100000"]

The targets are those of `tests/fuzz`: bodies and raw bytes to the HTTP server (before a scripted engine), pictures to
two media workers, frames to the decoders of the cluster's messages, predicted answers to a server with a tiny model,
which must not change an answer. An input is a function of its number, and how far each target has come is kept in
`--state`: a run that is interrupted goes on there. The first violation ends the run and names the input, which
`--only TARGET:NUMBER` makes again. With `--schemathesis PATH` its program, in an environment of
its own (`pip install schemathesis`), attacks every route of the OpenAPI description as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.command import options
from benchmarks.record import ROOT, write_result
from hydrainfer.processor import load_description
from tests.checkpoints import make_llava
from tests.fuzz.targets import TARGETS, rng_of
from tests.server.conftest import ServerUnderTest

_TOGETHER = 1000
"""Inputs between two looks at what is left of the target, and two notes of how far it has come."""


def feed(name: str, first: int, stop: int, state: dict[str, Any], keep: Path) -> str | None:
    """Feed a target its inputs from number `first`; returns what must not be, with the input's number."""
    for low in range(first, stop, _TOGETHER):
        begin_s, high, number = time.perf_counter(), min(low + _TOGETHER, stop), low
        with tempfile.TemporaryDirectory() as folder:
            target = TARGETS[name](Path(folder))
            try:
                for number in range(low, high):
                    target.feed(rng_of(name, number))
            except Exception as e:
                return f"{name}:{number}: {type(e).__name__}: {e}"
            finally:
                target.close()
        mine = state.setdefault(name, {"inputs": 0, "seconds": 0.0, "seen": {}})
        mine["inputs"], mine["seen"] = high, dict(Counter(mine["seen"]) + target.seen)
        mine["seconds"] += time.perf_counter() - begin_s
        keep.parent.mkdir(parents=True, exist_ok=True)
        keep.write_text(json.dumps(state, indent=1))
        print(f"{name}: {high} of {stop}", flush=True)
    return None


def schemathesis(program: Path, n_examples: int) -> dict[str, Any]:
    """Its verdict on a server of its own: what it counts as an error of the server."""
    with tempfile.TemporaryDirectory() as folder:
        server = ServerUnderTest(load_description(make_llava(Path(folder), image_size=56, context=512)), timeout_s=5.0)
        command = [str(program), "run", f"{server.url}/openapi.json", "--checks", "not_a_server_error", "--seed", "1"]
        try:
            done = subprocess.run(
                [*command, "--max-examples", str(n_examples), "--phases", "examples,coverage,fuzzing"],
                capture_output=True,
                text=True,
                check=False,
                cwd=folder,  # it keeps a cache where it runs
            )
            server.check_idle()
        finally:
            server.close()
    return {"status": done.returncode, "says": done.stdout[-3000:], "examples": n_examples}


def main() -> int:
    parser = options(__doc__)
    for name in TARGETS:
        parser.add_argument(f"--{name}", type=int, default=100_000, help="inputs in all")
    parser.add_argument("--schemathesis", type=Path, help="its program")
    parser.add_argument("--examples", type=int, default=100, help="of schemathesis, per route")
    parser.add_argument("--only", metavar="TARGET:NUMBER", help="one input")
    parser.add_argument("--state", type=Path, default=ROOT / ".cache" / "fuzz.json")
    args = parser.parse_args()
    if args.only:
        name, _, number = args.only.partition(":")
        wrong = feed(name, int(number), int(number) + 1, {}, args.state.with_suffix(".one.json"))
        print(wrong or "nothing is wrong")
        return bool(wrong)
    state: dict[str, Any] = json.loads(args.state.read_text()) if args.state.exists() else {}
    for name in TARGETS:
        wrong = feed(name, state.get(name, {}).get("inputs", 0), getattr(args, name), state, args.state)
        if wrong:
            print(wrong)
            return 1
    if args.schemathesis:
        state["schemathesis"] = schemathesis(args.schemathesis.absolute(), args.examples)
    settings = {name: getattr(args, name) for name in TARGETS}
    print(f"written to {write_result('b28_fuzz', __doc__, settings, state, args.out)}")
    return int(state.get("schemathesis", {}).get("status", 0) != 0)


if __name__ == "__main__":
    sys.exit(main())
