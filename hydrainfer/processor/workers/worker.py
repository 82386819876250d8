"""The process that decodes pictures and videos from clients. It is started by `workers.MediaWorkers` and communicates
with nothing else.

    hello ─> job: function, part, its bytes ─> how many pixels? ─> (the server grants them) ─> result or error ─┐
                └─────────────────────────────────────────────────────────────────────────────────────────────┘

The server sends jobs pickled; answers are never pickled, so a worker that an attacker controls can send only numbers,
arrays and text. The worker ends when the server ends, for whatever reason.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import resource
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hydrainfer.core import HydraError, InternalError, LogForm, MediaError, log_formatter
from hydrainfer.processor.messages import ImagePart
from hydrainfer.processor.pictures import MediaItem, MediaLimits, header_pixels
from hydrainfer.processor.workers.channel import Channel

_MAX_JOB_BYTES = 1 << 24
_log = logging.getLogger(__name__)


class Job(NamedTuple):
    """A call of `prepare(part, *args)`. `part.source` is the `n_bytes` that follow; they are decoded to text if
    `text`."""

    prepare: Callable[..., Any]
    part: Any
    args: tuple[Any, ...]
    limits: MediaLimits
    n_bytes: int
    text: bool


class Wants(msgspec.Struct, tag=True, frozen=True):
    """The worker is about to decode `n_pixels`."""

    n_pixels: int


class Made(msgspec.Struct, tag=True, frozen=True):
    """The `Encodable`s that a job has made. Their uint8 arrays follow, in order."""

    made: tuple[tuple[MediaItem, bytes, tuple[int, ...]], ...]


class JobFailed(msgspec.Struct, tag=True, frozen=True):
    """The error of a job. `kind`: name of the `HydraError` class."""

    kind: str
    message: str
    param: str | None
    code: str | None


def serve(channel: Channel) -> None:
    """Run jobs until the server closes the connection."""
    with contextlib.suppress(EOFError):
        channel.send(b"hello")
        while True:
            job: Job = pickle.loads(channel.receive(_MAX_JOB_BYTES))
            data = bytearray(job.n_bytes)
            channel.receive_into(data)
            answer, arrays = _do(job, bytes(data), channel)
            channel.send(msgspec.msgpack.encode(answer), *arrays)
            del job, data, arrays


def _do(job: Job, data: bytes, channel: Channel) -> tuple[Made | JobFailed, list[Any]]:
    part = msgspec.structs.replace(job.part, source=data.decode("utf-8", "surrogatepass") if job.text else data)
    try:
        if isinstance(part, ImagePart):
            part = part.read(job.limits)
            assert isinstance(part.source, bytes)
            n_pixels = header_pixels(part.source)
        else:
            n_pixels = job.limits.max_pixels
        channel.send(msgspec.msgpack.encode(Wants(n_pixels)))
        channel.receive(0)
        made = job.prepare(part, *job.args)
    except HydraError as e:
        return JobFailed(type(e).__name__, e.message, e.param, e.code), []
    except MemoryError:
        gc.collect()
        message = "decoding it takes more memory than this server allows; send a smaller or simpler one"
        return JobFailed(MediaError.__name__, message, part.param, None), []
    except EOFError:
        raise
    except Exception:
        _log.exception("a media worker failed")
        return JobFailed(
            InternalError.__name__, "a picture could not be prepared; see the server's log", None, None
        ), []
    return Made(tuple((e.item, e.key, e.pixels.shape) for e in made)), [e.pixels for e in made]


def _bound(memory_bytes: int) -> None:
    """Limit this process to `memory_bytes` more than it has now, within any existing limit (`ulimit -v`), and disable
    core dumps. When the machine runs out of memory, the kernel ends this process first."""
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + memory_bytes
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)
    if allowed != resource.RLIM_INFINITY:
        most = min(most, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _hush(log_form: LogForm) -> None:
    """Let only this engine's log reach the server's console. Output of libraries, from Python or C, depends on what
    clients have sent."""
    handler = logging.StreamHandler(os.fdopen(os.dup(2), "w"))
    handler.setFormatter(log_formatter(log_form))
    log = logging.getLogger("hydrainfer")
    log.addHandler(handler)
    log.propagate = False
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)


def main() -> None:
    fd, memory_bytes, dali, by_torch, as_json, _parent = map(int, sys.argv[1:])
    _hush("json" if as_json else "text")
    try:
        if dali:  # loaded before the memory limit is set, since DALI reserves address space that it does not use
            from hydrainfer.processor.pictures.dali import warm

            warm()
        if by_torch:  # likewise
            from hydrainfer.processor.pictures.resample_int16 import load_torch

            load_torch()
        _bound(memory_bytes)
        serve(Channel(socket.socket(fileno=fd)))
    except Exception:
        _log.exception("a media worker ends")
        sys.exit(1)


if __name__ == "__main__":
    main()
