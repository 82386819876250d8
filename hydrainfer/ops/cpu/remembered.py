"""Measurements of this machine, kept in the user's cache folder.

Each is the least of several timings. Other processes may have slowed a measurement down. Then a process that starts
later, while the machine is quiet, measures again and keeps the smaller times.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch

from hydrainfer.config import cache_folder, keep, locked
from hydrainfer.machine import TICK_S, cpu_name, instruction_sets, processor_s

T = TypeVar("T")

_QUIET_CORES = 0.1  # cores that other processes may use during a measurement that counts as undisturbed
_ENOUGH = 5  # disturbed measurements, after which the machine is not measured again
_LOOK_S = 0.05  # for which the machine is watched before a disturbed measurement is repeated
_STARTED_NS = time.time_ns()


class _Kept(msgspec.Struct, Generic[T], frozen=True):
    """The least times. `n`: the number of measurements, all disturbed by other processes; 0 once one was
    undisturbed."""

    least: T
    n: int


def remembered(
    folder: str, what: tuple, kind: type[T], whole: Callable[[T], bool], measure: Callable[[], T], threads: int | None
) -> T:
    """The stored measurement for `what` on this machine with this many threads (default: torch's current number), or a
    new one, which is stored if the disk has room. `kind`: its type, mappings of seconds. `whole`: whether a stored
    measurement has all that is asked for. Of processes that start together, one measures, and the others wait and take
    its result, disturbed or not."""
    before = torch.get_num_threads()
    threads = threads or before
    key = repr((cpu_name(), instruction_sets(), torch.__version__, threads, what))
    path = cache_folder() / folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    with locked(path):
        kept = _read(path, kind, whole)
        if kept is not None and (kept.n == 0 or kept.n >= _ENOUGH or not _worth_repeating(path)):
            return kept.least
        torch.set_num_threads(threads)
        try:
            measured, quiet = _watched(measure, threads)
        finally:
            torch.set_num_threads(before)
        if kept is not None and not quiet:
            measured = msgspec.convert(_lesser(msgspec.to_builtins(kept.least), msgspec.to_builtins(measured)), kind)
        n = 0 if quiet else kept.n + 1 if kept else 1
        keep(path, msgspec.json.encode(_Kept(measured, n)))
        return measured


def _read(path: Path, kind: type[T], whole: Callable[[T], bool]) -> _Kept[T] | None:
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept[kind])  # type: ignore[valid-type]
    except (OSError, msgspec.DecodeError):
        return None
    return kept if whole(kept.least) else None


def _worth_repeating(path: Path) -> bool:
    """Whether the disturbed measurement is older than this process, and a new one would be undisturbed."""
    return path.stat().st_mtime_ns < _STARTED_NS and _watched(lambda: time.sleep(_LOOK_S), 1)[1]


def _watched(measure: Callable[[], T], threads: int) -> tuple[T, bool]:
    """The measurement with this many threads, and whether nothing else disturbed it. The measurement's own time is that
    of the calling thread if it is the only one; else the process's time, up to `threads` cores. Other threads of this
    process, such as instances that load, can disturb it too."""
    clock = time.thread_time if threads == 1 else time.process_time
    busy, own_s, start_s = processor_s(), clock(), time.perf_counter()
    measured = measure()
    took_s, own_s, after = time.perf_counter() - start_s, clock() - own_s, processor_s()
    if busy is None or after is None:
        return measured, True
    own_s = min(own_s, threads * took_s)
    return measured, sum(after) - sum(busy) - own_s <= _QUIET_CORES * took_s + 2 * TICK_S


def _lesser(a: Any, b: Any) -> Any:
    return {key: _lesser(a[key], b[key]) for key in a} if isinstance(a, dict) else min(a, b)
