"""Trials of clients' grammars, in processes that can be ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from hydrainfer.core import Grammar, InvalidRequest, Overloaded, Unavailable, shutting_down
from hydrainfer.grammar.bounds import MAX_TRIALS, MAX_WAITING, TrialBounds
from hydrainfer.grammar.trial_process import BEGUN

_log = logging.getLogger(__name__)
_COMMAND = (  # the process is to die with the thread that started it, also while it loads its tokenizer
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "  # PR_SET_PDEATHSIG, SIGKILL
    "os.getppid() == int(sys.argv[-1]) or os._exit(1); "  # the server has ended already
    "from hydrainfer.grammar.trial_process import main; main()"
)
_START_S = 60.0
_TRIES = 2  # the process, or that of a trial, may be ended by another one, and not because of a grammar
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)  # also when the machine runs out of memory
_MAX_ANSWER_BYTES = 1 << 16


class Trials:
    """The process that tries grammars, as the server sees it. It is started when it is first needed, or by `warm`, and
    again if it has ended. One event loop calls `run`."""

    def __init__(self, folder: Path, n_vocab: int, eos_ids: Sequence[int], bounds: TrialBounds | None = None) -> None:
        """`folder`: that of the checkpoint's tokenizer.json. `n_vocab`, `eos_ids`: as for `load_tokenizer`."""
        self._bounds = bounds or TrialBounds()
        self._arguments = (msgspec.json.encode(self._bounds).decode(), str(folder), str(n_vocab), *map(str, eos_ids))
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None  # the process's
        self._answers: socket.socket | None = None  # the same, once it has loaded its tokenizer
        self._lock = threading.Lock()
        self._closed = False
        self._n_waiting = 0
        self._turns = asyncio.Semaphore(MAX_TRIALS)

    async def run(self, grammar: Grammar) -> str:
        """Compile a grammar elsewhere. Returns why it cannot be used, "" if it can. Cancelling this ends the trial.
        Raises `InvalidRequest` if the trial takes too long on a busy machine, `Overloaded` if too many wait, or
        `Unavailable` if there is no process to try it or somebody ends its trials."""
        if self._n_waiting >= MAX_WAITING:
            raise Overloaded(f"{self._n_waiting} grammars wait to be checked; retry later", retry_after_s=2.0)
        self._n_waiting += 1
        try:
            async with self._turns:
                for _ in range(_TRIES):
                    if (error := await self._run(grammar)) is not None:
                        return error
        finally:
            self._n_waiting -= 1
        raise shutting_down() if self._closed else Unavailable("grammars cannot be checked now; retry later")

    def warm(self) -> None:
        """Start the process, so that the first grammar does not wait for it."""
        with suppress(OSError):
            self._reach()

    def close(self) -> None:
        """End the process and its trials. Safe to repeat."""
        with self._lock:
            self._closed = True
            self._leave()

    async def _run(self, grammar: Grammar) -> str | None:
        """The result of a trial, or None if there is none: the process has ended, or that of the trial was ended from
        outside."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs, _in_memory(grammar) as file:
                process = self._hand_over(theirs, file)
            if process is None:
                return None
            patience_s = self._bounds.wall_s if process is self._answers else _START_S
            begun = b""
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(patience_s):
                    begun = await loop.sock_recv(ours, len(BEGUN))
            if begun != BEGUN:
                self._give_up(process)
                return None
            self._answers = process
            return await self._answer(loop, ours)

    async def _answer(self, loop: asyncio.AbstractEventLoop, ours: socket.socket) -> str | None:
        """The answer of a trial that has begun, or None if it was ended from outside."""
        answer = b""
        try:
            async with asyncio.timeout(self._bounds.wall_s):
                while not answer.endswith(b"\n") and len(answer) < _MAX_ANSWER_BYTES:
                    part = await loop.sock_recv(ours, _MAX_ANSWER_BYTES)
                    if not part:
                        return None
                    answer += part
        except TimeoutError:
            raise InvalidRequest(self._too_much(), code="invalid_grammar") from None  # not to be remembered
        except OSError:
            return None
        found = msgspec.json.decode(answer, type=str | int)
        if isinstance(found, str):
            return found
        if found in _FROM_OUTSIDE:
            return None
        return self._too_much()

    def _hand_over(self, theirs: socket.socket, file: IO[bytes]) -> socket.socket | None:
        """Ask the process for a trial of the grammar in a file, to be answered over a socket. Returns the process's own
        socket, or None if it has ended."""
        with suppress(OSError):
            process = self._reach()
            try:
                _send_fds(process, theirs.fileno(), file.fileno())
            except BlockingIOError:
                raise Overloaded("too many grammars wait to be checked; retry later", retry_after_s=2.0) from None
            except OSError:
                self._give_up(process)
            else:
                return process
        return None

    def _give_up(self, process: socket.socket) -> None:
        with self._lock:
            if process is self._socket and not self._closed:
                _log.warning("the process that tries grammars is started again")
                self._leave()

    def _reach(self) -> socket.socket:
        """The socket of the running process. Raises `OSError` if none can be started."""
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("closed")
            if self._socket is None:
                ours, theirs = socket.socketpair()
                with theirs:
                    try:
                        self._process = self._started(theirs.fileno())
                    except OSError:
                        ours.close()
                        raise
                self._socket = ours
            return self._socket

    def _started(self, fd: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND, str(fd), *self._arguments, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what the library prints about a grammar
            pass_fds=(fd,),
            process_group=0,  # Ctrl-C must reach only the server
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "RAYON_NUM_THREADS": "1"},
        )

    def _leave(self) -> None:
        """End the process, if there is one. The caller holds the lock."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._socket = None

    def _too_much(self) -> str:
        return (
            "the grammar or schema cannot be used: to compile it takes more than "
            f"{self._bounds.cpu_s:g} s or {self._bounds.n_bytes >> 20} MiB; make it simpler"
        )


def _send_fds(process: socket.socket, *fds: int) -> None:
    """`socket.send_fds` that does not wait. Raises `BlockingIOError` if the process is far behind."""
    process.sendmsg([b"?"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))], socket.MSG_DONTWAIT)


def _in_memory(grammar: Grammar) -> IO[bytes]:
    file = os.fdopen(os.memfd_create("grammar"), "wb", buffering=0)
    file.write(msgspec.msgpack.encode(grammar))
    return file
