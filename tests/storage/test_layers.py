"""Copies of blocks layer by layer: in the order of the layers, whatever their caches, each marked where it is there."""

import threading

import msgspec
import pytest
import torch

from hydrainfer.cache import DEVICE, HOST, EmbedSpec, FullSpec, Pulls
from hydrainfer.storage import BlockStore, LayerLoader
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.cpu
SIZES = {"kv_heads": 2, "head_dim": 8, "dtype": "bfloat16", "block_tokens": 4}


class Stream:
    """Copies at once, and notes what was enqueued, and which marks are waited for."""

    def __init__(self):
        self.copies, self.waited, self.fails = [], [], False

    def copy(self, to, to_ids, source, source_ids):
        if self.fails:
            raise RuntimeError("broken by a test")
        self.copies.append(to_ids.tolist())
        to[to_ids] = source[source_ids]

    def mark(self):
        return Mark(self, len(self.copies))


class Mark:
    def __init__(self, stream, place):
        self.stream, self.place = stream, place

    def wait(self):
        self.stream.waited.append(self.place)

    def synchronize(self):
        pass


def rig(specs, n=8):
    """Stores of host and device, a loader between them, its stream, and a function that waits for the next call of
    `wake`."""
    host, device = ({spec.name: BlockStore(spec, n) for spec in specs} for _ in range(2))
    for i, store in enumerate(host.values()):
        draw = torch.Generator().manual_seed(i)
        store.bytes.copy_(torch.randint(1, 256, store.bytes.shape, dtype=torch.uint8, generator=draw))
    stream, woken = Stream(), threading.Semaphore(0)
    loader = LayerLoader(host, device, lambda: stream, woken.release)
    return host, device, loader, stream, lambda: woken.acquire(timeout=PATIENCE_S)


def of_layers(name, layers, **more):
    return msgspec.structs.replace(FullSpec.of(layers=1, **SIZES), name=name, layers=layers, **more)


def test_layers_of_several_caches_come_in_the_order_of_the_model():
    full, window = of_layers("kv", (0, 2, 5)), of_layers("window", (1, 3, 4), window=8)
    host, device, loader, stream, woken = rig([full, window])
    ids = {full.name: ([1, 5], [2, 0]), window.name: ([3], [7])}
    copy = loader.begin(HOST, Pulls(DEVICE, ids), 0.0)
    assert woken() and woken()
    assert copy.poll(0.0) is True
    assert stream.copies == [[6, 0], [21], [7, 1], [22], [23], [8, 2]], "row = block times layers, plus the layer"
    for layer in range(7):
        copy.wait_for(layer)  # the last one has nothing to wait for
    assert stream.waited == [1, 2, 3, 4, 5, 6]
    for name, (theirs, ours) in ids.items():
        assert torch.equal(device[name].bytes[ours], host[name].bytes[theirs])
        others = [block for block in range(8) if block not in ours]
        assert not device[name].bytes[others].any()
    loader.close()
    loader.close()


def test_pictures_are_there_with_the_first_layer():
    embed, full = EmbedSpec.of(width=64, dtype="float32", block_tokens=4), FullSpec.of(layers=2, **SIZES)
    host, device, loader, stream, woken = rig([embed, full])
    copy = loader.begin(HOST, Pulls(DEVICE, {embed.name: ([1], [2]), full.name: ([3], [4])}), 0.0)
    assert woken() and woken()
    copy.wait_for(0)
    assert stream.waited == [2] and len(stream.copies) == 3
    assert torch.equal(device[embed.name].bytes[2], host[embed.name].bytes[1])
    loader.close()


def test_without_a_queue_copies_fail_until_there_is_one():
    """A GPU without memory for another stream, for example."""
    full, tries = FullSpec.of(layers=2, **SIZES), []
    host, device = ({full.name: BlockStore(full, 8)} for _ in range(2))

    def make_queue():
        tries.append(True)
        if len(tries) == 1:
            raise MemoryError("made by a test")
        return Stream()

    woken = threading.Semaphore(0)
    loader = LayerLoader(host, device, make_queue, woken.release)
    pulls = Pulls(DEVICE, {full.name: ([1], [2])})
    first = loader.begin(HOST, pulls, 0.0)
    assert woken.acquire(timeout=PATIENCE_S) and first.poll(0.0) is False
    second = loader.begin(HOST, pulls, 0.0)
    assert woken.acquire(timeout=PATIENCE_S) and woken.acquire(timeout=PATIENCE_S) and second.poll(0.0) is True
    loader.close()


def test_a_copy_that_cannot_be_enqueued_has_failed_and_the_next_one_has_not():
    full = FullSpec.of(layers=2, **SIZES)
    _, _, loader, stream, woken = rig([full])
    stream.fails = True
    first = loader.begin(HOST, Pulls(DEVICE, {full.name: ([1], [2])}), 0.0)
    assert woken()
    assert first.poll(0.0) is False and first.wait_for is None
    stream.fails = False
    second = loader.begin(HOST, Pulls(DEVICE, {full.name: ([1], [2])}), 0.0)
    assert woken() and woken()
    assert second.poll(0.0) is True
    loader.close()


def test_blocks_whose_padding_is_no_layer_come_whole_before_the_first():
    layer_bytes = FullSpec.of(layers=1, **SIZES).block_bytes
    for n_more, n_copies in ((layer_bytes, 2), (16, 1)):
        spec = of_layers("kv", (0, 1), padded_bytes=2 * layer_bytes + n_more)
        host, device, loader, stream, woken = rig([spec])
        copy = loader.begin(HOST, Pulls(DEVICE, {"kv": ([4, 2], [1, 3])}), 0.0)
        assert woken() and woken() and len(stream.copies) == n_copies
        copy.wait_for(0)
        assert stream.waited == [1]
        assert torch.equal(device["kv"].bytes[[1, 3], : 2 * layer_bytes], host["kv"].bytes[[4, 2], : 2 * layer_bytes])
        loader.close()
