"""A website in the test's own event loop, and a network that leads every address there."""

import asyncio
import socket
from contextlib import asynccontextmanager

import httpcore

PUBLIC = "93.184.216.34"


class Site:
    """`pages[path]` is bytes to send as they are, or `async (reader, writer)`. `asked`: request heads, as received."""

    def __init__(self, pages):
        self.pages = pages
        self.asked = []
        self.n_open = 0
        self.most_open = 0

    async def serve(self, reader, writer):
        self.n_open += 1
        self.most_open = max(self.most_open, self.n_open)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.asked.append(head)
            page = self.pages[head.split()[1]]
            if callable(page):
                await page(reader, writer)
            else:
                writer.write(page)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.n_open -= 1
            writer.close()


@asynccontextmanager
async def website(pages, tls=None):
    site = Site(pages)
    server = await asyncio.start_server(site.serve, "127.0.0.1", 0, ssl=tls)
    site.port = server.sockets[0].getsockname()[1]
    site.network = Detour(site.port)
    try:
        yield site
    finally:
        server.close()
        for _ in range(200):
            if not site.n_open:
                break
            await asyncio.sleep(0.01)
        assert not site.n_open, "a connection was left open"


class Detour(httpcore.AnyIOBackend):
    """`dialled`: the addresses somebody meant to connect to. `dead`: those that refuse."""

    def __init__(self, port, dead=()):
        self.port = port
        self.dead = dead
        self.dialled = []

    async def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
        self.dialled.append((host, port))
        if host in self.dead:
            raise httpcore.ConnectError("secret detail 10.1.2.3")
        return await super().connect_tcp("127.0.0.1", self.port, timeout)


def resolver(*answers, calls=None):
    """The first answer first; the last one for ever after. An answer is a list of addresses or an error."""
    left = list(answers)

    async def resolve(host, port):
        if calls is not None:
            calls.append(host)
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return resolve


def unknown_name():
    return socket.gaierror(-2, "Name or service not known: secret.internal")


def ok(body, kind="image/png", length=None, more=""):
    n = len(body) if length is None else length
    return f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {n}\r\n{more}\r\n".encode() + body


def moved(location, status=302):
    return f"HTTP/1.1 {status} Moved\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()
