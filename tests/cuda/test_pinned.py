"""Host memory that a GPU copies from and to: exactly the bytes asked for are pinned, as long as they are in use."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from hydrainfer.cache import FullSpec
from hydrainfer.storage import BlockStore

pytestmark = pytest.mark.cpu
SPEC = FullSpec.of(layers=2, kv_heads=2, head_dim=32, dtype="float32")


class Runtime:
    """torch's face of the CUDA runtime, which pins whole ranges; `refuses`: the error that it answers with."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.refuses = 0

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:
        assert flags == 1, "every context may use it"
        if not self.refuses:
            self.pinned[address] = n_bytes
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.string_at(address, self.pinned.pop(address))  # still mapped
        return 0


@pytest.fixture
def runtime(monkeypatch):
    found = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


def test_only_the_bytes_asked_for_are_pinned(runtime):
    """Not the next power of two: 40 GiB would be 64."""
    store = BlockStore(SPEC, 5, pinned=True)
    assert runtime.pinned == {store.bytes.data_ptr(): 5 * SPEC.block_bytes}
    assert not store.bytes.any()
    store.layers[1]["keys"][2] = 7.0
    assert (store.bytes[2].view(torch.float32) == 7.0).any()


def test_memory_is_unpinned_once_no_view_of_it_is_left(runtime):
    store = BlockStore(SPEC, 5, pinned=True)
    rows = store.layers[0]["keys"]
    del store
    gc.collect()
    assert runtime.pinned, "a copy may still go on"
    rows.fill_(1.0)
    del rows
    gc.collect()
    assert not runtime.pinned


def test_memory_that_cannot_be_pinned_is_an_error(runtime):
    runtime.refuses = 2
    with pytest.raises(MemoryError, match="cannot be pinned: CUDA error 2"):
        BlockStore(SPEC, 5, pinned=True)
    assert not runtime.pinned
