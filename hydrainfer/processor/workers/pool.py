"""A pool of processes that prepare pictures, so that this takes no time of the server's interpreter and a crash of a
decoder does not end the server."""

from __future__ import annotations

import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgspec
import numpy as np

from hydrainfer.core import (
    DeadlineExceeded,
    HydraError,
    InternalError,
    LogForm,
    MediaError,
    Overloaded,
    Unavailable,
    shutting_down,
)
from hydrainfer.core.errors import KINDS
from hydrainfer.processor.pictures import MediaLimits
from hydrainfer.processor.workers.channel import Channel
from hydrainfer.processor.workers.prepare import Encodable
from hydrainfer.processor.workers.worker import Job, JobFailed, Made, Wants

_log = logging.getLogger(__name__)
_COMMAND = (  # the process is to die with the thread that started it, also during its imports, which take half a second
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "  # PR_SET_PDEATHSIG, SIGKILL
    "os.getppid() == int(sys.argv[-1]) or os._exit(1); "  # the server has ended already
    "from hydrainfer.processor.workers.worker import main; main()"
)
_START_S = 60.0
_DYING_S = 0.5
_TRIES = 2  # a worker may be ended by another process, and not because of its picture
_STARTS = 3
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
_BETWEEN_STARTS_S = 0.1
_MAX_ANSWER_BYTES = 1 << 24
_WARM_BLOCKS = 6  # 16 MiB blocks that a worker keeps between pictures: new pages cost as much as decoding into them
_PIXEL_BYTES = 28  # the worst case: RGBA, turned upright, composited, and the adapter's arrays
_BESIDE_BYTES = 512 << 20
_KINDS = {kind.__name__: kind for kind in KINDS}
_decode_answer = msgspec.msgpack.Decoder(Wants | Made | JobFailed).decode


class MediaWorkers:
    """A pool of up to `n` processes. Each is started when it is first needed, or by `warm`, and restarted if it has
    ended.

    `job_limit_s`: a job that takes longer is ended together with its worker. `n_jobs`: jobs that wait or run; more than
    `max_jobs` are refused with status 429. All workers together decode at most `limits.max_pixels` at once, and each
    worker has memory for that many. `by_torch`: torch resizes, so each worker loads it before its first picture.
    `log_form`: the form of what workers log on stderr.
    """

    def __init__(
        self,
        n: int,
        limits: MediaLimits,
        *,
        job_limit_s: float = 30.0,
        max_jobs: int = 256,
        by_torch: bool = False,
        log_form: LogForm = "text",
    ) -> None:
        self.n = n
        self.limits = limits
        self._by_torch = by_torch
        self._log_form = log_form
        self.memory_bytes = _BESIDE_BYTES + 4 * limits.max_image_bytes + _PIXEL_BYTES * limits.max_pixels
        self._job_limit_s = job_limit_s
        self._max_jobs = max_jobs
        self.n_jobs = 0
        self._room = _Room(limits.max_pixels)
        self._threads = ThreadPoolExecutor(n, "hydra-media")  # one per worker, which ends with its thread
        self._mine = threading.local()
        self._workers: set[_Worker] = set()
        self._lock = threading.Lock()
        self._closing = False

    def submit(
        self, prepare: Callable[..., tuple[Encodable, ...]], part: Any, *args: Any
    ) -> Future[tuple[Encodable, ...]]:
        """Run `prepare(part, *args)` in a worker. `part.source` is bytes or text. The future raises what `prepare`
        raises, `MediaError` if two workers crash on the part, `DeadlineExceeded`, `Unavailable` when closing or if
        every new worker is killed, or `InternalError` if no worker starts. Cancelling the future takes the job out of
        the queue. Raises `Overloaded`."""
        with self._lock:
            if self.n_jobs >= self._max_jobs:
                raise Overloaded(
                    f"the server already prepares {self.n_jobs} pictures; retry later",
                    param="messages",
                    retry_after_s=1.0,
                )
            self.n_jobs += 1
        try:
            future = self._threads.submit(self._run, prepare, part, args)
        except RuntimeError:
            self._done()
            raise shutting_down() from None
        future.add_done_callback(lambda _: self._done())
        return future

    def warm(self) -> None:
        """Start one worker in the background, so that the first picture does not wait for a worker's imports. If the
        worker does not start, the log says so, and the first picture tries again."""
        with suppress(RuntimeError):  # the pool is closing
            self._threads.submit(self._worker)

    @property
    def pids(self) -> list[int]:
        """The process ids of the running workers."""
        with self._lock:
            return [w.process.pid for w in self._workers]

    def close(self) -> None:
        """End the workers, even those that are decoding. Safe to repeat."""
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
            self.n_jobs -= 1

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
            except (EOFError, msgspec.DecodeError) as e:
                how = self._end(worker, _DYING_S)
                if self._closing:
                    raise shutting_down() from None
                _log.warning("media worker %d ended with status %d at work (%s)", worker.process.pid, how, e)
                if not tries_left:
                    raise MediaError(
                        "it cannot be decoded: the process that did so died of it, twice", param=part.param
                    ) from None
            except MemoryError:
                self._end(worker)
                raise Overloaded("the server has no memory for this now; retry later", retry_after_s=1.0) from None
            except BaseException as e:
                if isinstance(e, InternalError) or not isinstance(e, HydraError):
                    self._end(worker)  # the worker's state is unknown, and a part of its answer may be unread
                raise
        raise AssertionError

    def _worker(self) -> _Worker:
        worker: _Worker | None = getattr(self._mine, "worker", None)
        if worker in self._workers and worker.process.poll() is None:
            return worker
        if worker is not None:
            self._end(worker)
        n_failed, give_up_s = 0, time.monotonic() + _START_S
        while True:
            worker, how = self._started()
            if worker is not None:
                return worker
            killed = how in _FROM_OUTSIDE
            n_failed += not killed
            if n_failed == _STARTS or time.monotonic() > give_up_s:
                raise _killed() if killed else _unable()
            time.sleep(_BETWEEN_STARTS_S)

    def _started(self) -> tuple[_Worker | None, int]:
        """A new worker, or None and the exit status of a process that ended before its greeting."""
        try:
            worker = _Worker(self.memory_bytes, self.limits.dali, self._by_torch, self._log_form)
        except OSError as e:
            _log.error("a media worker does not start: %s", e)
            return None, 0
        with self._lock:
            self._workers.add(worker)
        self._mine.worker = worker
        if self._closing:
            worker.process.kill()
        try:
            worker.greet()
        except (EOFError, TimeoutError) as e:
            how = self._end(worker, _DYING_S)
            if self._closing:
                raise shutting_down() from None
            _log.error("a media worker does not start (status %d)", how)
            if isinstance(e, TimeoutError):
                raise _unable() from None
            return None, how
        return worker, 0

    def _end(self, worker: _Worker, patience_s: float = 0.0) -> int:
        with self._lock:
            self._workers.discard(worker)
        return worker.end(patience_s)


