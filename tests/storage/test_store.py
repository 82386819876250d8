"""Block stores: shapes, views onto the same bytes, zero at first."""

from __future__ import annotations

import gc
import mmap
import os

import pytest
import torch

from hydrainfer.cache import EmbedSpec, FullSpec
from hydrainfer.storage import BlockStore

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_full_store_is_block_major(dtype):
    spec = FullSpec.of(layers=3, kv_heads=2, head_dim=8, dtype=dtype, block_tokens=4)
    store = BlockStore(spec, 5)
    assert store.data.shape == (5, 3, 2, 4, 2, 8) and store.data[2].is_contiguous()
    assert not store.data.any() and store.n_bytes == store.data.nbytes == 5 * spec.block_bytes
    assert len(store.layers) == 3
    store.layers[1][4, 0, 3] = 7
    assert int(store.data.sum()) == 7 * 16 and bool((store.data[4, 1, 0, 3] == 7).all())
    assert store.layers[0].stride() == store.layers[2].stride()


def test_embed_store_rows():
    store = BlockStore(EmbedSpec.of(width=6, dtype="float32", block_tokens=4), 3)
    assert store.rows.shape == (12, 6)
    store.rows[2 * 4 + 1] = torch.arange(6.0)
    assert torch.equal(store.data[2, 1], torch.arange(6.0))


def test_a_shared_store_is_a_sealed_nameless_file_as_long_as_it_lives():
    store = BlockStore(EmbedSpec.of(width=6, dtype="float32", block_tokens=4), 300, shared=True)
    store.rows[5] = 1.0
    store.touch()
    assert int(store.data.sum()) == 6, "touching keeps the bytes"
    path = f"/proc/self/fd/{store.memory.fd}"
    assert store.memory.name in os.readlink(path) and os.stat(path).st_blocks * 512 >= store.n_bytes
    with pytest.raises(OSError):
        os.truncate(path, 0)
    with pytest.raises(OSError), open(path, "r+b") as file:
        mmap.mmap(file.fileno(), store.n_bytes)  # nobody else may write
    del store
    gc.collect()
    assert not os.path.exists(path)


def test_an_empty_store():
    for shared in (False, True):
        assert BlockStore(EmbedSpec.of(width=6, dtype="float32"), 0, shared=shared).rows.shape == (0, 6)
