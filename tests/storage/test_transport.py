"""Copies of blocks between stores within one process, through every transport that runs here."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from hydrainfer.cache import DEVICE, EmbedSpec, FullSpec, Pulls
from hydrainfer.core import ConfigError, ExportHandle
from hydrainfer.storage import BlockStore, Exports, LocalExports, Region, Routes, StorePuller, needs_shared
from hydrainfer.storage.places import here, ways_here
from hydrainfer.storage.tcp import shares
from hydrainfer.storage.transport import BlockRun, runs
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(60)]

TRANSPORTS = ["local", "shared-memory", "gloo", "tcp"]
SECRET = b"of this cluster"
SPECS = {
    "kv": FullSpec.of(layers=3, kv_heads=2, head_dim=8, dtype="float32", block_tokens=4),
    "kv16": FullSpec.of(layers=2, kv_heads=1, head_dim=4, dtype="bfloat16", block_tokens=2),
    "embed": EmbedSpec.of(width=6, dtype="float32", block_tokens=4),
}
LARGE = EmbedSpec.of(width=4096, dtype="float32", block_tokens=64)  # blocks of 1 MiB


def stores(n, transport, specs=SPECS, fill=True):
    """Those that are filled lie in one region, as those of caches that lend each other memory."""
    shared, region = needs_shared(transport, torch.device("cpu")), None
    if fill:
        region = Region.of("all", n * max(spec.block_bytes for spec in specs.values()), shared=shared)
        region.bytes.copy_(torch.randint(0, 256, region.bytes.shape, dtype=torch.uint8))
    return {name: BlockStore(spec, n, shared=shared, region=region) for name, spec in specs.items()}


class Rig:
    """Two instances' stores, all specs, random bytes in the source's."""

    def __init__(self, transport, specs=SPECS, timeout_s=5.0) -> None:
        self.source, self.target = stores(9, transport, specs), stores(7, transport, specs, fill=False)
        self.woken = threading.Event()
        options = {"secret": SECRET, "local": LocalExports(), "timeout_s": timeout_s}
        self.exports = Exports("E0:173", self.source, transport, **options)
        self.routes = Routes(transport, **options)
        self.handles = self.exports.handles
        self.puller = StorePuller({DEVICE: self.target}, Exports("P0:1", {}, "local"), self.routes, self.woken.set)

    def pull(self, pulls, handles=None):
        self.woken.clear()
        copy = self.puller.pull(handles or {name: self.handles[name] for name in pulls}, Pulls(DEVICE, pulls))
        assert self.woken.wait(PATIENCE_S)
        return copy.poll(0.0)

    def close(self):
        self.puller.close()
        self.exports.close()


@pytest.fixture(params=TRANSPORTS)
def rig(request):
    made = Rig(request.param)
    yield made
    made.close()


def equal(got, sent):
    return torch.equal(got.view(torch.uint8), sent.view(torch.uint8))  # as bytes: a NaN is not equal to itself


@pytest.mark.parametrize("pairs", [[(0, 0)], [(8, 6), (7, 5), (0, 0)], [(1, 2), (2, 3), (3, 4), (5, 0), (6, 1)]])
def test_whole_blocks_arrive_and_nothing_else_changes(rig, pairs):
    ids, into = [a for a, _ in pairs], [b for _, b in pairs]
    assert rig.pull(dict.fromkeys(SPECS, (ids, into))) is True
    for name in SPECS:
        got, sent = rig.target[name].bytes, rig.source[name].bytes
        for a, b in pairs:
            assert equal(got[b], sent[a])
        for b in set(range(7)) - set(into):
            assert not got[b].any()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_copies_larger_than_any_buffer(transport):
    rig = Rig(transport, {"embed": LARGE})
    for ids in ([8, 0, 1, 2, 5, 6, 7], list(range(7))):
        assert rig.pull({"embed": (ids, list(range(7)))}) is True
        assert equal(rig.target["embed"].bytes, rig.source["embed"].bytes[ids])
    rig.close()


def test_an_impossible_copy_fails_and_the_next_one_works(rig):
    kv = rig.handles["kv"]
    change = msgspec.structs.replace
    wrong = [
        (kv, [9], [0]),
        (kv, [-1], [0]),
        (kv, [1], [7]),
        (kv, [1, 2], [0]),
        (change(kv, n_blocks=100), [50], [0]),  # the source knows better
        (change(kv, block_bytes=64), [1], [0]),
        (change(kv, ways={}), [1], [0]),
    ]
    for handle, ids, into in wrong:
        before = rig.target["kv"].bytes.clone()
        assert rig.pull({"kv": (ids, into)}, {"kv": handle}) is False, (handle, ids, into)
        assert equal(rig.target["kv"].bytes, before)
    assert rig.pull({"kv": ([1], [0])}) is True
    assert equal(rig.target["kv"].bytes[0], rig.source["kv"].bytes[1])


def test_handles_of_two_owners_are_no_offer(rig):
    other = msgspec.structs.replace(rig.handles["embed"], owner="E1:1")
    assert rig.pull({"kv": ([1], [0]), "embed": ([1], [0])}, {"kv": rig.handles["kv"], "embed": other}) is False


def traces():
    gc.collect()
    mine = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
    named = {t for t in threading.enumerate() if t.name.startswith("hydrainfer")}
    return (
        len(os.listdir("/proc/self/fd")),
        named,
        {m for m in mine if "hydrainfer" in m},
        len(os.listdir("/proc/self/task")),
    )


def settle(before):
    wait_until(lambda: traces() == before, say=traces)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_forget_and_close_leave_nothing_behind(transport):
    Rig(transport).close()  # what libraries keep for ever, they have now
    before = traces()
    rig = Rig(transport)
    after_start = traces()
    assert rig.pull(dict.fromkeys(SPECS, ([1], [0]))) is True
    rig.puller.forget("E0:173")
    settle(after_start)
    assert rig.pull(dict.fromkeys(SPECS, ([1], [0]))) is False, "a dead incarnation stays dead"
    rig.close()
    rig.close()
    del rig
    settle(before)


def test_handles_are_small_and_tell_what_a_peer_needs():
    made = stores(5, "auto")
    exports = Exports("EPD12:1732", made, "auto", secret=SECRET, local=LocalExports())
    for name, handle in exports.handles.items():
        assert (handle.n_blocks, handle.block_bytes) == (5, SPECS[name].block_bytes)
        assert list(handle.ways) == ["local", "shared-memory", "tcp"]
        data = msgspec.msgpack.encode(handle)
        assert len(data) < 300 and msgspec.msgpack.decode(data, type=ExportHandle) == handle
    exports.close()


def test_auto_takes_the_shortest_way_there_is(caplog):
    caplog.set_level("INFO")
    ways = {"local": "", "shared-memory": "", "cuda-ipc": "", "tcp": ""}
    here_, cpu, cuda = here(), torch.device("cpu"), torch.device("cuda")
    mine = ExportHandle("E0:1", here_.host, here_.process, ways=ways)
    beside, far = msgspec.structs.replace(mine, process="1:1"), msgspec.structs.replace(mine, host="h", process="1:1")
    on_gpu = msgspec.structs.replace(beside, device="cuda:GPU-1")
    names = lambda handle, device: [name for name, _ in ways_here(handle, here_, device)]  # noqa: E731
    assert names(mine, cpu) == ["local", "shared-memory", "tcp"] and names(beside, cpu) == ["shared-memory", "tcp"]
    assert names(far, cpu) == names(beside, cuda) == names(on_gpu, cpu) == ["tcp"]
    assert names(on_gpu, cuda) == ["cuda-ipc", "tcp"]

    rig = Rig("auto")
    for _ in range(2):
        assert rig.pull({"kv": ([1], [0])}) is True
    rig.routes.forget("E0:173")
    apart = {"kv": msgspec.structs.replace(rig.handles["kv"], process="1:1")}
    assert rig.pull({"kv": ([2], [0])}, apart) is True
    rig.routes.forget("E0:173")
    rig.source["kv"].memory.close()  # as when it is another user's
    assert rig.pull({"kv": ([3], [0])}, apart) is True and equal(rig.target["kv"].bytes[0], rig.source["kv"].bytes[3])
    said = [r.getMessage() for r in caplog.records if "pulling" in r.getMessage()]
    assert [s.split(":")[1].split(" over ")[1] for s in said] == ["local", "shared-memory", "tcp"], said
    rig.close()


def test_memory_of_another_incarnation_is_refused():
    """A recycled pid and descriptor lead to a file, but not to the one that was offered."""
    rig, other = Rig("shared-memory"), stores(9, "shared-memory")
    address = rig.handles["kv"].ways["shared-memory"].split("/")
    address[1] = str(other["kv"].memory.fd)
    recycled = msgspec.structs.replace(rig.handles["kv"], ways={"shared-memory": "/".join(address)})
    assert rig.pull({"kv": ([1], [0])}, {"kv": recycled}) is False
    assert not rig.target["kv"].bytes.any()
    rig.close()


def test_the_importers_view_is_read_only():
    rig = Rig("shared-memory")
    assert rig.pull({"kv": ([1], [0])}) is True
    maps = [m.split() for m in Path("/proc/self/maps").read_text().splitlines() if rig.source["kv"].memory.name in m]
    assert sorted(m[1] for m in maps) == ["r--s", "rw-s"], maps
    rig.close()


@pytest.mark.parametrize(
    ("transport", "device", "says"),
    [
        ("nccl", "cpu", "needs caches on CUDA, .* use gloo or auto"),
        ("cuda-ipc", "cpu", "needs caches on CUDA, .* use shared-memory or auto"),
        ("shared-memory", "cuda", "needs caches on the CPU, .* use cuda-ipc or auto"),
        ("gloo", "cuda", "needs caches on the CPU, .* use nccl or auto"),
        ("carrier-pigeon", "cpu", "unknown; use one of auto, local"),
    ],
)
def test_impossible_transports_are_refused_at_start(transport, device, says):
    with pytest.raises(ConfigError, match=says):
        Routes(transport, device, secret=SECRET)


def test_a_server_wants_a_secret_and_an_address_that_peers_can_use():
    with pytest.raises(ConfigError, match="secret"):
        Exports("E0:1", stores(2, "tcp"), "tcp")
    with pytest.raises(ConfigError, match="wildcard"):
        Exports("E0:1", stores(2, "tcp"), "tcp", host="0.0.0.0", secret=SECRET)


def test_neighbours_move_in_one_copy():
    assert list(runs([1, 2, 3, 7, 8, 4], [5, 6, 7, 8, 9, 0])) == [(1, 5, 3), (7, 8, 2), (4, 0, 1)]
    assert list(runs([], [])) == [] and list(runs([3], [1])) == [(3, 1, 1)]


def test_connections_share_the_blocks():
    pieces = [BlockRun(1, 5, 3), BlockRun(7, 8, 2), BlockRun(4, 0, 1)]
    assert list(shares(pieces, 2)) == [[(1, 5, 3)], [(7, 8, 2), (4, 0, 1)]]
    assert list(shares(pieces, 4)) == [[(1, 5, 2)], [(3, 7, 1), (7, 8, 1)], [(8, 9, 1), (4, 0, 1)]]
    assert list(shares(pieces[:1], 1)) == [pieces[:1]]
