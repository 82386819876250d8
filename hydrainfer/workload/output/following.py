"""The last line that a command prints: what to run next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text


def next_line(words: Sequence[str], note: str = "") -> str:
    """The next command, `words` quoted for a shell. `note`: what has to be filled in first."""
    note = f"   # {note}" if note else ""
    return f"{shlex.join(words)}{note}"


def say_next(console: Console, words: Sequence[str], note: str = "") -> None:
    """Print the next command, as `next_line` writes it."""
    console.print(Text(f"next: {next_line(words, note)}", style="dim"), soft_wrap=True)
