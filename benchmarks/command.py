"""What the commands of all experiments have in common: options, what they print on, tables, and how they fail."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.servers import QUIET_CORES, ServerFailed

WIDTH = 160  # of what is written to a file


def options(doc: str | None) -> argparse.ArgumentParser:
    """A parser with `--out`, whose help begins with the experiment's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the file to write; default: benchmarks/results/NAME.json")
    return parser


def new_console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def new_table(title: str, columns: Iterable[str]) -> Table:
    """A table without rows; all columns but the first are numbers."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def say_noise(console: Console, cores: float) -> None:
    """Warn if other processes took more than `QUIET_CORES` meanwhile."""
    if cores > QUIET_CORES:
        console.print(f"not quiet: other processes took up to {cores:.2f} cores", style="red")


@contextlib.contextmanager
def told(console: Console) -> Iterator[None]:
    """A server or a command that fails within ends the experiment with a line that says why, and status 1."""
    try:
        yield
    except (ServerFailed, OSError, subprocess.CalledProcessError) as e:
        console.print(str(e), style="red", markup=False, soft_wrap=True)
        sys.exit(1)
