"""Are greedy tokens, plans and simulated figures of this tree those of another revision?

    python -m benchmarks.unchanged a6c208e [case ...]

For changes that must not change behaviour. Each case is a command that prints or writes JSON. It runs in this tree and
in a worktree of the revision, with the same Python; what may differ (times, revisions) is left out, and the first
differences are printed. Simulated figures contain every time of every request with all digits, so they are equal only
if every batch of every schedule is. The status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT

TOKENS = """
import json, sys
from hydrainfer import LLM, SamplingParams
asked = ["What is in this picture?", "How many stars are there?", "Count to ten.", "hello " * 60]
picture = {"type": "image", "image": "datasets/samples/stars.png"}
sampled = dict(max_tokens=24, temperature=0.9, top_p=0.9, seed=7)
with LLM() as llm:
    contents = [[picture] * k + [{"type": "text", "text": text}] for text in asked for k in (0, 1)]
    chats = [[{"role": "user", "content": content}] for content in contents]
    outputs = [llm.chat(chats, SamplingParams(**p)) for p in (dict(max_tokens=24, temperature=0), sampled)]
print(json.dumps([list(o.outputs[0].token_ids) for some in outputs for o in some]))
"""
PLAN = ["-m", "hydrainfer", "profile", "llava-next-7b", "--hardware", "h800", "--workload", "textcaps", "--json"]
CASES: dict[str, list[str]] = {
    "tokens": ["-c", TOKENS],
    "plan": [*PLAN, "--devices", "3", "--slo", "ttft=0.4,tpot=0.03"],
    "order": ["-m", "benchmarks.b18_order", "--out", "OUT"],
    "landing": ["-m", "benchmarks.b26_landing", "--out", "OUT"],
    "kinds": ["-m", "benchmarks.b31_elastic", "--out", "OUT"],
    "figures": ["-m", "benchmarks.paper", "fig05", "fig12", "fig14", "--quick", "--fresh", "--out", "OUT"],
}
VOLATILE = {
    "command",
    "date",
    "revision",
    "hardware",
    "versions",
    "environment",
    "settings",
    "seconds",
    "elapsed_s",
    "took_s",
}
SHOWN = 5


def run(tree: Path, arguments: list[str], out: Path) -> Any:
    """What a case printed, or what it wrote to `out`, without what is volatile."""
    command = [sys.executable, *(str(out) if word == "OUT" else word for word in arguments)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "HYDRAINFER_REVISION": "compared"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{tree}: {' '.join(command)[:120]} failed:\n{done.stderr[-2000:]}")
    if "OUT" not in arguments:
        return settled(json.loads(done.stdout))
    if not out.is_dir():
        return settled(json.loads(out.read_text()))
    return {path.name: settled(json.loads(path.read_text())) for path in sorted(out.glob("*.json"))}


def settled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: settled(inner) for key, inner in value.items() if key not in VOLATILE}
    return [settled(inner) for inner in value] if isinstance(value, list) else value


def differences(there: Any, here: Any, path: str = "") -> Iterator[str]:
    """The places at which two documents differ, each with both values."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in sorted(there.keys() | here.keys()):
            yield from differences(there.get(key), here.get(key), f"{path}.{key}")
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for i, (a, b) in enumerate(zip(there, here)):
            yield from differences(a, b, f"{path}[{i}]")
    elif there != here:
        yield f"{path}: {str(there)[:80]} there, {str(here)[:80]} here"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; default: all")
    args = parser.parse_args()
    if unknown := set(args.cases) - CASES.keys():
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    n_different = 0
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, args.revision], cwd=ROOT, check=True)
        try:
            for case in args.cases or CASES:
                there, here = (run(t, CASES[case], Path(folder) / f"{case}-{t is ROOT}.json") for t in (other, ROOT))
                places = list(differences(there, here))
                n_different += len(places)
                print(f"{case}: {f'{len(places)} differences' if places else 'the same'}", *places[:SHOWN], sep="\n  ")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    sys.exit(bool(n_different))


if __name__ == "__main__":
    main()
