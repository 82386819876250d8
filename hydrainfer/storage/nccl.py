"""NCCL as a backend of `two_sided`, for trusted networks only: NCCL's own connections are not authenticated."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from hydrainfer.storage.transport import TransportError
from hydrainfer.storage.two_sided import Backend, TwoSidedTransport
from hydrainfer.storage.way import Way, anywhere, on_cuda

_POLL_S = 20e-6
_FIRST_S = 30  # the first communicator takes seconds to load libraries and detect how GPUs are connected
_CHANNELS = 8  # of a communicator; each takes megabytes of buffers, and a copy has only two ranks
_NEVER = timedelta(days=365)
# A failed copy must not end the process, which is what torch's watchdog does by default; we abort groups ourselves.
_WATCHDOG_OFF = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def options(stall_s: float) -> Any:
    """The options of our communicators: enough time to start, little memory, and no watchdog that ends the process."""
    for name, value in _WATCHDOG_OFF.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(_FIRST_S, round(stall_s))))
    found = dist.ProcessGroupNCCL.Options()
    found.config.blocking = 0  # a peer that dies while communicators are made must not hang us
    found.config.max_ctas = _CHANNELS
    found._timeout = _NEVER
    return found


def _make(store: dist.Store, rank: int, host: str, stall_s: float) -> Any:  # noqa: ARG001 - NCCL finds its interfaces
    return dist.ProcessGroupNCCL(store, rank, 2, options(stall_s))


def _finish(works: list[Any], group: Any, device: torch.device, timeout_s: float) -> None:
    """Wait for the works, which are on NCCL's stream. If they do not end in time, abort them: they would block the
    stream for ever."""
    for work in works:
        work.wait()
    try:
        _wait_for_stream(device, timeout_s)
    except BaseException:
        group.abort()
        raise


def _wait_for_stream(device: torch.device, timeout_s: float) -> None:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    end_s = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > end_s:
            raise TransportError("timed out")
        time.sleep(_POLL_S)


def _check(device: torch.device) -> str:
    wrong = on_cuda("nccl", twin="gloo")(device)
    return wrong or ("" if dist.is_nccl_available() else "this torch has no NCCL; use transport tcp, cuda-ipc or auto")


NCCL = Backend("nccl", _make, _finish)
WAY = Way(
    "nccl",
    check=_check,
    offer=None,
    reaches=anywhere,
    open=lambda tools: TwoSidedTransport(NCCL, tools.secret, tools.timeout_s),
    usual=False,
    maps=False,
    within=False,
    backend=NCCL,
)
