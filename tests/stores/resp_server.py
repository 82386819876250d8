"""A server of Redis's protocol that answers what a test wants, and blocks for tests of stores."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from hydrainfer.stores import BlockName, Root, StoreError
from hydrainfer.stores.resp import RespStore
from tests.waiting import PATIENCE_S

ROOT = Root(b"r" * 16, {"model": "toy", "dtype": "float32"})
SERVER = shutil.which("redis-server") or shutil.which("valkey-server")


def name_of(i, kind="kv", group=None):
    return BlockName(i.to_bytes(16), kind, i, group or i.to_bytes(8))


def block_of(i, n_bytes):
    return memoryview(random.Random(i).randbytes(n_bytes))


def put(store, names, n_bytes=1000):
    return store.write(names, [block_of(name.number, n_bytes) for name in names])


def got(store, names, n_bytes=1000):
    """Which blocks arrive. Those that do must have the right bytes."""
    buffers = [bytearray(n_bytes) for _ in names]
    arrived = store.read(names, [memoryview(buffer) for buffer in buffers])
    for name, buffer, here in zip(names, buffers, arrived, strict=True):
        assert not here or buffer == block_of(name.number, n_bytes), name
    return arrived


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def at(port, environ=(), timeout_ms=5000):
    return RespStore(f"redis://127.0.0.1:{port}?timeout_ms={timeout_ms}", ROOT, dict(environ))


def fails(store, error=StoreError):
    """The message of every call, which is the same."""
    texts = set()
    for call in (
        lambda: store.has([name_of(1)]),
        lambda: got(store, [name_of(1)]),
        lambda: put(store, [name_of(1)]),
        lambda: store.touch([name_of(1)]),
        store.contents,
    ):
        with pytest.raises(error) as raised:
            call()
        assert raised.value.__cause__ is raised.value.__context__ is None
        texts.add(str(raised.value))
    (text,) = texts
    assert "\n" not in text
    return text


@contextmanager
def answering(reply):
    """A server's port. `reply`: what it answers to a command, a list of bytes; None closes the connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections = []

    def serve(sock):
        with suppress(OSError, ValueError), sock, sock.makefile("rb") as stream:
            while line := stream.readline():
                assert line.startswith(b"*")
                command = []
                for _ in range(int(line[1:])):
                    size = int(stream.readline()[1:])
                    command.append(stream.read(size + 2)[:-2])
                answer = b"+OK\r\n" if command[:2] == [b"CLIENT", b"SETINFO"] else reply(command)
                if answer is None:
                    return
                sock.sendall(answer)

    def accept():
        with suppress(OSError):
            while True:
                sock, _ = listener.accept()
                connections.append(sock)
                threading.Thread(target=serve, args=(sock,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for sock in connections:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)


@contextmanager
def running(folder, port, *options):
    """A real server, until the end of the context."""
    command = [SERVER, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()
