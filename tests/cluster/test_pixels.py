"""Pictures by reference, over a socket, as they were stored."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zmq

from hydrainfer.cluster import Keys, Mesh, PixelClient
from hydrainfer.cluster import pixels as pixels_module
from hydrainfer.cluster.pixels import answer_pixels
from hydrainfer.core import Unavailable
from tests.cluster.rig import IPV6
from tests.waiting import HELD_S, PATIENCE_S, wait_until

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]

LOOPBACK = "tcp://127.0.0.1:*"


def picture(i, shape=(3, 56, 56)):
    return np.random.default_rng(i).integers(0, 256, shape, dtype=np.uint8)


class Server:
    """What the hub does with its pixels, on a thread."""

    def __init__(self, pictures, bind, keys=None):
        self.mesh = Mesh(bind.replace("pixels", "hub"), keys)
        self.pictures, self.keys, self._over = pictures, keys, False
        self.socket = self.mesh.listen(zmq.ROUTER, bind)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._over:
            answer_pixels(self.socket, self.pictures.__getitem__)
            self.mesh.poll(1.0)

    def close(self):
        self._over = True
        self.mesh.wake()
        self._thread.join()
        self.mesh.close()


@pytest.fixture(params=["ipc", LOOPBACK, pytest.param("tcp://[::1]:*", marks=IPV6)])
def server(request, tmp_path):
    made = Server({}, f"ipc://{tmp_path}/pixels") if request.param == "ipc" else Server({}, request.param, Keys.new())
    yield made
    made.close()


@pytest.fixture
def client(server):
    made = PixelClient(server.address, server.keys)
    yield made
    made.close()


@pytest.mark.parametrize("shape", [(3, 56, 56), (1, 1, 1), (4, 3, 336, 336), (0, 3, 2), (7,)])
def test_they_arrive_as_stored(server, client, shape):
    server.pictures["a"] = picture(1, shape)
    got = client("a")
    assert got.dtype == np.uint8 and got.shape == shape
    assert np.array_equal(got, server.pictures["a"])


def test_pictures_that_are_not_contiguous_arrive(server, client):
    server.pictures["a"] = picture(1).transpose(1, 2, 0)[::2]
    assert np.array_equal(client("a"), server.pictures["a"])


def test_the_answer_outlives_the_picture(server, client):
    server.pictures["a"] = picture(1)
    got = client("a")
    server.pictures.clear()
    client_error(client, "a")
    assert np.array_equal(got, picture(1))


def client_error(client, ref):
    with pytest.raises(KeyError, match=ref):
        client(ref)


def test_an_unknown_picture_is_a_key_error_and_the_next_one_is_answered(server, client):
    server.pictures["a"] = picture(1)
    client_error(client, "gone")
    client_error(client, "ü")
    assert np.array_equal(client("a"), picture(1))


def test_several_clients_and_threads_at_once(server):
    server.pictures.update({f"p{i}": picture(i, (3, 20 + i, 30)) for i in range(8)})
    clients = [PixelClient(server.address, server.keys) for _ in range(4)]

    def ask(i):
        return i, clients[i % 4](f"p{i % 8}")

    with ThreadPoolExecutor(8) as pool:
        for i, got in pool.map(ask, range(200)):
            assert np.array_equal(got, server.pictures[f"p{i % 8}"])
    for c in clients:
        c.close()


def test_a_late_answer_is_not_taken_for_the_next(server, monkeypatch):
    """The server hangs while it is asked for one; what it then says of that is not the answer about another."""
    held, slow = threading.Event(), {"a": picture(1), "b": picture(2)}

    class Slow(dict):
        def __getitem__(self, ref):
            held.wait(HELD_S)
            return slow[ref]

    server.pictures = Slow()
    client = PixelClient(server.address, server.keys)
    with monkeypatch.context() as m, pytest.raises(Unavailable):
        m.setattr(pixels_module, "_TIMEOUT_MS", 300)
        client("a")
    monkeypatch.setattr(pixels_module, "_TIMEOUT_MS", 20_000)
    held.set()
    assert np.array_equal(client("b"), picture(2))
    client.close()


def test_a_server_that_does_not_answer_is_unavailable_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(pixels_module, "_TIMEOUT_MS", 100)
    client, start = PixelClient(f"ipc://{tmp_path}/nobody"), time.monotonic()
    with pytest.raises(Unavailable):
        client("a")
    assert time.monotonic() - start < PATIENCE_S
    client.close()


def test_a_stranger_gets_no_picture(monkeypatch):
    monkeypatch.setattr(pixels_module, "_TIMEOUT_MS", 300)
    ours, theirs = Keys.new(), Keys.new()
    server = Server({"a": picture(1)}, LOOPBACK, ours)
    for keys in (None, theirs, Keys(ours.public, theirs.secret)):
        client = PixelClient(server.address, keys)
        with pytest.raises(Unavailable):
            client("a")
        client.close()
    monkeypatch.setattr(pixels_module, "_TIMEOUT_MS", 20_000)
    member = PixelClient(server.address, ours)
    assert np.array_equal(member("a"), picture(1))
    member.close()
    server.close()


def test_close_leaves_nothing(tmp_path):
    def once():
        server = Server({"a": picture(1)}, f"ipc://{tmp_path}/pixels")
        client = PixelClient(server.address)
        client("a")
        client.close()
        server.close()

    def traces():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    once()
    before = traces()
    once()
    wait_until(lambda: traces() == before, say=traces)
