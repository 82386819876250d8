"""The process that tries grammars before the server compiles them.

    server ──a socket and a grammar──> this process ──fork──> a process per trial: compiles the grammar, answers
       ^──────the signal that has ended a trial──────┘

The tokenizer is loaded once and shared with the forked processes. Each of these has bounds of CPU time and
memory, which the kernel enforces whatever the library does, and ends when the server closes its socket. The server
writes nothing to that socket: the grammar comes as a file in memory. This process ends with the server, whose end of
the socket is then closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from hydrainfer.core import Grammar
from hydrainfer.grammar.bounds import NICENESS, TrialBounds
from hydrainfer.grammar.library import compiled, load_tokenizer

BEGUN = b"+"
"""Sent by a trial once it has its grammar: from here on its time counts."""


def main() -> None:
    fd, said, folder, n_vocab, *eos_ids = sys.argv[1:-1]
    bounds = msgspec.json.decode(said, type=TrialBounds)
    with socket.socket(fileno=int(fd)) as server:
        tokenizer = load_tokenizer(Path(folder), int(n_vocab), [int(i) for i in eos_ids])
        running: dict[int, tuple[int, int]] = {}  # by pidfd: the process of a trial, and its socket
        waiting = select.poll()
        waiting.register(server, select.POLLIN)
        while True:
            for ready, _ in waiting.poll():
                if ready != server.fileno():
                    waiting.unregister(ready)
                    os.close(ready)
                    _tell_end(*running.pop(ready))
                    continue
                message, fds, _, _ = socket.recv_fds(server, 1, 2)
                if not message:
                    return
                asked, file = fds
                pid = os.fork()
                if not pid:
                    server.close()
                    for _, other in running.values():
                        os.close(other)
                    _try(socket.socket(fileno=asked), file, tokenizer, bounds)
                os.close(file)
                ended = os.pidfd_open(pid)
                running[ended] = pid, asked
                waiting.register(ended, select.POLLIN)


def _tell_end(pid: int, asked: int) -> None:
    """Tell the server which signal has ended a trial, if one has."""
    _, status = os.waitpid(pid, 0)
    with socket.socket(fileno=asked) as to, contextlib.suppress(OSError):
        if os.WIFSIGNALED(status):
            to.send(msgspec.json.encode(os.WTERMSIG(status)) + b"\n", socket.MSG_DONTWAIT)


def _try(asked: socket.socket, file: int, tokenizer: Any, bounds: TrialBounds) -> None:
    """Try the grammar in a file, and end the process."""
    try:
        grammar = msgspec.msgpack.decode(os.pread(file, os.fstat(file).st_size, 0), type=Grammar)
        _bound(bounds)
        asked.sendall(BEGUN)
        _end_with(asked)
        try:
            compiled(tokenizer, grammar)
            error = ""
        except ValueError as e:
            error = str(e)
        asked.setblocking(True)
        asked.sendall(msgspec.json.encode(error) + b"\n")
    finally:
        os._exit(0)


def _bound(bounds: TrialBounds) -> None:
    """Have the kernel end this process when it takes more than a trial may. When the machine runs out of memory, this
    process ends first."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + bounds.n_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, bounds.cpu_s)
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _end_with(asked: socket.socket) -> None:
    """End this process as soon as the server closes its end of the socket: the kernel then sends SIGIO. It would also
    send it for data that arrives, and even for data that has been read already."""
    fcntl.fcntl(asked, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(asked, fcntl.F_SETFL, os.O_ASYNC | fcntl.fcntl(asked, fcntl.F_GETFL))
    if select.select([asked], [], [], 0)[0]:  # closed before the kernel was told
        os._exit(0)


if __name__ == "__main__":
    main()
