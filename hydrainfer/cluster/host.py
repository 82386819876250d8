"""Which machine this is."""

from __future__ import annotations

import os
from pathlib import Path


def host_identity() -> str:
    """Equal for two processes that share memory, process ids and the monotonic clock."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
