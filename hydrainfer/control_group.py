"""The limits that a container, or another control group of Linux, sets to this process: versions 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NO_GROUP = Path("/")


class Memory(NamedTuple):
    """Bytes, infinite without a limit. `free`: how much of the limit is left, counting the pages of files that the
    system can drop."""

    limit: float
    free: float


def cpus(root: Path = _NO_GROUP) -> float:
    """The CPU time per second that the process may use; infinite without a limit. `root`: where /proc and /sys are."""
    quotas = [math.inf]
    for group in _groups("cpu", root):
        both = _words(group / "cpu.max")  # version 2: "200000 100000" or "max 100000"
        quota, period = both if len(both) == 2 else (_number(group / f"cpu.cfs_{n}_us") for n in ("quota", "period"))
        if 0 < float(quota) < math.inf:  # -1: no limit
            quotas.append(float(quota) / float(period))
    return min(quotas)


def memory(root: Path = _NO_GROUP) -> Memory:
    """The least limit and the least free memory of the process's group and those around it."""
    least = Memory(math.inf, math.inf)
    for group in _groups("memory", root):
        for limit_in, used_in, droppable in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _number(group / limit_in)
            stat = dict(zip(*[iter(_words(group / "memory.stat"))] * 2))
            used = _number(group / used_in) - float(stat.get(droppable, 0)) if math.isfinite(limit) else 0.0
            least = Memory(min(least.limit, limit), min(least.free, max(0.0, limit - used)))
    return least


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of the process's group for this controller and of the groups around it. A container may see only the
    outermost of them."""
    mounted = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mounted / controller if controllers else mounted
        group = top / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder == top or top in folder.parents)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # no such group, version or system
        return ""


def _words(file: Path) -> list[str]:
    return ["inf" if word == "max" else word for word in _read(file).split()]


def _number(file: Path) -> float:
    return float(next(iter(_words(file)), "inf"))
