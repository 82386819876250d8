"""Waiting for what must come. A machine may stand still for a while: so a test gives up late, and asks in which order
things happened rather than how long they took."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 50.0  # less than the least time limit of a test


def wait_until(
    condition: Callable[[], object], patience_s: float = PATIENCE_S, say: Callable[[], object] = lambda: None
) -> None:
    """Return as soon as `condition()` is true. `say`: what a failure shows."""
    end_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end_s, f"this did not happen in {patience_s:g} s: {say()}"
        time.sleep(0.002)
