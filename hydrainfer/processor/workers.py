"""Processes that prepare pictures: off the interpreter of the server, and apart from it when a decoder goes wrong."""

from __future__ import annotations

import logging
import math
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hydrainfer.core import DeadlineExceeded, InternalError, MediaError, Overloaded, Unavailable
from hydrainfer.core.errors import KINDS
from hydrainfer.processor.channel import Channel
from hydrainfer.processor.media import MediaLimits
from hydrainfer.processor.prepare import Encodable
from hydrainfer.processor.worker import Failed, Job, Made, Wants

_log = logging.getLogger(__name__)
_COMMAND = "from hydrainfer.processor.worker import main; main()"
_START_S = 60.0
_DYING_S = 0.5
_TRIES = 2  # whoever ends a worker may have meant another picture, or nothing at all
_MAX_ANSWER_BYTES = 1 << 24
_WARM_BLOCKS = 6  # of 16 MiB that a worker keeps between pictures: fresh pages cost as much as decoding into them
_PIXEL_BYTES = 28  # at the worst: RGBA, turned upright, composited, and what the adapter makes of it
_BESIDE_BYTES = 512 << 20
_KINDS = {kind.__name__: kind for kind in KINDS}
_decode_answer = msgspec.msgpack.Decoder(Wants | Made | Failed).decode


class MediaWorkers:
    """Up to `n` processes, each started when it is first needed, and its successor when it has died.

    `job_limit_s`: a job that takes longer ends with its worker. `max_jobs`: waiting and running; beyond it 429. At most
    `limits.max_pixels` are decoded at once, by all workers together; a worker has memory for that many.
    """

    def __init__(self, n: int, limits: MediaLimits, *, job_limit_s: float = 30.0, max_jobs: int = 256) -> None:
        self.n = n
        self.limits = limits
        self.memory_bytes = _BESIDE_BYTES + 4 * limits.max_image_bytes + _PIXEL_BYTES * limits.max_pixels
        self._job_limit_s = job_limit_s
        self._max_jobs = max_jobs
        self._n_jobs = 0
        self._room = _Room(limits.max_pixels)
        self._threads = ThreadPoolExecutor(n, "hydra-media")  # one per worker, which dies with its thread
        self._mine = threading.local()
        self._workers: set[_Worker] = set()
        self._lock = threading.Lock()
        self._closing = False

    def submit(
        self, prepare: Callable[..., tuple[Encodable, ...]], part: Any, *args: Any
    ) -> Future[tuple[Encodable, ...]]:
        """`prepare(part, *args)` in a worker. `part.source` is bytes or text. The future raises what `prepare` does,
        `MediaError` if the worker dies of it, `DeadlineExceeded`, or `Unavailable` when closing; cancelling it takes
        it out of the queue. Raises `Overloaded`."""
        with self._lock:
            if self._n_jobs >= self._max_jobs:
                raise Overloaded(
                    f"the server already prepares {self._n_jobs} pictures; retry later",
                    param="messages",
                    retry_after_s=1.0,
                )
            self._n_jobs += 1
        try:
            future = self._threads.submit(self._run, prepare, part, args)
        except RuntimeError:
            self._done()
            raise _closing() from None
        future.add_done_callback(lambda _: self._done())
        return future

    @property
    def pids(self) -> list[int]:
        """Of those that run."""
        with self._lock:
            return [w.process.pid for w in self._workers]

    def close(self) -> None:
        """End the workers, whatever they do. Safe to repeat."""
        with self._lock:
            self._closing = True
            workers = list(self._workers)
        self._room.close()
        for worker in workers:
            worker.process.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in workers:
            self._end(worker)

    def _done(self) -> None:
        with self._lock:
            self._n_jobs -= 1

    # ---- on a worker's thread

    def _run(self, prepare: Callable[..., Any], part: Any, args: tuple[Any, ...]) -> tuple[Encodable, ...]:
        text = isinstance(part.source, str)
        data = part.source.encode("utf-8", "surrogatepass") if text else part.source
        part = msgspec.structs.replace(part, source=b"")
        job = pickle.dumps(Job(prepare, part, args, self.limits, len(data), text))
        for tries_left in reversed(range(_TRIES)):
            worker = self._worker()
            try:
                return worker.do(job, data, self._job_limit_s, self._room)
            except TimeoutError:
                self._end(worker)
                raise DeadlineExceeded(
                    f"preparing this took more than {self._job_limit_s:g} s; send a smaller one",
                    param=part.param,
                    code="media_timeout",
                ) from None
            except EOFError:
                how = self._end(worker, _DYING_S)
                if self._closing:
                    raise _closing() from None
                _log.warning("media worker %d ended with status %d at work", worker.process.pid, how)
                if not tries_left:
                    raise MediaError(
                        "it cannot be decoded: the process that did so died of it, twice", param=part.param
                    ) from None
            except (InternalError, msgspec.DecodeError):
                self._end(worker)  # who knows what it has become
                raise
        raise AssertionError

    def _worker(self) -> _Worker:
        worker: _Worker | None = getattr(self._mine, "worker", None)
        if worker in self._workers and worker.process.poll() is None:
            return worker
        if worker is not None:
            self._end(worker)
        worker = _Worker(self.memory_bytes, self.limits.dali)
        with self._lock:
            self._workers.add(worker)
        self._mine.worker = worker
        if self._closing:
            worker.process.kill()
        try:
            worker.greet()
        except (EOFError, TimeoutError):
            how = self._end(worker, _DYING_S)
            if self._closing:
                raise _closing() from None
            _log.error("a media worker does not start (status %d)", how)
            raise InternalError("pictures cannot be prepared; see the server's log") from None
        return worker

    def _end(self, worker: _Worker, patience_s: float = 0.0) -> int:
        with self._lock:
            self._workers.discard(worker)
        return worker.end(patience_s)


