"""Figures of results, all alike. Without matplotlib (the `dev` extra) there are none."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLOURS = ("#2f6db3", "#d9822b", "#4a9a5d", "#8a5aa8", "#b5484f", "#6b6f76")
WIDE_LABELS = 32  # characters under one panel, beyond which they are slanted
MAX_TICKS = 12


@dataclass(frozen=True)
class Panel:
    """`series[name][i]`: the repeated measurements of group i."""

    title: str
    groups: list[str]
    series: dict[str, list[list[float]]]


def save_bars(path: Path, title: str, panels: list[Panel]) -> None:
    """One bar per series and group at the median, a dot per measurement."""
    plt = _pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(3.4 * len(panels), 3.4), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        width = 0.8 / len(panel.series)
        for rank, (name, groups) in enumerate(panel.series.items()):
            for i, samples in enumerate(groups):
                if not samples:
                    continue
                x = i + (rank - (len(panel.series) - 1) / 2) * width
                label = name if not any(groups[:i]) else None
                axis.bar(x, statistics.median(samples), width * 0.92, color=COLOURS[rank], alpha=0.75, label=label)
                axis.plot([x] * len(samples), samples, "o", color="black", markersize=2.5, alpha=0.6)
        slanted = {"rotation": 35, "ha": "right"} if len("".join(panel.groups)) > WIDE_LABELS else {}
        axis.set_xticks(range(len(panel.groups)), panel.groups, **slanted)
        axis.set_title(panel.title, fontsize=10)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    if axes[0][0].patches and len(panels[0].series) > 1:
        axes[0][0].legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


@dataclass(frozen=True)
class Curves:
    """One line per series over `x`; `log`: both axes, or only that of `x` with `linear_y`. A value that is not known is
    NaN."""

    title: str
    x_label: str
    y_label: str
    x: list[float]
    series: dict[str, list[float]]
    log: bool = True
    linear_y: bool = False


def save_lines(
    path: Path, title: str, x_label: str, y_label: str, x: list[float], series: dict[str, list[float]], log: bool
) -> None:
    """One line per series over `x`; `log`: both axes."""
    save_curves(path, [Curves(title, x_label, y_label, x, series, log)])


def save_curves(path: Path, panels: list[Curves]) -> None:
    """Lines, panels side by side."""
    plt = _pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 3.4), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        assert len(panel.series) <= len(COLOURS)
        for colour, (name, y) in zip(COLOURS, panel.series.items(), strict=False):
            axis.plot(panel.x, y, "o-", color=colour, label=name)
        if panel.log:
            axis.set_xscale("log", base=2)
            if not panel.linear_y:
                axis.set_yscale("log")
        ticks = panel.x[:: -(-len(panel.x) // MAX_TICKS)]
        axis.set_xticks(ticks, [f"{v:g}" for v in ticks])
        axis.set_xlabel(panel.x_label)
        axis.set_ylabel(panel.y_label)
        axis.set_title(panel.title, fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _pyplot() -> Any:
    """None, said in a line, where there is no matplotlib: a lent machine may lack it."""
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: no figure")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
