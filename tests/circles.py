"""Circles of files: which files of the package import each other in a ring, imports for types and within functions
included. Run by `tests/house.py`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "hydrainfer"


def module_of(path: Path, root: Path = ROOT) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: set[str]) -> Iterator[str]:
    """The modules among `modules` that a file names in its imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in modules else node.module


def circles(root: Path = ROOT) -> list[list[str]]:
    """Every set of files that reach each other by imports, by Tarjan's algorithm; sorted by name."""
    paths = {module_of(path, root): path for path in root.rglob("*.py")}
    edges = {module: sorted(set(imports_of(path, set(paths)))) for module, path in paths.items()}
    sys.setrecursionlimit(10_000)  # a path may pass every file
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for other in edges[module]:
            if other not in number:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], number[other])
        if low[module] == number[module]:
            ring = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(ring) > 1:
                found.append(sorted(ring))

    for module in sorted(edges):
        if module not in number:
            visit(module)
    return sorted(found)
