"""Measurements of this machine, made once and kept in the user's cache folder."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable
from typing import TypeVar

import msgspec
import torch

from hydrainfer.config import cache_folder
from hydrainfer.machine import cpu_name, instruction_sets

T = TypeVar("T")


def remembered(
    folder: str, what: tuple, kind: type[T], whole: Callable[[T], bool], measure: Callable[[], T], threads: int | None
) -> T:
    """What was measured before for `what` on this machine with this many threads (default: torch's present number), or
    now. `whole` says whether what is kept has all that is asked for. Of processes that start together one measures
    and the others wait."""
    before = torch.get_num_threads()
    threads = threads or before
    key = repr((cpu_name(), instruction_sets(), torch.__version__, threads, what))
    path = cache_folder() / folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    path.parent.mkdir(exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=kind)
            if whole(kept):
                return kept
        except (OSError, msgspec.DecodeError):
            pass
        torch.set_num_threads(threads)
        try:
            measured = measure()
        finally:
            torch.set_num_threads(before)
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(measured))
        part.replace(path)
        return measured
