"""Measurements of this machine, kept in the user's cache folder.

They are the least of several times. What else ran on the machine may have kept it from reaching them: then the next
start measures again, and the lesser times are kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch

from hydrainfer.config import cache_folder
from hydrainfer.machine import TICK_S, cpu_name, instruction_sets, processor_s

T = TypeVar("T")

_QUIET_CORES = 0.1  # that others used meanwhile
_ENOUGH = 5  # measurements on a machine that is never quiet


class _Kept(msgspec.Struct, Generic[T], frozen=True):
    """Least times. `n`: how often they were measured while others used the machine; 0 once they did not."""

    least: T
    n: int


def remembered(
    folder: str, what: tuple, kind: type[T], whole: Callable[[T], bool], measure: Callable[[], T], threads: int | None
) -> T:
    """The earlier measurement for `what` on this machine with this many threads (default: torch's present number), or
    now. `kind` holds seconds in mappings. `whole` says whether what is kept has all that is asked for. Of processes
    that start together one measures and the others wait."""
    before = torch.get_num_threads()
    threads = threads or before
    key = repr((cpu_name(), instruction_sets(), torch.__version__, threads, what))
    path = cache_folder() / folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    path.parent.mkdir(exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = _read(path, kind, whole)
        if kept is not None and (kept.n == 0 or kept.n >= _ENOUGH):
            return kept.least
        torch.set_num_threads(threads)
        try:
            measured, quiet = _watched(measure)
        finally:
            torch.set_num_threads(before)
        if kept is not None and not quiet:
            measured = msgspec.convert(_lesser(msgspec.to_builtins(kept.least), msgspec.to_builtins(measured)), kind)
        n = 0 if quiet else kept.n + 1 if kept else 1
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(_Kept(measured, n)))
        part.replace(path)
        return measured


def _read(path: Path, kind: type[T], whole: Callable[[T], bool]) -> _Kept[T] | None:
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept[kind])  # type: ignore[valid-type]
    except (OSError, msgspec.DecodeError):
        return None
    return kept if whole(kept.least) else None


def _watched(measure: Callable[[], T]) -> tuple[T, bool]:
    """The measurement, and whether other processes left the machine to it meanwhile."""
    busy, own_s, start_s = processor_s(), time.process_time(), time.perf_counter()
    measured = measure()
    took_s, own_s, after = time.perf_counter() - start_s, time.process_time() - own_s, processor_s()
    if busy is None or after is None:
        return measured, True
    return measured, sum(after) - sum(busy) - own_s <= _QUIET_CORES * took_s + 2 * TICK_S


def _lesser(a: Any, b: Any) -> Any:
    return {key: _lesser(a[key], b[key]) for key in a} if isinstance(a, dict) else min(a, b)
