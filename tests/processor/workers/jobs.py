"""Things a picture could do to the process that decodes it. Workers find them here by name."""

import ctypes
import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np

from hydrainfer.core import MediaError
from hydrainfer.processor.pictures.adapter import InnerText, MediaItem
from hydrainfer.processor.workers.prepare import Encodable

ITEM = MediaItem(9, (1, 2, 3), (4, 5), inner=(InnerText("row", (3, 6), 2),))


def echo(part, *args):
    """Its bytes as an array."""
    return (Encodable(MediaItem(len(part.source)), part.source[:32], np.frombuffer(part.source, np.uint8)),)


def nap(part, until, trace):
    """Until there is a file of that name, if any."""
    _write(trace, part.source + b"\n")
    while until is not None and not os.path.exists(until):
        time.sleep(0.01)
    return echo(part)


def stuck(part, trace=None):
    """Deaf to everything but SIGKILL. `trace` gets its process id."""
    _write(trace, str(os.getpid()).encode())
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    while True:
        time.sleep(60)


def dies(part, trace=None):
    _write(trace, b"x")
    os.kill(os.getpid(), signal.SIGSEGV)


def dies_once(part, trace):
    if not os.path.exists(trace):
        dies(part, trace)
    return echo(part)


def eats_memory(part, n_bytes):
    """Returns only if it gets it."""
    pages = bytearray(n_bytes)
    pages[::4096] = bytes(range(256)) * (n_bytes // 4096 // 256)
    return echo(part)


def refuses(part):
    raise MediaError("not like this", param=part.param, code="taste")


def breaks(part):
    raise ZeroDivisionError(part.source)


def talks(part):
    """In every way that a library may."""
    print("said by print")
    print("said to stderr", file=sys.stderr)
    warnings.warn(f"said by warning {part.source!r}", stacklevel=1)
    logging.getLogger("PIL.Image").error("said by a library's log")
    ctypes.CDLL(None).puts(b"said in C")
    ctypes.CDLL(None).fflush(None)
    os.write(1, b"said to 1")
    os.write(2, b"said to 2")
    return echo(part)


def big(part, n_bytes):
    return (Encodable(ITEM, b"k", np.arange(n_bytes, dtype=np.uint8).reshape(2, -1)),) * 2


def _write(trace, data):
    if trace is not None:
        with Path(trace).open("ab") as f:
            f.write(data)
