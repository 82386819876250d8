"""What a planner's measurement asks of a GPU: its own transports and sizes, and no copy faster than the link."""

from __future__ import annotations

import pytest
import torch

from hydrainfer.assemble import copies, measure
from hydrainfer.config import ServeConfig
from hydrainfer.planner.costs import Copies

pytestmark = pytest.mark.cpu


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


def test_a_gpu_is_measured_as_it_is_used(monkeypatch):
    class Asked(Exception):
        pass

    def rig(config, sizes, n_pictures, n_sequences, n_context):
        assert n_sequences > 256 and n_context >= 8192 and n_pictures >= 8
        raise Asked

    monkeypatch.setattr(measure, "Rig", rig)
    monkeypatch.setattr(measure, "torch_device", lambda config: torch.device("cuda", 0))
    with pytest.raises(Asked):
        measure.measure_model("m", minutes=1.0, config=ServeConfig(model="m", device="cuda"))
