"""What a planner's measurement asks of a GPU: its own transports and sizes, and no copy faster than the link."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hydrainfer.assemble.sizes import GIB
from hydrainfer.cache import CacheSpec
from hydrainfer.config import ServeConfig
from hydrainfer.core import ConfigError, Lane, Role
from hydrainfer.costing import copies, measure, rig
from hydrainfer.costing.grid import GPU_GRID, Case, blocks_of, bytes_of, pool_for, tokens_of
from hydrainfer.costing.rig import pictures_of, specs_for
from hydrainfer.families import read_config
from hydrainfer.models import cache_specs
from hydrainfer.planner.costs import BatchShape, Copies
from hydrainfer.storage import BlockStore
from tests.cuda.fake import CUDA

pytestmark = pytest.mark.cpu
MODELS = Path(__file__).parents[2] / "configs" / "models"


@pytest.mark.parametrize(
    ("gpu", "gb_per_s"), [("NVIDIA H200", 450), ("NVIDIA H100 80GB HBM3", 450), ("NVIDIA H20", 450), ("GTX 9", None)]
)
def test_the_link_is_of_the_data_sheet(gpu, gb_per_s):
    link = copies.link_of_gpu(gpu)
    assert (link is None) if gb_per_s is None else 0.25 * gb_per_s * 1e9 < link <= gb_per_s * 1e9


def test_copies_within_one_gpu_are_no_faster_than_the_link(monkeypatch):
    def by(transport, device, spec, sizes, seconds):
        return [Copies(transport=transport, n_bytes=1 << 30, n=3, p50_s=1e-4, p90_s=2e-4)]

    monkeypatch.setattr(copies, "_by", by)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    spec = type("Spec", (), {"block_bytes": 1 << 20})
    ipc, tcp = copies.measure_copies([spec], ["cuda-ipc", "tcp"], "cuda", 1.0)
    assert ipc.p50_s >= (1 << 30) / 450e9 and tcp.p50_s == 1e-4


class Loaded:
    """A model of which only the description is read."""

    weight_bytes, role = 0, Role.parse("EPD")

    def __init__(self, config: ServeConfig) -> None:
        self.config, self.device, self.dtype = read_config(Path(config.model)), CUDA, torch.bfloat16

    def cache_specs(self, kv_block_tokens: int) -> tuple[CacheSpec, ...]:
        return cache_specs(self.config, Role.parse("EPD"), "bfloat16", kv_block_tokens)


@pytest.fixture
def gpu(monkeypatch):
    """A function that says how much memory is free beside the workspace."""

    def has(gib: float) -> None:
        monkeypatch.setattr(measure, "workspace_bytes", lambda *_: 3 * GIB)
        monkeypatch.setattr(measure, "free_bytes", lambda *_: (gib + 3) * GIB)

    monkeypatch.setattr(measure, "torch_device", lambda config: CUDA)
    monkeypatch.setattr(measure, "load_whole", Loaded)
    return has


def kinds_of(cases: Sequence[Case]) -> set[str]:
    found = set()
    for work, beside in cases:
        found |= {
            kind
            for kind, here in {
                "beside": beside is not None,
                "encode": work.is_vision,
                "prefill": work.chunk and not work.decodes and not work.start,
                "later prefill": work.chunk and work.start,
                "decode": work.decodes and not work.chunk,
                "mixed": work.decodes and work.chunk,
            }.items()
            if here
        }
    return found


@pytest.mark.parametrize("gib", [60, 120])
@pytest.mark.parametrize("name", ["llava-1.5-7b", "qwen2-vl-7b", "qwen3-vl-8b", "llama-3.1-8b"])
def test_batches_that_fit_the_gpu_are_measured(gpu, monkeypatch, name, gib):
    """A place for the longest context of every sequence would be more than any GPU has."""
    asked, said = [], []

    class Asked(Exception):
        pass

    def rig(config, sizes, n_pictures, works, model):
        asked.append((n_pictures, works, model))
        raise Asked

    gpu(gib)
    monkeypatch.setattr(measure, "Rig", rig)
    with pytest.raises(Asked):
        config = ServeConfig(model=str(MODELS / name), device="cuda")
        measure.measure_model(config.model, minutes=1.0, config=config, on_progress=lambda _, what: said.append(what))
    ((n_pictures, works, model),) = asked
    kv, embed = specs_for(model, config)
    sees = embed is not None
    pictures = 0 if embed is None else n_pictures * embed.blocks_for(max(pictures_of(model.config, GPU_GRID.sizes)))
    pool = pool_for(works, kv)
    assert 0.5 * gib * GIB < bytes_of(pool) + (embed.block_bytes * pictures if sees else 0) <= gib * GIB
    assert n_pictures >= 8

    cases, too_large = measure._cases(model, config, GPU_GRID)
    assert {case.language for case in cases} - {None} == set(works)
    seen = {"encode", "beside"} if sees else set()
    assert kinds_of(cases) == {"prefill", "later prefill", "decode", "mixed"} | seen
    assert max(sum(tokens_of(work)) for work in works) > 65_536
    if sees:
        assert {case.beside.decodes for case in cases if case.beside} == {0, 1, 64}, "beside pictures, too"
    assert bool(too_large) is ((name, gib) != ("qwen2-vl-7b", 120)) and sum("left out" in what for what in said) <= 1
    assert all(case.title in said[-1] for case in too_large), "they are named, once"
    for case in too_large:
        assert bytes_of(blocks_of(case.language, kv)) + (embed.block_bytes * pictures if sees else 0) > gib * GIB


def test_a_gpu_without_room_is_named(gpu):
    """More minutes would not help."""
    gpu(-1)
    config = ServeConfig(model=str(MODELS / "llava-1.5-7b"), device="cuda")
    with pytest.raises(ConfigError, match="no memory for a measurement"):
        measure.measure_model(config.model, minutes=1.0, config=config)


def test_a_rig_begins_after_what_was_set_up(gpu, monkeypatch):
    """Caches are filled on the default stream; the streams of lanes wait for no other."""
    steps = []

    class Stop(Exception):
        pass

    def lanes(*args, **kwargs):
        steps.append("lanes")
        raise Stop

    monkeypatch.setattr(rig, "_filled", lambda spec, n, _: steps.append("store") or BlockStore(spec, 1))
    monkeypatch.setattr(rig, "lanes_for", lanes)
    stream = SimpleNamespace(synchronize=lambda: steps.append("fence"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    config = ServeConfig(model=str(MODELS / "llama-3.1-8b"))
    with pytest.raises(Stop):
        rig.Rig(config, [], 0, [BatchShape(decodes=1, context=10)], Loaded(config))
    assert steps == ["store", "fence", "lanes"]


def test_a_batch_is_timed_by_events_around_it(monkeypatch):
    """Two batches are in flight, and the events of each are on the lane's own stream, whose thread may be late."""
    notes, clock, jobs = [], itertools.count(), []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(clock)

        def elapsed_time(self, other) -> float:
            return 1e3 * (other.at - self.at)

        def synchronize(self) -> None:
            pass

    class LateLane:
        def submit(self, batch, work):
            notes.append("event")
            jobs.append(work)
            return work

    def launch(work):
        notes.append("launch")
        jobs.append(lambda: next(clock))
        return Lane.LANGUAGE, jobs[-1]

    def wait(tickets):
        notes.append("wait")
        for _, job in tickets:
            while job in jobs:
                jobs.pop(0)()

    made = object.__new__(rig.Rig)
    decodes = BatchShape(decodes=2, context=10)
    made.model = SimpleNamespace(device=CUDA)
    made._lanes = {Lane.LANGUAGE: LateLane()}
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(made, "_launch", launch)
    monkeypatch.setattr(made, "_wait", wait)
    assert made.device_times(decodes, 3) == [2.0] * 3
    each = ["event", "launch", "event"]
    assert notes == [*each, *each, "wait", *each, "wait", *each, "wait", "wait", "wait"]
