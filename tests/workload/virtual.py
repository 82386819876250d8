"""An event loop whose time is a number: sleeping costs nothing, connections are within the process, and nothing that
the machine does meanwhile bends a measurement. A load of minutes runs in as long as its Python takes."""

from __future__ import annotations

import asyncio
import itertools
import selectors
import types


class _Selector(selectors.SelectSelector):
    """Nothing ever becomes readable: to wait is to move the clock."""

    now_s = 0.0

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("every task waits for something that will never happen")
        self.now_s += max(timeout, 0.0)
        return []


class _End(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, loop, protocol):
        super().__init__()
        self._loop, self._protocol, self._closing, self._lost = loop, protocol, False, False
        self.peer: _End

    def write(self, data):
        if not self._closing:
            self._loop.call_soon(self.peer.receive, bytes(data))

    def receive(self, data):
        if not self._closing:
            self._protocol.data_received(data)

    def hang_up(self, exc=None):
        """The other end has closed."""
        if not self._closing:
            if exc is None:
                self._protocol.eof_received()
            self._end(exc)

    def _end(self, exc):
        self._closing = True
        self._loop.call_soon(self._protocol.connection_lost, exc)

    def close(self):
        if not self._closing:
            self._end(None)
            self._loop.call_soon(self.peer.hang_up)

    def abort(self):
        if not self._closing:
            self._end(None)
            self._loop.call_soon(self.peer.hang_up, ConnectionResetError("reset"))

    def is_closing(self):
        return self._closing

    def get_protocol(self):
        return self._protocol


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self._clock = _Selector()
        super().__init__(self._clock)
        self._clock_resolution = 1e-9
        self._listening, self._ports = {}, itertools.count(40000)

    def time(self):
        return self._clock.now_s

    async def create_server(self, factory, host=None, port=None, **_):
        port = port or next(self._ports)
        self._listening[port] = factory
        socket = types.SimpleNamespace(getsockname=lambda: ("127.0.0.1", port))

        async def wait_closed():  # those who served it hear of their end
            for _ in range(5):
                await asyncio.sleep(0)

        close = lambda: self._listening.pop(port, None)  # noqa: E731
        return types.SimpleNamespace(sockets=[socket], close=close, wait_closed=wait_closed)

    async def create_connection(self, factory, host=None, port=None, **_):
        if port not in self._listening:
            raise ConnectionRefusedError(111, "nobody listens")
        ours, theirs = _End(self, factory()), _End(self, self._listening[port]())
        ours.peer, theirs.peer = theirs, ours
        theirs._protocol.connection_made(theirs)
        ours._protocol.connection_made(ours)
        return ours, ours._protocol


def run(coroutine):
    """Run it on a virtual loop to its end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
