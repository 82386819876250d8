"""The place of this process, and the table of transports by which it can read from a peer."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hydrainfer.core import ConfigError, ExportHandle
from hydrainfer.machine import host_identity
from hydrainfer.storage import cuda_ipc, gloo, local, nccl, shared_memory, tcp
from hydrainfer.storage.way import ProcessPlace, Way

WAYS: dict[str, Way] = {module.WAY.name: module.WAY for module in (local, shared_memory, cuda_ipc, tcp, gloo, nccl)}
"""The transports by name, the best first."""


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
    reasons = {name: way.reaches(source, place, device) for name, way in WAYS.items() if name in source.ways}
    return [(name, why) for name, why in reasons.items() if why]


def check_transport(name: str, device: torch.device) -> None:
    """Check that this transport, or "auto", can copy caches on `device`. Raises `ConfigError` with alternatives."""
    if name == "auto":
        return
    if name not in WAYS:
        raise _wrong(f"transport {name!r} is unknown; use one of {', '.join(['auto', *WAYS])}")
    problem = WAYS[name].check(device)
    if problem:
        raise _wrong(problem)


def check_within(name: str) -> None:
    """Check that instances of one process can use the transport. Raises `ConfigError`."""
    if name != "auto" and not WAYS[name].within:
        raise _wrong(f"transport {name} is for instances in processes of their own; use local or auto")


def check_between(name: str) -> None:
    """Check that instances in separate processes can use the transport. Raises `ConfigError`."""
    if name != "auto" and not WAYS[name].between:
        raise _wrong(
            f"transport {name} is for instances in one process: add --launcher inproc, or use shared-memory or auto"
        )


def needs_shared(name: str, device: torch.device) -> bool:
    """Whether stores for this transport must be made with `shared=True`."""
    return device.type == "cpu" and name in ("auto", shared_memory.WAY.name)


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, param="transport")
