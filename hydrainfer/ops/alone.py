"""Work on a GPU of which a process does one piece at a time.

CUDA and torch allow one capture in a process. A wait for the whole device, which also begins every capture, breaks one
that is under way in another thread, whatever its mode.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_ALONE = threading.RLock()


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other thread is in here."""
    with _ALONE:
        yield


def settle(device: torch.device) -> None:
    """Wait for the work of the current stream, while nobody captures. Other streams do not wait for the current one by
    themselves."""
    if device.type == "cuda":
        with alone():
            torch.cuda.current_stream(device).synchronize()