class _Worker:
    """The server's side of a worker process."""

    def __init__(self, memory_bytes: int, dali: bool, by_torch: bool, log_form: LogForm) -> None:
        ours, theirs = socket.socketpair()
        with ExitStack() as undo:
            undo.callback(ours.close)
            with theirs:
                as_json = int(log_form == "json")
                self.process = self._process(theirs.fileno(), memory_bytes, int(dali), int(by_torch), as_json)
            undo.pop_all()
        self._channel = Channel(ours)
        self._memory_bytes = memory_bytes

    @staticmethod
    def _process(fd: int, *numbers: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND, *map(str, (fd, *numbers, os.getpid()))],
            stdin=subprocess.DEVNULL,
            pass_fds=(fd,),
            process_group=0,  # Ctrl-C must reach only the server, which ends the workers
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                "PILLOW_BLOCKS_MAX": str(_WARM_BLOCKS),
                "OPENBLAS_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",  # torch's, if it resizes
            },
        )

    def greet(self) -> None:
        self._channel.receive(16, time.monotonic() + _START_S)

    def do(self, job: bytes, data: bytes, limit_s: float, room: _Room) -> tuple[Encodable, ...]:
        """The job's result. Raises what the job raises, `TimeoutError`, or, if the worker has ended or its answer is
        invalid, `EOFError` or `msgspec.DecodeError`."""
        channel = self._channel
        channel.send(job, data, deadline_s=time.monotonic() + limit_s)
        answer = self._answer(limit_s)
        if isinstance(answer, Wants):
            with room.holding(answer.n_pixels):
                channel.send(b"")
                answer = self._answer(limit_s)
                if isinstance(answer, Made):
                    return self._receive(answer, time.monotonic() + limit_s)
        if isinstance(answer, JobFailed) and answer.kind in _KINDS:
            raise _KINDS[answer.kind](answer.message[:1000], param=answer.param, code=answer.code)
        raise EOFError("an answer out of turn")

    def _answer(self, limit_s: float) -> Wants | Made | JobFailed:
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
        """End the process and return its exit status. A process that is ending gets `patience_s` to finish by itself,
        so that the status is its own."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._channel.close()
        return self.process.wait()


class _Room:
    """A budget of pixels that are decoded at once, first come, first served. A picture larger than the budget may use
    all of it."""

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
                raise shutting_down()
            yield
        finally:
            with self._changed:
                self._free += n_pixels
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _unable() -> InternalError:
    return InternalError("pictures cannot be prepared; see the server's log")


def _killed() -> Unavailable:
    return Unavailable("the processes that prepare pictures are being killed; retry later", retry_after_s=5.0)
