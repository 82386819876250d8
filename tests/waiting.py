"""Waiting for what must come. A machine may stand still for a while: so a test gives up late, and asks in which order
things happened rather than how long they took."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 25.0
"""How long a test waits. The server gives up what stalls after 30 s, so a test that waited longer could not fail."""
SOON_S = 12.0
"""The same where the cluster would help itself: after 15 s (`Pulse.handover_s`) or 20 s (`dead_s`, `patience_s`)."""
HELD_S = 100.0
"""How long a test holds something up, until it lets go itself: longer than it waits for what goes on meanwhile."""


def wait_until(
    condition: Callable[[], object], patience_s: float = PATIENCE_S, say: Callable[[], object] = lambda: None
) -> None:
    """Return as soon as `condition()` is true. `say`: what a failure shows."""
    end_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end_s, f"this did not happen in {patience_s:g} s: {say()}"
        time.sleep(0.002)
