"""What a transport says of itself: `Way`. Every file of a transport ends with one, and `places.WAYS` has them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from hydrainfer.core import ExportHandle
from hydrainfer.storage.store import BlockStore
from hydrainfer.storage.transport import TIMEOUT_S, CopyBlocks, LocalExports, Transport
from hydrainfer.storage.two_sided import Backend


class ProcessPlace(NamedTuple):
    """The identity of a process. `host`: equal for processes that see each other's /proc (same boot and pid namespace).
    `process`: pid and start time."""

    host: str
    process: str


class Tools(NamedTuple):
    """What a process has for its transports. `secret`: the cluster's. `local`: the stores of this process that are
    read within it. `timeout_s`: of a copy without progress. `copy_blocks`: the kernel that copies scattered blocks, if
    there is one."""

    secret: bytes = b""
    local: LocalExports | None = None
    timeout_s: float = TIMEOUT_S
    copy_blocks: CopyBlocks | None = None


class Way(NamedTuple):
    """One transport.

    `check(device)`: why caches on this device cannot be copied so, with what to use instead; "" if they can.
    `offer(key, store, tools)`: the address by which peers read a store; `ConfigError` if that is impossible here. None:
    peers ask the instance's `BlockServer`. `reaches(source, place, device)`: why a process at `place` with caches on
    `device` can read what `source` offers; "" if it cannot. `open(tools)`: the reading side. `usual`: whether "auto"
    offers it. `maps`: whether peers map the memory, so that reads cannot be refused. `within`, `between`: whether it is
    for instances of one process, of several. `backend`: of transfers by a process group.
    """

    name: str
    check: Callable[[torch.device], str]
    offer: Callable[[str, BlockStore, Tools], str] | None
    reaches: Callable[[ExportHandle, ProcessPlace, torch.device], str]
    open: Callable[[Tools], Transport]
    usual: bool = True
    maps: bool = True
    within: bool = True
    between: bool = True
    backend: Backend | None = None


def anywhere(source: ExportHandle, place: ProcessPlace, device: torch.device) -> str:  # noqa: ARG001
    """`Way.reaches` over sockets."""
    return "other host" if source.host != place.host else "no shorter way"


def on_cpu(name: str, twin: str) -> Callable[[torch.device], str]:
    """`Way.check` of a transport whose `twin` is for CUDA."""

    def check(device: torch.device) -> str:
        if device.type == "cpu":
            return ""
        return f"transport {name} needs caches on the CPU, they are on {device.type}; use {twin} or auto"

    return check


def on_cuda(name: str, twin: str) -> Callable[[torch.device], str]:
    """`Way.check` of a transport whose `twin` is for CPUs."""

    def check(device: torch.device) -> str:
        if device.type == "cuda":
            return ""
        return f"transport {name} needs caches on CUDA, they are on {device.type}; use {twin} or auto"

    return check
