"""How old the results are that documents quote: the commits since, that touched what they measure.

    python -m tests.ages        prints all of them

Called by `tests/house.py`. A clone without the history cannot know, and says so. Figures of a GPU cannot be measured
again at will: documents quote them with their revision, and they are not looked at here.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST = 150
SERVING = ("engine", "scheduler", "runtime", "models", "ops", "server")
ROOMS: dict[str, tuple[str, ...]] = {
    "b01": SERVING,
    "b02": ("scheduler", "cache", "core"),
    "b03": ("engine", "scheduler", "runtime"),
    "b04": ("workload",),
    "b05": ("engine", "scheduler", "runtime"),
    "b06": ("models", "ops", "runtime"),
    "b07": ("storage",),
    "b08": ("engine", "storage", "cluster"),
    "b09": ("engine", "cluster", "storage"),
    "b10": ("cluster", "engine"),
    "b11": ("processor",),
    "b12": ("processor",),
    "b13": ("models", "runtime"),
    "b14": ("planner", "engine", "scheduler"),
    "b15": ("planner", "engine", "scheduler"),
    "b16": ("planner",),
    "b17": ("server", "processor"),
    "b18": ("scheduler",),
    "b19": ("server",),
    "b20": ("scheduler", "cache", "cluster"),
    "b21": ("grammar", "runtime"),
    "b22": ("judging", "workload"),
    "b23": ("planner", "judging"),
    "b24": ("planner",),
    "b25": ("server", "processor"),
    "b26": ("scheduler", "engine", "planner"),
    "b27": ("grammar", "server"),
    "b28": ("server",),
    "b29": SERVING,
    "b30": ("cache", "scheduler"),
    "b31": ("cache", "scheduler"),
}
"""What each experiment measures."""
_B01 = (
    "amx_bfloat16",
    "amx_float32",
    "avx2_int8_beside",
    "poisson_slice",
    "poisson_slo",
    "side_by_side",
    "zen4_float32",
)
TOO_OLD = frozenset({"b14", "b15", *(f"b01_{name}" for name in _B01)})
"""Results that are known to be too old, and wait to be measured again; those of b01 on a processor with AMX, on one
with AVX2 alone, on a Zen 4, on a Zen 5, and with random arrival times. The house asks for no more of them."""


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def quoted() -> set[str]:
    """The names of the results that documents quote, as `b07` or `b07_transports`."""
    text = "".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    return set(re.findall(r"\b(b\d\d(?:_[a-z0-9_]+)?)\b", text)) - {"b00"}


def ages() -> Iterator[tuple[str, int]]:
    """The age of the newest result of each quoted name."""
    for name in sorted(quoted()):
        files = sorted((ROOT / "benchmarks/results").glob(f"{name}*.json"))
        if not files or name[:3] not in ROOMS:
            continue
        measured = git("log", "-1", "--format=%H", "--", *map(str, files))
        rooms = [f"hydrainfer/{room}" for room in ROOMS[name[:3]]]
        yield name, int(git("rev-list", "--count", f"{measured}..HEAD", "--", *rooms))


def complaints() -> list[str]:
    if git("rev-parse", "--is-shallow-repository") == "true":
        print("the clone is shallow: the age of quoted results is not known")
        return []
    return [
        f"the result {name} is quoted, but {age} commits have touched what it measures; measure it again"
        for name, age in ages()
        if age > MOST and name not in TOO_OLD
    ]


if __name__ == "__main__":
    print("\n".join(f"{age:5} {name}" for name, age in sorted(ages(), key=lambda item: -item[1])))
