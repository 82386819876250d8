"""What is decided about a CUDA device at start: memory, attention kernels, communicators, a fence."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from hydrainfer.assemble import engine as assembling
from hydrainfer.assemble.sizes import GIB, cache_sizes
from hydrainfer.checkpoint import read_config
from hydrainfer.config import ServeConfig
from hydrainfer.core import Role
from hydrainfer.ops import select_ops
from hydrainfer.storage import BlockStore, nccl
from tests.cuda.fake import CUDA

pytestmark = pytest.mark.cpu

MODEL = Path(__file__).parents[2] / "configs" / "models" / "llava-1.5-7b"


def test_instances_of_one_process_have_a_share_each(monkeypatch):
    """What the process has reserved is not what one instance has: the second one found no memory."""
    weights, total = 14 * GIB, 80 * GIB
    taken = weights

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - taken, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: taken)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: taken)
    config, described = ServeConfig(model=str(MODEL), gpu_memory_fraction=0.9), read_config(MODEL)
    found = []
    for _ in range(2):
        sizes = cache_sizes(config, described, Role.parse("EPD"), "bfloat16", CUDA, 4096, 0.5, weights)
        found.append(sum(spec.block_bytes * n for spec, n in sizes.blocks.items()))
        taken += found[-1] + weights
    assert found[0] == found[1] > 15 * GIB
    assert sum(found) + 2 * weights < 0.9 * total


def test_memory_that_torch_keeps_and_does_not_use_is_free(monkeypatch):
    """A closed LLM's memory stays reserved as long as a piece of it is in use: the next one found no memory for its
    caches."""
    config, described = ServeConfig(model=str(MODEL), gpu_memory_fraction=0.9), read_config(MODEL)
    found = []
    for reserved, allocated in ((0, 0), (30 * GIB, 14 * GIB), (30 * GIB, 30 * GIB)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, n=reserved: (80 * GIB - n, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device, n=reserved: n)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device, n=allocated: n)
        sizes = cache_sizes(config, described, Role.parse("EPD"), "bfloat16", CUDA, 4096, 1.0, 0)
        found.append(sum(spec.block_bytes * n for spec, n in sizes.blocks.items()))
    assert [round((found[0] - n) / GIB, 1) for n in found] == [0.0, 14.0, 30.0]


def test_cudnn_makes_no_plan_per_shape():
    was = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        select_ops("cpu", torch.bfloat16, 128)
        assert torch.backends.cuda.cudnn_sdp_enabled(), "a CPU does not mind"
        select_ops(CUDA, torch.bfloat16, 128)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)


def test_communicators_have_time_to_begin_and_little_memory(monkeypatch):
    made = []

    class Group:
        class Options:
            def __init__(self) -> None:
                self.config = SimpleNamespace()

        def __init__(self, store, rank, size, options) -> None:
            made.append(options)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    for name in [*nccl._WATCHDOG_OFF, "TORCH_NCCL_NONBLOCKING_TIMEOUT"]:
        monkeypatch.setenv(name, "")  # given back afterwards
        del os.environ[name]
    nccl.NCCL.make(None, 0, "127.0.0.1", 2.0)
    assert int(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"]) >= 20
    assert 1 <= made[0].config.max_ctas <= 16 and made[0].config.blocking == 0


def test_lanes_begin_after_what_was_set_up(monkeypatch):
    """Stores are zeroed on the default stream; the streams of lanes and copies wait for no other."""
    steps = []

    class Stop(Exception):
        pass

    def scheduler(*_):
        steps.append("scheduler")
        raise Stop

    def store(*args):
        steps.append("store")
        return BlockStore(args[0], 1)

    monkeypatch.setattr(assembling, "torch_device", lambda config: CUDA)
    monkeypatch.setattr(assembling, "load_for", lambda *args: SimpleNamespace(weight_bytes=0))
    monkeypatch.setattr(assembling, "BlockStore", store)
    monkeypatch.setattr(assembling, "_scheduler", scheduler)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: steps.append("fence"))
    around = SimpleNamespace(node=None)
    with pytest.raises(Stop):
        assembling.build_engine(
            ServeConfig(model=str(MODEL)), read_config(MODEL), Role.parse("EPD"), around, assembling.Sizing(512)
        )
    assert steps == ["store", "store", "fence", "scheduler"]
