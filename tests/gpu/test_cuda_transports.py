"""Transports between stores on CUDA: two processes on one GPU, NCCL between two."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch

from hydrainfer.cache import DEVICE, Pulls
from hydrainfer.ops import block_copier
from hydrainfer.storage import BlockStore, Exports, LocalExports, Routes, StorePuller, needs_shared
from tests.storage.peers import SECRET, SPECS, content

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

IDS, INTO = [7, 0, 1, 2, 5], [0, 1, 2, 3, 4]


class Instance:
    def __init__(self, owner, transport, device, seed=None) -> None:
        shared = needs_shared(transport, torch.device(device))
        self.stores = {name: BlockStore(spec, 9, device, shared) for name, spec in SPECS.items()}
        if seed is not None:
            for name, store in self.stores.items():
                store.bytes.copy_(content(name, 9, seed))
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        local = LocalExports()
        self.exports = Exports(
            owner, self.stores, transport, secret=SECRET, local=local if transport == "local" else None
        )
        self.woken = threading.Event()
        copy_blocks = block_copier(torch.device(device))
        routes = Routes(transport, device, secret=SECRET, local=local, copy_blocks=copy_blocks)
        self.puller = StorePuller({DEVICE: self.stores}, self.exports, routes, self.woken.set)

    def pull(self, handles):
        self.woken.clear()
        copy = self.puller.pull(handles, Pulls(DEVICE, dict.fromkeys(handles, (IDS, INTO))))
        assert self.woken.wait(30)
        return copy.done


def offer(pipe, transport, device, seed):
    instance = Instance("E0:1", transport, device, seed)
    pipe.send(instance.exports.handles)
    pipe.recv()
    instance.puller.close()


@pytest.mark.parametrize("transport", ["one-sided", "tcp", "auto"])
def test_blocks_of_another_process_on_the_same_device(device, transport):
    if transport == "one-sided":
        transport = "cuda-ipc" if device.type == "cuda" else "shared-memory"
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    peer = context.Process(target=offer, args=(theirs, transport, str(device), 1), daemon=True)
    peer.start()
    assert pipe.poll(120)
    handles = pipe.recv()
    us = Instance("P0:1", transport, device)
    for _ in range(3):
        assert us.pull(handles) is True
    for name, store in us.stores.items():
        assert torch.equal(store.bytes[INTO].cpu(), content(name, 9, 1)[IDS])
        assert not store.bytes[5:].any()
    us.puller.close()
    pipe.send(None)
    peer.join(30)
    assert peer.exitcode == 0


def test_local_copies(device):
    us = Instance("E0:1", "local", device, 2)
    before = {name: store.bytes.clone() for name, store in us.stores.items()}
    ids, into = [5, 7, 6], [0, 1, 3]
    us.woken.clear()
    copy = us.puller.pull(us.exports.handles, Pulls(DEVICE, dict.fromkeys(us.exports.handles, (ids, into))))
    assert us.woken.wait(30) and copy.done is True
    for name, store in us.stores.items():
        assert torch.equal(store.bytes[into], before[name][ids])
    us.puller.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU per rank")
def test_nccl_between_two_gpus():
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    peer = context.Process(target=offer, args=(theirs, "nccl", "cuda:0", 1), daemon=True)
    peer.start()
    assert pipe.poll(120)
    handles = pipe.recv()
    with torch.cuda.device(1):
        us = Instance("P0:1", "nccl", "cuda:1")
        assert us.pull(handles) is True
        for name, store in us.stores.items():
            assert torch.equal(store.bytes[INTO].cpu(), content(name, 9, 1)[IDS])
        us.puller.close()
    pipe.send(None)
    peer.join(30)
