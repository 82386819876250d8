"""Figures of the paper's kind. Needs matplotlib (the `dev` extra)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.figure import COLOURS

__all__ = ["COLOURS", "METHOD_COLOURS", "figure"]

METHOD_COLOURS = {
    "EPD": "#6b6f76",
    "EP+D": "#2f6db3",
    "ED+P": "#d9822b",
    "E+PD": "#8a5aa8",
    "E+P+D": "#4a9a5d",
    "none": "#ffffff",
}


@contextmanager
def figure(path: Path, title: str, rows: int, columns: int, width: float = 3.6, height: float = 3.0) -> Iterator[Any]:
    """A grid of axes, saved at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    drawing, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
    yield axes
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    drawing.suptitle(title, fontsize=11)
    drawing.tight_layout()
    drawing.savefig(path, dpi=110)
    plt.close(drawing)