class _Worker:
    """The server's side of a process of `worker`."""

    def __init__(self, memory_bytes: int, dali: bool) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, *map(str, (fd, os.getpid(), memory_bytes, int(dali)))],
                stdin=subprocess.DEVNULL,
                pass_fds=(fd,),
                process_group=0,  # Ctrl-C is for the server, which ends us
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(p for p in sys.path if p) or str(Path.cwd()),
                    "PILLOW_BLOCKS_MAX": str(_WARM_BLOCKS),
                    "OPENBLAS_NUM_THREADS": "1",
                },
            )
        self._channel = Channel(ours)
        self._memory_bytes = memory_bytes

    def greet(self) -> None:
        self._channel.receive(16, time.monotonic() + _START_S)

    def do(self, job: bytes, data: bytes, limit_s: float, room: _Room) -> tuple[Encodable, ...]:
        """Raises what the job does, `TimeoutError`, or `EOFError` if the worker is no more."""
        channel = self._channel
        channel.send(job, data, deadline_s=time.monotonic() + limit_s)
        answer = self._answer(limit_s)
        if isinstance(answer, Wants):
            with room.holding(answer.n_pixels):
                channel.send(b"")
                answer = self._answer(limit_s)
                if isinstance(answer, Made):
                    return self._receive(answer, time.monotonic() + limit_s)
        if isinstance(answer, Failed) and answer.kind in _KINDS:
            raise _KINDS[answer.kind](answer.message[:1000], param=answer.param, code=answer.code)
        raise EOFError

    def _answer(self, limit_s: float) -> Wants | Made | Failed:
        return _decode_answer(self._channel.receive(_MAX_ANSWER_BYTES, time.monotonic() + limit_s))

    def _receive(self, answer: Made, deadline_s: float) -> tuple[Encodable, ...]:
        sizes = [n for _, _, shape in answer.made for n in shape]
        if min(sizes, default=0) < 1 or sum(math.prod(s) for _, _, s in answer.made) > self._memory_bytes:
            raise EOFError("arrays that it cannot have")
        encodables = []
        for item, key, shape in answer.made:
            pixels = np.empty(shape, np.uint8)
            self._channel.receive_into(pixels, deadline_s)
            encodables.append(Encodable(item, key, pixels))
        return tuple(encodables)

    def end(self, patience_s: float) -> int:
        """Returns its status. One that is dying gets `patience_s` to do so by itself, so that the status is its own."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._channel.close()
        return self.process.wait()


class _Room:
    """So many pixels at once, first come, first served; one picture always fits."""

    def __init__(self, n_pixels: int) -> None:
        self._free = n_pixels
        self._n_pixels = n_pixels
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()
        self._closed = False

    @contextmanager
    def holding(self, n_pixels: int) -> Iterator[None]:
        n_pixels = min(n_pixels, self._n_pixels)
        me = object()
        with self._changed:
            self._queue.append(me)
            self._changed.wait_for(lambda: self._closed or (self._queue[0] is me and n_pixels <= self._free))
            self._queue.remove(me)
            self._free -= n_pixels
            self._changed.notify_all()
        try:
            if self._closed:
                raise _closing()
            yield
        finally:
            with self._changed:
                self._free += n_pixels
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _closing() -> Unavailable:
    return Unavailable("the server is shutting down", retry_after_s=5.0)
