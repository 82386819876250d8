"""House rules no other tool checks; run by `make check`.

Files over 450 lines need a reason in `ALLOWED`. Rooms' `__init__` docstrings are at most six lines. None of
`kernels/`, `configs/` and `datasets/` is a package (packages of those names exist elsewhere).
"""

import ast
import subprocess
import sys
from pathlib import Path

LIMIT = 450
ALLOWED: dict[str, str] = {}
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


def complaints() -> list[str]:
    found = []
    for path in tracked("*.py", "*.cpp", "*.cu", "*.h"):
        name, n = str(path.relative_to(ROOT)), len(path.read_text().splitlines())
        if n > LIMIT and name not in ALLOWED:
            found.append(f"{name}: {n} lines, more than {LIMIT}")
    for path in ROOT.glob("hydrainfer/*/__init__.py"):
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        if not 1 <= len(doc.splitlines()) <= 6:
            found.append(f"{path.relative_to(ROOT)}: a room says its job in one to six lines")
    packages = [name for name in ("kernels", "configs", "datasets") if (ROOT / name / "__init__.py").exists()]
    return found + [f"{name}/__init__.py: must not be a package" for name in packages]


if __name__ == "__main__":
    problems = complaints()
    print("\n".join(problems) or "house rules hold")
    sys.exit(bool(problems))
