"""What a block server does with clients that are no peers, and with peers that ask for the impossible."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time

import pytest

from hydrainfer.storage import TransportError, server
from hydrainfer.storage.packets import Attach, Join, Pull, Put, Read
from hydrainfer.storage.wire import MAGIC, PeerSocket, address_of, enter
from tests.storage.peers import SECRET, SPECS, Instance
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(60)]
KV = SPECS["kv"].block_bytes


@pytest.fixture(params=["tcp", "gloo"])
def pair(request):
    source, target = Instance("E0:1", request.param, 1), Instance("P0:1", request.param, 2)
    (host, port), _ = address_of(source.handles["kv"].ways[request.param])
    yield source, target, lambda: socket.create_connection((host, port), timeout=5)
    target.close()
    source.close()


def works(source, target):
    return target.pull(source.handles, [7, 0, 1], [8, 9, 12], 1)


def ended(sock):
    """Whether the server cuts the connection."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    except (TimeoutError, BlockingIOError):
        return False
    return True


def test_strangers_are_cut_off_hold_up_nobody_and_fill_no_log(pair, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "hydrainfer")
    source, target, connect = pair
    rng = random.Random(0)
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n" * 20, MAGIC * 9, *(rng.randbytes(64) for _ in range(20))):
        with connect() as sock:
            sock.sendall(data)
            if len(data) >= 64:
                assert ended(sock)
    with monkeypatch.context() as m:
        m.setattr(server, "HANDSHAKE_S", 60.0)
        silent = [connect() for _ in range(80)]
        assert works(source, target) is True
        assert ended(silent[0]), "there are too many"
        silent[-1].setblocking(False)
        assert not ended(silent[-1]), "it still has its time"
    for sock in silent:
        sock.close()
    with connect() as sock:
        sock.settimeout(PATIENCE_S)
        assert ended(sock)
    assert works(source, target) is True
    wait_until(lambda: sum(t.name == "hydrainfer-blocks" for t in threading.enumerate()) <= 2)
    lines = [r for r in caplog.records if r.filename == "seldom.py"]
    assert 1 <= len(lines) <= 5, "of a hundred"


def open_as(connect, secret=SECRET, owner="E0:1"):
    connection = PeerSocket(connect())
    connection.limit(5)
    enter(connection, secret, owner)
    return connection


def test_a_peer_without_the_secret_stays_out(pair):
    source, target, connect = pair
    with pytest.raises(TransportError, match="closed the connection"):
        open_as(connect, b"another cluster's")
    with pytest.raises(TransportError, match=r"refused: this is E0:1"):
        open_as(connect, owner="E0:2").receive()
    assert works(source, target) is True


@pytest.mark.parametrize(
    "request_",
    [
        Read("kv", KV, ((16, 1),)),
        Read("kv", KV, ((15, 2),)),
        Read("kv", KV, ((-1, 1),)),
        Read("kv", KV, ((3, 0),)),
        Read("kv", KV, ((0, 1 << 62),)),
        Read("kv", KV + 1, ((0, 1),)),
        Read("pixels", KV, ((0, 1),)),
        Join("mpi"),
        Pull(1, "kv", KV, ((0, 1),)),
        Put("key", b"value"),
        Attach("E0:1"),
    ],
)
def test_impossible_requests_are_refused_and_end_the_connection(pair, request_):
    source, target, connect = pair
    connection = open_as(connect)
    connection.send(request_)
    with pytest.raises(TransportError, match="refused"):
        connection.receive()
    with pytest.raises((TransportError, OSError)):
        connection.receive()
    connection.close()
    assert works(source, target) is True


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\x7f", b"\x05\0\0\0hello", b"\0\0\0\0", b"\x40\0\0\0" + os.urandom(64)],
    ids=["too long", "no message", "empty", "random"],  # each process that runs tests knows them by the same names
)
def test_garbage_of_a_peer_ends_its_connection_only(pair, data):
    source, target, connect = pair
    connection = open_as(connect)
    connection.send_bytes(data)
    with pytest.raises((TransportError, OSError)):
        connection.receive()
    connection.close()
    assert works(source, target) is True


def test_a_member_that_misuses_a_group_ends_only_that(pair):
    source, target, connect = pair
    connection = open_as(connect)
    connection.send(Join("gloo"))
    connection.receive()
    connection.send(Read("kv", KV, ((0, 1),)))
    with pytest.raises((TransportError, OSError)):
        for _ in range(5):
            connection.receive()
    connection.close()
    assert works(source, target) is True


def test_a_slow_copy_goes_on_as_long_as_something_comes():
    """By default all is to be over in time; with `each` only the wait for the next bytes."""
    for each in (False, True):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = PeerSocket(socket.create_connection(listener.getsockname()))
            theirs = PeerSocket(listener.accept()[0])
        ours.limit(0.8, each=each)

        def trickle(peer=theirs):
            for _ in range(6):
                time.sleep(0.2)
                peer.send_bytes(b"x")

        thread = threading.Thread(target=trickle)
        thread.start()
        if each:
            assert ours.exactly(6) == b"xxxxxx"
            with pytest.raises((TransportError, TimeoutError), match="timed out"):
                ours.exactly(1)
        else:
            with pytest.raises((TransportError, TimeoutError), match="timed out"):
                ours.exactly(6)
        thread.join()
        ours.close()
        theirs.close()


def test_a_server_without_threads_left_can_still_be_closed(pair, monkeypatch):
    source, _, connect = pair
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "hydrainfer-blocks":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with connect() as sock:
        assert ended(sock)
    source.close()
