"""The place of this process, and the transports by which it can read from a peer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from hydrainfer.core import ConfigError, ExportHandle
from hydrainfer.machine import host_identity

TRANSPORTS = ("auto", "local", "shared-memory", "gloo", "nccl", "cuda-ipc", "tcp")
OVER_SERVER = ("tcp", "gloo", "nccl")  # these need a block server


class ProcessPlace(NamedTuple):
    """The identity of a process. `host`: equal for processes that see each other's /proc (same boot and pid namespace).
    `process`: pid and start time."""

    host: str
    process: str


def here() -> ProcessPlace:
    try:
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:  # not Linux
        started = ""
    return ProcessPlace(host_identity(), f"{os.getpid()}:{started}")


def device_name(device: torch.device) -> str:
    """The device's name, which is the same in every process: cpu, or cuda:UUID."""
    return "cpu" if device.type == "cpu" else f"cuda:{torch.cuda.get_device_properties(device).uuid}"


def ways_here(source: ExportHandle, place: ProcessPlace, device: torch.device) -> list[tuple[str, str]]:
    """The usable transports among those that a peer's handle offers, as (transport, reason), the best first."""
    found = []
    if source.process == place.process and source.host == place.host:
        found.append(("local", "same process"))
    if source.host == place.host and source.device == device.type == "cpu":
        found.append(("shared-memory", "same host"))
    if source.host == place.host and source.device.startswith("cuda") and device.type == "cuda":
        found.append(("cuda-ipc", "same host, both on CUDA"))
    found += [(name, "other host" if source.host != place.host else "no shorter way") for name in OVER_SERVER]
    return [(name, why) for name, why in found if name in source.ways]


def check_transport(name: str, device: torch.device) -> None:
    """Check that this transport can copy caches on `device`. Raises `ConfigError` with alternatives."""
    if name not in TRANSPORTS:
        raise _wrong(f"transport {name!r} is unknown; use one of {', '.join(TRANSPORTS)}")
    if name in ("nccl", "cuda-ipc") and device.type != "cuda":
        twin = "gloo" if name == "nccl" else "shared-memory"
        raise _wrong(f"transport {name} needs caches on CUDA, they are on {device.type}; use {twin} or auto")
    if name == "nccl" and not torch.distributed.is_nccl_available():
        raise _wrong("this torch has no NCCL; use transport tcp, cuda-ipc or auto")
    if name in ("shared-memory", "gloo") and device.type != "cpu":
        twin = "nccl" if name == "gloo" else "cuda-ipc"
        raise _wrong(f"transport {name} needs caches on the CPU, they are on {device.type}; use {twin} or auto")
    if name == "gloo" and not torch.distributed.is_gloo_available():
        raise _wrong("this torch has no Gloo; use transport tcp, shared-memory or auto")


def needs_shared(name: str, device: torch.device) -> bool:
    """Whether stores for this transport must be made with `shared=True`."""
    return device.type == "cpu" and name in ("auto", "shared-memory")


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, param="transport")
