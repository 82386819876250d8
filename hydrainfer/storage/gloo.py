"""Gloo as a backend of `two_sided`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from hydrainfer.storage.two_sided import Backend, TwoSidedTransport
from hydrainfer.storage.way import Way, anywhere, on_cpu


def _make(store: dist.Store, rank: int, host: str, stall_s: float) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # not in torch's stub
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 1
    options._timeout = timedelta(seconds=stall_s)
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _finish(works: list[Any], group: Any, device: torch.device, timeout_s: float) -> None:  # noqa: ARG001
    for work in works:
        work.wait()


def _check(device: torch.device) -> str:
    wrong = on_cpu("gloo", twin="nccl")(device)
    return wrong or (
        "" if dist.is_gloo_available() else "this torch has no Gloo; use transport tcp, shared-memory or auto"
    )


GLOO = Backend("gloo", _make, _finish)
WAY = Way(
    "gloo",
    check=_check,
    offer=None,
    reaches=anywhere,
    open=lambda tools: TwoSidedTransport(GLOO, tools.secret, tools.timeout_s),
    usual=False,
    maps=False,
    backend=GLOO,
)
