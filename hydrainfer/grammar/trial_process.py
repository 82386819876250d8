"""The process that tries grammars before the server compiles them.

    server ──a socket per trial──> this process ──fork──> a process per trial: reads the grammar, compiles it, answers

The tokenizer is loaded once and shared with the forked processes. Each of these has bounds of CPU time and
memory, which the kernel enforces whatever the library does, and ends when the server closes its socket. This process
ends with the server, whose end of the socket is then closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec

from hydrainfer.core import Grammar
from hydrainfer.grammar.bounds import NICENESS, TrialBounds
from hydrainfer.grammar.library import compiled, load_tokenizer

LENGTH = struct.Struct("<I")
BEGUN = b"+"
"""Sent by a trial once it has its grammar: from here on its time counts."""


def main() -> None:
    fd, said, folder, n_vocab, *eos_ids = sys.argv[1:-1]
    bounds = msgspec.json.decode(said, type=TrialBounds)
    with socket.socket(fileno=int(fd)) as server:
        tokenizer = load_tokenizer(Path(folder), int(n_vocab), [int(i) for i in eos_ids])
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended trials leave nothing behind
        while True:
            message, fds, _, _ = socket.recv_fds(server, 1, 1)
            if not message:
                return
            for asked in fds:
                if not os.fork():
                    server.close()
                    _try(socket.socket(fileno=asked), tokenizer, bounds)
                os.close(asked)


def _try(asked: socket.socket, tokenizer: Any, bounds: TrialBounds) -> None:
    """Try one grammar, and end the process."""
    try:
        grammar = _read(asked)
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


def _read(asked: socket.socket) -> Grammar:
    (n,) = LENGTH.unpack(asked.recv(LENGTH.size, socket.MSG_WAITALL))
    return msgspec.msgpack.decode(asked.recv(n, socket.MSG_WAITALL), type=Grammar)


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
    """End this process as soon as the server closes its end of the socket: the kernel then sends SIGIO."""
    fcntl.fcntl(asked, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(asked, fcntl.F_SETFL, os.O_ASYNC | fcntl.fcntl(asked, fcntl.F_GETFL))
    if select.select([asked], [], [], 0)[0]:  # closed before the kernel was told
        os._exit(0)


if __name__ == "__main__":
    main()
