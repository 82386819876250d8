"""What is decided about a CUDA device at start: memory, attention kernels, communicators, a fence."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import distributed as dist

from hydrainfer.assemble import engine as assembling
from hydrainfer.assemble.model import attention_and_graphs
from hydrainfer.assemble.sizes import GIB, cache_sizes
from hydrainfer.config import ServeConfig
from hydrainfer.core import Lane, Role
from hydrainfer.families import read_config
from hydrainfer.ops import build as building
from hydrainfer.ops import select_ops, settle
from hydrainfer.runtime import graphs
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
    """Stores are zeroed on the default stream; the streams of lanes and copies wait for no other. A wait for the whole
    device would break the graphs that another instance captures."""
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
    stream = SimpleNamespace(synchronize=lambda: steps.append("fence"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    around = SimpleNamespace(node=None, grammars=None)
    with pytest.raises(Stop):
        assembling.build_engine(
            ServeConfig(model=str(MODEL)), read_config(MODEL), Role.parse("EPD"), around, assembling.Sizing(512)
        )
    assert steps == ["store", "store", "fence", "scheduler"]


def test_instances_of_one_process_capture_one_after_the_other(monkeypatch):
    """A wait for the whole device, which also begins a capture, breaks what another thread captures: 20 starts of two
    instances, whose stores are set up while the other one may capture."""
    inside, broken, lock = [0], [], threading.Lock()

    def exclusive() -> None:
        if inside[0]:
            broken.append("capture invalidated")

    @contextmanager
    def graph(*_, capture_error_mode, **options):
        assert capture_error_mode == "thread_local"
        exclusive()
        with lock:
            inside[0] += 1
        time.sleep(0.001)
        yield
        with lock:
            inside[0] -= 1

    stream = SimpleNamespace(synchronize=exclusive)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)

    def start(ready: threading.Barrier) -> None:
        capture = graphs._cuda_capture()
        ready.wait()
        settle(CUDA)
        for _ in range(5):
            capture(lambda: torch.zeros(1))

    for _ in range(20):
        ready = threading.Barrier(2)
        instances = [threading.Thread(target=start, args=(ready,)) for _ in range(2)]
        for each in instances:
            each.start()
        for each in instances:
            each.join()
    assert not broken and not inside[0]


def test_the_start_says_what_attends_and_what_is_replayed():
    config = ServeConfig(model=str(MODEL))
    runners = {lane: SimpleNamespace(has_graphs=lane is Lane.VISION) for lane in Lane}

    def said(attention: str, **options) -> tuple[str, str]:
        ops = SimpleNamespace(chosen=(("attention", attention),), captures=attention == "flashinfer")
        model = SimpleNamespace(
            config=read_config(MODEL), role=Role.parse("EPD"), dtype=torch.bfloat16, device=CUDA, ops=ops, vision=None
        )
        return attention_and_graphs(msgspec.structs.replace(config, **options), model, runners)

    assert said("flashinfer") == ("kv: flashinfer", "pictures: replayed\ndecodes: not replayed, capturing failed")
    assert said("torch-sdpa") == (
        "kv: torch-sdpa",
        "pictures: replayed\ndecodes: not replayed, attention is not FlashInfer's",
    )
    assert "decodes: not replayed, cuda_graphs is off" in said("flashinfer", cuda_graphs=False)[1]


@pytest.mark.parametrize(
    ("name", "experts", "reason"),
    [
        ("llava-1.5-7b", "reference", ""),
        ("gpt-oss-20b", "torch-grouped", ""),
        ("gpt-oss-20b", "reference", "experts wait for the device"),
        ("qwen3.5-9b", "reference", "recurrent states without our CUDA kernels"),
    ],
)
def test_steps_are_captured_unless_an_operator_waits(name, experts, reason):
    ops = replace(
        select_ops("cpu", torch.bfloat16, 64, use_native=False),
        chosen=(("attention", "flashinfer"), ("experts", experts)),
    )
    model = SimpleNamespace(config=read_config(MODEL.with_name(name)), device=CUDA, ops=ops)
    assert graphs.no_graphs(model) == reason


def test_kernels_are_built_once_for_an_architecture(monkeypatch, tmp_path):
    """Two kinds of GPU that share a home; a library that was built elsewhere is loaded without a compiler."""
    built, loaded = [], []

    def compiles(name, *, sources, build_directory, **options):
        built.append((build_directory, os.environ["TVM_FFI_CUDA_ARCH_LIST"]))
        return name

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TVM_FFI_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setattr("tvm_ffi.cpp.load", compiles)
    monkeypatch.setattr("tvm_ffi.cpp.build", compiles)
    monkeypatch.setattr("tvm_ffi.load_module", loaded.append)
    monkeypatch.setattr(building, "nvcc", lambda: "/cuda/bin/nvcc")
    library = building.build_cuda_kernels()  # no GPU: as the environment says
    assert built == [(str(library.parent), "9.0")] and not loaded
    monkeypatch.setattr(building, "nvcc", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for capability, wanted in (((9, 0), ()), ((8, 0), "no nvcc found")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, now=capability: now)
        assert all(wanted in note for note in building.load_cuda_kernels()[1])
    assert loaded == [str(library)] and len(built) == 1, "the GPU says what it is, whatever the environment says"
    monkeypatch.setattr(building, "nvcc", lambda: "/other/bin/nvcc")
    assert building.load_cuda_kernels() == ("hydra_cuda", ())
    assert built[1] != built[0] and built[1][1] == "8.0"
    assert os.environ["TVM_FFI_CUDA_ARCH_LIST"] == "9.0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TVM_FFI_CUDA_ARCH_LIST")
    assert "no GPU found" in building.load_cuda_kernels()[1][0]
