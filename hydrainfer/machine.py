"""The machine that this process runs on: its identity, its hardware, and its load.

Most of this is known only on Linux, from /proc. Elsewhere the functions return empty values, None or 0.
"""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from hydrainfer import control_group

_INSTRUCTION_SETS = (
    *("avx2", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
)

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
"""The unit of processor times in /proc."""

_MOST_FILES = 1 << 20
"""Where the hard limit is a thousand million, as in some containers, some programs go through all numbers."""
_SPIN = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "1"}
_COMPILED = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}


def let_threads_spin() -> None:
    """Let OpenMP threads spin for a moment (about 0.1 ms; 1 ms with Intel's runtime) before they sleep, unless
    `OMP_WAIT_POLICY` is set. A decode step has about a hundred waits, most of which are shorter than it takes to sleep
    and wake up. Applies to this process and those it starts; call it before torch is imported.

    If there are more threads than cores and the policy is ACTIVE, GCC's runtime spins a third as long.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ |= {k: v for k, v in _SPIN.items() if k not in os.environ}


def limit_compiled_products() -> None:
    """Let oneDNN, and torch above it, keep the code of 128 matrix products, half a MiB each, instead of 1,024.
    Products have as many shapes as prompts have lengths (`ops.stepping`); one that was dropped is compiled again in
    about a millisecond. Variables that are set stay as they are. Applies as `let_threads_spin` does.
    """
    os.environ |= {k: v for k, v in _COMPILED.items() if k not in os.environ}


def host_identity() -> str:
    """A name that is equal in two processes if they can share memory, process ids and the monotonic clock."""
    try:
        boot, namespace = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux: nothing is shared between processes
        boot, namespace = socket.gethostname(), str(os.getpid())
    return hashlib.blake2b((boot + namespace).encode(), digest_size=8).hexdigest()


def local_ip(address: str) -> str:
    """The IP address from which this machine reaches `address` (tcp://host:port)."""
    url = urlsplit(address)
    with socket.socket(socket.AF_INET6 if ":" in (url.hostname or "") else socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((url.hostname, url.port))  # sends nothing
        return s.getsockname()[0]


def in_url(ip: str) -> str:
    """An IP address as part of a URL: IPv6 in brackets."""
    return f"[{ip}]" if ":" in ip and not ip.startswith("[") else ip


def cpuinfo() -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo; empty if there is no such file."""
    info = Path("/proc/cpuinfo")
    first = info.read_text().partition("\n\n")[0] if info.exists() else ""
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def cpu_name() -> str:
    return cpuinfo().get("model name") or platform.processor() or "unknown"


def instruction_sets() -> tuple[str, ...]:
    """The vector and matrix instruction sets that matter here, by their names in /proc/cpuinfo, narrowest first; empty
    if there is no such file."""
    flags = cpuinfo().get("flags", "").split()
    return tuple(name for name in _INSTRUCTION_SETS if name in flags)


def n_cores() -> int:
    """The number of cores that this process may use: those of its affinity, at most the CPUs of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, control_group.cpus())))


def memory_bytes() -> int:
    """The memory of this machine, or the limit of this process's control group if that is less."""
    return int(min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), control_group.memory().limit))


def free_memory_bytes() -> int:
    """The memory that processes can still take here without swapping, by the system and by this process's control
    group."""
    info = Path("/proc/meminfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            break
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min(free, control_group.memory().free))


def raise_open_files() -> int:
    """Let this process, and those that it starts, open as many files as the operator allows: the soft limit becomes the
    hard one, or `_MOST_FILES` if that is less. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def n_open_files() -> int:
    """The files and sockets that this process has open."""
    return len(os.listdir("/proc/self/fd"))


def mps_folder() -> Path | None:
    """The folder of CUDA's Multi-Process Service, without which processes take turns on a GPU; None if none runs."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return folder if (folder / "control").exists() else None


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python, the kernel, and those of `packages` that are installed."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def processor_s() -> tuple[float, float] | None:
    """The core seconds since this machine started in which cores were busy, and in which the host took them away
    (steal time); None if unknown."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _disk, irq, softirq, stolen = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq) * TICK_S, stolen * TICK_S  # equal counts are equal times: sum ticks


def busy_cores(seconds: float) -> float:
    """The mean number of busy cores during the next `seconds`; 0 if unknown."""
    before, begin_s = processor_s(), time.perf_counter()
    time.sleep(seconds)
    after = processor_s()
    if before is None or after is None:
        return 0.0
    return (after[0] - before[0]) / (time.perf_counter() - begin_s)
