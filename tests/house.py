"""House rules no other tool checks; run by `make check`.

Files over 450 lines need a reason in `ALLOWED`. No files of the package import each other in a circle, and no
document quotes a result from long ago (`ages.py`). Rooms' `__init__` docstrings are at most six lines. None of
`kernels/`, `configs/` and `datasets/` is a package (packages of those names exist elsewhere). Options, scripts and
links that documents name are there.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hydrainfer.benching.vllm_names import NAMES as BENCH
from hydrainfer.config.vllm_names import NAMES
from tests import ages, circles, models_page, options_page, readme_page, vllm_page

LIMIT = 450
ALLOWED: dict[str, str] = {}
OTHERS = {"build_arg", "shm_size", "nproc_per_node", "hydrainfer_flags"}  # of Docker, torchrun; b01 composes it
ROOT = Path(__file__).parent.parent


def tracked(*patterns: str) -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    return [ROOT / n for n in names if n and (ROOT / n).exists()]


def not_there() -> Iterator[str]:
    """The names in documents of what is nowhere: options, scripts by the end of their path, experiments, links."""
    mock = ROOT / "tests" / "workload" / "mock.py"  # documents say how to start it
    code = [path for path in tracked("*.py", "*.sh") if ROOT / "tests" not in path.parents or path == mock]
    ends = "".join(f"/{path.relative_to(ROOT)}\n" for path in tracked("*.py", "*.sh", "*.md"))
    text = "".join(path.read_text() for path in code)
    options = set(re.findall(r"\b(\w+): |\bargs\.(\w+)|--([a-z][\w-]+)", text))
    options = {name.replace("-", "_") for found in options for name in found}
    others = OTHERS | NAMES.keys() | BENCH.keys()
    for path in tracked("*.md"):
        document = path.read_text()
        said = {o.replace("-", "_") for o in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", document)}
        missing = [f"--{o.replace('_', '-')}" for o in said - others if {o, o.removeprefix("no_")}.isdisjoint(options)]
        missing += [n for n in re.findall(r"`([\w./-]+\.(?:py|sh|md))`", document) if f"/{n}\n" not in ends]
        missing += [b for b in re.findall(r"`(b\d\d)`", document) if f"/{b}_" not in ends]
        missing += [n for n in re.findall(r"\]\((?!https?:)([^)#\s]+)", document) if not (path.parent / n).exists()]
        yield from (f"{path.relative_to(ROOT)}: there is no {name}" for name in sorted(set(missing)))


def complaints() -> list[str]:
    found = list(not_there())
    for made in (options_page, models_page, readme_page, vllm_page):
        page = made.PAGE.read_text()
        if made.written(page) != page:
            found.append(f"{made.PAGE.relative_to(ROOT)}: not what the code says; run python -m {made.__name__}")
    for path in tracked("*.py", "*.cpp", "*.cu", "*.h"):
        name, n = str(path.relative_to(ROOT)), len(path.read_text().splitlines())
        if n > LIMIT and name not in ALLOWED:
            found.append(f"{name}: {n} lines, more than {LIMIT}")
    for path in ROOT.glob("hydrainfer/*/__init__.py"):
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        if not 1 <= len(doc.splitlines()) <= 6:
            found.append(f"{path.relative_to(ROOT)}: a room says its job in one to six lines")
    found += ages.complaints()
    found += [f"files import each other in a circle: {', '.join(ring)}" for ring in circles.circles()]
    packages = [name for name in ("kernels", "configs", "datasets") if (ROOT / name / "__init__.py").exists()]
    return found + [f"{name}/__init__.py: must not be a package" for name in packages]


if __name__ == "__main__":
    problems = complaints()
    print("\n".join(problems) or "house rules hold")
    sys.exit(bool(problems))
