"""The places of files that ship with the code: `kernels/` and `configs/`."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped(folder: str) -> Path:
    """The path of `kernels` or `configs`: inside the package in an installation (setup.py puts them there), beside it
    in the source tree."""
    inside = _PACKAGE / "_data" / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def here_or_shipped(path: Path) -> Path:
    """The path with `~` expanded. A path like `configs/layouts/1epd.yaml`, as in the documentation, is the shipped file
    if the working directory has none."""
    path = path.expanduser()
    if path.parts[:1] == ("configs",) and not path.exists():
        return shipped("configs").joinpath(*path.parts[1:])
    return path
