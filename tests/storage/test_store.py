"""Block stores: shapes, views onto the same bytes, zero at first."""

from __future__ import annotations

import gc
import mmap
import os

import pytest
import torch

from hydrainfer.cache import CacheSpec, EmbedSpec, FullSpec, Part
from hydrainfer.storage import BlockStore, Region

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_full_store_is_block_major(dtype):
    spec = FullSpec.of(layers=3, kv_heads=2, head_dim=8, dtype=dtype, block_tokens=4)
    store = BlockStore(spec, 5)
    assert store.bytes.shape == (5, spec.block_bytes) and store.bytes.is_contiguous()
    assert spec.block_bytes == 3 * 2 * 4 * 2 * 8 * store.layers[0]["keys"].element_size()
    assert not store.bytes.any() and store.n_bytes == store.bytes.nbytes == 5 * spec.block_bytes
    layers = [layer["keys"] for layer in store.layers]
    assert [tuple(part.shape) for layer in store.layers for part in layer.values()] == [(5, 4, 2, 8)] * 6
    layers[1][4, 3] = 7
    data = store.bytes.view(layers[0].dtype).view(5, 3, 2, 4, 2, 8)
    assert int(data.sum()) == 7 * 16 and bool((data[4, 1, 0, 3] == 7).all())
    assert layers[0].stride() == layers[2].stride()


def test_parts_of_different_widths_and_types():
    parts = (
        Part("keys", (4, 1, 3), "bfloat16"),
        Part("values", (4, 1, 1), "bfloat16"),
        Part("state", (3,), "float32"),
        Part("tail", (1,), "bfloat16"),
    )
    spec = CacheSpec("mixed", 4, parts, layers=(2, 5))
    assert spec.offsets == (0, 24, 32, 44, 48) and spec.block_bytes == 96
    store = BlockStore(spec, 3)
    for i, layer in enumerate(store.layers):
        for j, part in enumerate(parts):
            view = layer[part.name]
            assert tuple(view.shape) == (3, *part.shape) and str(view.dtype) == f"torch.{part.dtype}"
            view.fill_(1 + 4 * i + j)
    values = [[float(view.flatten()[0]) for view in layer.values()] for layer in store.layers]
    assert values == [[1, 2, 3, 4], [5, 6, 7, 8]], "no part lies in another"


def test_stores_of_one_region_are_views_of_the_same_bytes():
    small = CacheSpec("small", 1, (Part("numbers", (3,), "bfloat16"),), padded_bytes=16)
    large = CacheSpec("large", 1, (Part("numbers", (12,), "float32"),))
    region = Region.of("both", 96)
    one, other = BlockStore(small, 6, region=region), BlockStore(large, 2, region=region)
    one.layers[0]["numbers"][4] = 1.0
    assert not other.layers[0]["numbers"][0].any() and one.bytes[4].any()
    other.layers[0]["numbers"][1] = float("nan")
    region.clear(48, 48)
    assert not other.bytes.any() and tuple(one.layers[0]["numbers"].shape) == (6, 3)


def test_embed_store_rows():
    store = BlockStore(EmbedSpec.of(width=6, dtype="float32", block_tokens=4), 3)
    assert store.rows.shape == (12, 6)
    store.rows[2 * 4 + 1] = torch.arange(6.0)
    assert torch.equal(store.layers[0]["rows"][2, 1], torch.arange(6.0))


def test_a_shared_store_is_a_sealed_nameless_file_as_long_as_it_lives():
    store = BlockStore(EmbedSpec.of(width=6, dtype="float32", block_tokens=4), 300, shared=True)
    store.rows[5] = 1.0
    store.touch()
    assert int(store.rows.sum()) == 6, "touching keeps the bytes"
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
