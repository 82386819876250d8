"""The machine that this process runs on: which one it is, what it has, and how busy it is.

Most of it is known on Linux only (/proc); elsewhere the functions say so.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

_INSTRUCTION_SETS = (
    *("avx2", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
)

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
"""The unit of processor times in /proc."""


_SPIN = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "1"}


def let_threads_spin() -> None:
    """Have OpenMP's threads wait for each other awake for a moment (some 0.1 ms; 1 ms with Intel's runtime) before they
    sleep, unless `OMP_WAIT_POLICY` says otherwise: a decode step has some hundred waits, and to sleep and to be woken
    costs more than most of them last. For this process and those it starts; call it before torch is imported.

    Once it has more threads than there are cores, GCC's runtime spins a third as long, if the policy is ACTIVE.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ |= {k: v for k, v in _SPIN.items() if k not in os.environ}


def host_identity() -> str:
    """A name that is equal in two processes if they share memory, process ids and the monotonic clock."""
    try:
        boot, namespace = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux: nothing is shared between processes
        boot, namespace = socket.gethostname(), str(os.getpid())
    return hashlib.blake2b((boot + namespace).encode(), digest_size=8).hexdigest()


def local_ip(address: str) -> str:
    """The address of this machine on the way to `address` (tcp://host:port)."""
    url = urlsplit(address)
    with socket.socket(socket.AF_INET6 if ":" in (url.hostname or "") else socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((url.hostname, url.port))  # sends nothing
        return s.getsockname()[0]


def cpuinfo() -> dict[str, str]:
    """The first processor in /proc/cpuinfo; empty where there is no such file."""
    info = Path("/proc/cpuinfo")
    first = info.read_text().partition("\n\n")[0] if info.exists() else ""
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def cpu_name() -> str:
    return cpuinfo().get("model name") or platform.processor() or "unknown"


def instruction_sets() -> tuple[str, ...]:
    """The vector and matrix instructions that matter here, as /proc/cpuinfo calls them, narrowest first; empty where
    there is no such file."""
    flags = cpuinfo().get("flags", "").split()
    return tuple(name for name in _INSTRUCTION_SETS if name in flags)


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Python, the kernel, and those of `packages` that are installed."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def processor_s() -> tuple[float, float] | None:
    """Seconds for which cores of this machine have been busy since it started, and for which its host took them away;
    None where it does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _disk, irq, softirq, stolen = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq) * TICK_S, stolen * TICK_S  # equal counts are equal times: sum ticks


def busy_cores(seconds: float) -> float:
    """Mean cores in use for the next `seconds`; 0 where the machine does not say."""
    before, begin_s = processor_s(), time.perf_counter()
    time.sleep(seconds)
    after = processor_s()
    if before is None or after is None:
        return 0.0
    return (after[0] - before[0]) / (time.perf_counter() - begin_s)
