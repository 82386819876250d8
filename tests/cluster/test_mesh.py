"""Who is heard on the cluster's sockets, and what garbage, silence and strangers do to who listens."""

import os
import socket
import threading
import time

import pytest
import zmq

from hydrainfer.cluster import Keys, Mesh
from hydrainfer.cluster import mesh as mesh_module
from hydrainfer.core import ConfigError
from tests.cluster.rig import IPV6
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]

LOOPBACK, LOOPBACK6 = "tcp://127.0.0.1:*", "tcp://[::1]:*"


def heard(mesh, n=1, seconds=PATIENCE_S):
    """`n` messages, or what came until the time was over."""
    got, end = [], time.monotonic() + seconds
    while len(got) < n and time.monotonic() < end:
        mesh.poll(0.02)
        got += mesh.receive()
    return got


@pytest.fixture
def meshes():
    made = []

    def make(bind=LOOPBACK, keys=None):
        made.append(Mesh(bind, keys))
        return made[-1]

    yield make
    for mesh in made:
        mesh.close()


@pytest.fixture(params=["ipc", "tcp", pytest.param("tcp6", marks=IPV6), "curve"])
def pair(request, meshes, tmp_path):
    """Two members of a cluster."""
    keys = Keys.new() if request.param == "curve" else None
    if request.param == "ipc":
        return [meshes(f"ipc://{tmp_path}/{n}") for n in "ab"]
    return [meshes(LOOPBACK6 if request.param == "tcp6" else LOOPBACK, keys) for _ in "ab"]


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:*", "tcp://*:5555", "tcp://10.0.0.1:5555", "tcp://[::]:5555"])
def test_an_address_that_leaves_the_machine_needs_keys(address):
    with pytest.raises(ConfigError, match="leaves this machine, which needs keys"):
        Mesh(address)


def test_an_address_that_cannot_be_had_is_one_line_and_leaves_nothing(meshes):
    taken = meshes().address
    before = traces()
    for address in (taken, "tcp://127.0.0.1:port", "ipc:///no/such/folder/hub"):
        with pytest.raises(ConfigError, match=r"cannot listen on \S+: [\w ]+$"):
            Mesh(address, Keys.new())
    assert settled(before) == before


def test_members_hear_each_other(pair):
    a, b = pair
    a.connect("b", b.address)
    b.connect("a", a.address)
    messages = [b"", b"one", os.urandom(5 << 20), *(b"%d" % i for i in range(500))]
    for m in messages:
        a.send("b", m)
    assert heard(b, len(messages)) == messages
    b.send("a", b"back")
    b.send("nobody", b"lost")
    assert heard(a) == [b"back"]


def test_wake_ends_a_poll(meshes):
    mesh = meshes()
    timer = threading.Timer(0.05, mesh.wake)
    timer.start()
    start = time.monotonic()
    mesh.poll(None)
    assert time.monotonic() - start < PATIENCE_S
    timer.join()


def stranger(context, address, server_key=None, key_pair=None):
    push = context.socket(zmq.PUSH)
    if server_key is not None:
        push.curve_serverkey = server_key.encode()
        push.curve_publickey, push.curve_secretkey = (k.encode() for k in key_pair)
    push.connect(address)
    return push


def test_only_who_has_the_clusters_key_is_heard(meshes, caplog):
    ours, theirs = Keys.new(), Keys.new()
    hub, member = meshes(keys=ours), meshes(keys=ours)
    pixels = hub.listen(zmq.ROUTER, LOOPBACK)
    addresses = [hub.address, pixels.getsockopt_string(zmq.LAST_ENDPOINT)]
    with zmq.Context() as context:
        strangers = []
        for address in addresses:
            strangers += [
                stranger(context, address),  # no CURVE at all
                stranger(context, address, ours.public, (theirs.public, theirs.secret)),  # knows our public key
                stranger(context, address, theirs.public, (theirs.public, theirs.secret)),
            ]
        strangers.append(context.socket(zmq.PUSH))
        strangers[-1].plain_username, strangers[-1].plain_password = b"hub", b"hub"
        strangers[-1].connect(hub.address)
        for each in strangers:
            each.send(b"let me in")
        member.connect("hub", hub.address)
        member.send("hub", b"a member")
        assert heard(hub, 2, seconds=1.5) == [b"a member"]
        with pytest.raises(zmq.Again):
            pixels.recv(zmq.NOBLOCK)
        for each in strangers:
            each.close(linger=0)
    assert 1 <= caplog.text.count("not a key of this cluster") <= 5
    assert ours.secret not in caplog.text


def test_a_member_does_not_speak_to_who_only_sits_at_the_address(meshes):
    """Not to a listener without CURVE, nor to one with another key pair."""
    ours, theirs = Keys.new(), Keys.new()
    member, plain, other = meshes(keys=ours), meshes(), meshes(keys=theirs)
    for name, mesh in (("plain", plain), ("other", other)):
        member.connect(name, mesh.address)
        member.send(name, b"a secret")
    assert heard(plain, seconds=0.5) == heard(other, seconds=0.5) == []


