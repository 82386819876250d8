"""Transports and channels of somebody else, added without a change of the package."""

import socket
import threading
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

from hydrainfer.config import ServeConfig
from hydrainfer.core import ConfigError
from hydrainfer.storage import WAYS, Way, check_transport
from hydrainfer.storage.packets import Attach
from hydrainfer.storage.transport import Unreachable, pieces_of
from hydrainfer.storage.wire import PeerSocket, Plain, admit, enter
from tests.storage.peers import SECRET, Instance
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.unit


class FileTransport:
    """Reads the blocks from the file that the source has written them to."""

    def copy(self, source, source_ids, store, ids):
        try:
            bytes_ = np.fromfile(source.ways["file"], np.uint8).reshape(source.n_blocks, source.block_bytes)
        except OSError as e:
            raise Unreachable(str(e)) from e
        for first, into, n in pieces_of(source, source_ids, store, ids):
            store.bytes[into : into + n] = torch.from_numpy(bytes_[first : first + n])

    def forget(self, owner):
        pass

    def close(self):
        pass


@pytest.fixture
def way(tmp_path, monkeypatch):
    def offer(key, store, tools):
        path = tmp_path / key.replace("/", "_")
        store.bytes.numpy().tofile(path)
        return str(path)

    made = Way(
        "file",
        lambda device: "" if device.type == "cpu" else "CPU only",
        offer,
        lambda *_: "a file",
        lambda _: FileTransport(),
    )
    monkeypatch.setitem(WAYS, "file", made)
    return made


def test_a_transport_is_added_from_outside(way):
    source, target = Instance("E0:1", "file", seed=1), Instance("P0:1", "file", seed=2)
    assert source.handles["kv"].ways.keys() == {"file"}
    assert target.pull(source.handles, [3, 4, 0], [9, 12, 8], seed=1)
    source.close()
    target.close()
    with pytest.raises(ConfigError, match="CPU only"):
        check_transport("file", torch.device("cuda"))


def test_auto_uses_an_added_way_if_the_better_ones_fail(way, monkeypatch):
    source, target = Instance("E0:1", "auto", seed=1), Instance("P0:1", "auto", seed=2)
    assert source.handles["kv"].ways.keys() == {"shared-memory", "tcp", "file"}
    for name in ("shared-memory", "tcp"):
        monkeypatch.setitem(WAYS, name, WAYS[name]._replace(reaches=lambda *_: ""))
    assert target.pull(source.handles, [3, 4, 0], [9, 12, 8], seed=1)
    assert target.puller._transport._chosen == {"E0:1": "file"}
    source.close()
    target.close()


def test_the_options_of_transport_are_the_table_of_ways():
    hint = get_type_hints(ServeConfig)["transport"]
    assert set(get_args(hint)) == {"auto", *WAYS}


class Masked(Plain):
    """A channel that changes every byte on its way."""

    def fill(self, views):
        n = left = super().fill(views)
        for view in views:
            for i in range(min(left, view.nbytes)):
                view[i] ^= 0x5A
            left = max(0, left - view.nbytes)
        return n

    def drain(self, views):
        return self._sock.send(bytes(b ^ 0x5A for b in views[0]))


def test_a_connection_speaks_through_its_channel():
    ours, theirs = socket.create_server(("127.0.0.1", 0)), []
    client = socket.create_connection(ours.getsockname())
    server = PeerSocket(ours.accept()[0], Masked)
    thread = threading.Thread(target=lambda: (admit(server, SECRET), theirs.append(server.receive())))
    thread.start()
    enter(PeerSocket(client, Masked), SECRET, "E0:1")
    thread.join(PATIENCE_S)
    assert theirs == [Attach("E0:1")]
    server.send_bytes(b"blocks")
    assert PeerSocket(client).exactly(6) != b"blocks"
    for closed in (client, server, ours):
        closed.close()