@pytest.mark.parametrize("secure", [False, True])
def test_long_messages_arrive_whole(secure, meshes, monkeypatch):
    monkeypatch.setattr(mesh_module, "_LONGEST_PART", 1000)
    monkeypatch.setattr(mesh_module, "_CURVE_BYTES", 40)
    keys = Keys.new() if secure else None
    a, b = meshes(keys=keys), meshes(keys=keys)
    a.connect("b", b.address)
    sent = [os.urandom(n) for n in (10, 1000, 1001, 5000)]
    for data in sent:
        a.send("b", data)
    assert heard(b, n=4) == sent


@pytest.mark.parametrize("secure", [False, True])
def test_raw_bytes_and_messages_that_are_too_long_end_only_their_connection(secure, monkeypatch, meshes):
    monkeypatch.setattr(mesh_module, "_LONGEST_PART", 1000)
    keys = Keys.new() if secure else None
    member, b = meshes(keys=keys), meshes(keys=keys)
    host, port = b.address.removeprefix("tcp://").split(":")
    for data in (os.urandom(1000), b"\xff" + b"\x00" * 8 + b"\x01\x7f" + b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(data)
    member.connect("b", b.address)
    member.send("b", b"before")
    wait_until(lambda: b"before" in heard(b))  # without CURVE some of that noise is a message, too
    member._peers["b"].send(b"x" * 3000)  # in one part, as no member does
    assert heard(b, seconds=0.3) == []
    end = time.monotonic() + PATIENCE_S
    got = []
    while not got and time.monotonic() < end:
        member.send("b", b"after")  # what is sent before it has connected again may be lost
        got = heard(b, seconds=0.1)
    assert set(got) == {b"after"}


def test_a_message_to_a_peer_that_is_gone_is_lost_without_waiting(pair):
    a, b = pair
    gone = Mesh(b.address.replace("/b", "/gone") if "ipc" in b.address else LOOPBACK, b._keys)
    a.connect("b", gone.address)
    a.send("b", b"one")
    assert heard(gone) == [b"one"]
    gone.close()
    start = time.monotonic()
    for _ in range(20_000):
        a.send("b", b"x" * 100)
    assert time.monotonic() - start < 5
    a.forget("b")
    a.forget("b")
    a.send("b", b"nobody")


def test_a_peer_that_stops_reading_loses_messages_and_stops_nobody(meshes, monkeypatch, caplog):
    monkeypatch.setattr(mesh_module, "_QUEUE", 10)
    a, b = meshes(), meshes()
    a.connect("b", b.address)
    start = time.monotonic()
    for _ in range(1000):
        a.send("b", b"x" * 100_000)
    assert time.monotonic() - start < 5
    assert "does not read; a message to it is lost" in caplog.text
    assert heard(b)


def test_an_address_that_is_none_is_not_an_error(meshes):
    a = meshes()
    for address in ("", "nowhere", "tcp://:x", "ipc://"):
        a.connect("b", address)
        a.send("b", b"lost")


def test_a_new_address_replaces_the_old_one(meshes):
    a, old, new = meshes(), meshes(), meshes()
    a.connect("b", old.address)
    a.send("b", b"1")
    assert heard(old) == [b"1"]
    a.connect("b", new.address)
    a.send("b", b"2")
    assert heard(new) == [b"2"] and heard(old, seconds=0.1) == []


def traces():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count()


def settled(before):
    end = time.monotonic() + PATIENCE_S
    while traces() != before and time.monotonic() < end:
        time.sleep(0.01)
    return traces()


@pytest.mark.parametrize("secure", [False, True])
def test_close_leaves_no_thread_and_no_descriptor(secure):
    def once():
        keys = Keys.new() if secure else None
        a, b = Mesh(LOOPBACK, keys), Mesh(LOOPBACK, keys)
        a.listen(zmq.ROUTER, LOOPBACK)
        a.connect("b", b.address)
        a.connect("gone", "tcp://127.0.0.1:9")
        a.send("b", b"x")
        a.send("gone", b"x")
        assert heard(b) == [b"x"]
        a.send("b", b"unread")
        a.close()
        b.close()

    once()  # what libraries keep for ever, they have now
    before = traces()
    once()
    assert settled(before) == before


def test_a_wake_after_close_writes_to_nobody(monkeypatch):
    written = []
    monkeypatch.setattr(os, "eventfd_write", lambda fd, _: written.append(fd))
    mesh = Mesh(LOOPBACK)
    mesh.wake()
    mesh.close()
    mesh.wake()
    assert len(written) == 1


def test_a_wake_that_close_overtakes_writes_to_its_own_descriptor(monkeypatch):
    """The thread is held up before it writes, and goes on after the close."""
    mesh, begun, closed, links = Mesh(LOOPBACK), threading.Event(), threading.Event(), []

    def write(fd, _):
        begun.set()
        closed.wait(60)
        links.append((fd, os.readlink(f"/proc/self/fd/{fd}")))

    monkeypatch.setattr(os, "eventfd_write", write)
    thread = threading.Thread(target=mesh.wake, daemon=True)
    thread.start()
    assert begun.wait(60)
    mesh.close()
    closed.set()
    thread.join(60)
    [(fd, link)] = links
    assert link == "anon_inode:[eventfd]"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
