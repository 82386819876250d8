"""The measurement of single stages, with tiny shapes: one rig at a time, and what is written of each case."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.gpu import micro
from hydrainfer.assemble import model as assembling
from tests.memory import graph_double, watch_caches

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]


def bench_in(folder, mode) -> micro.Bench:
    return micro.Bench("llava-1.5-7b", mode, torch.device("cpu"), folder / "out" / "micro.json")


def test_no_rig_is_there_when_the_next_one_is_made(tmp_path, monkeypatch):
    """Two rigs of a 7B model do not fit a GPU: the second one's cases were lost."""
    monkeypatch.setattr(assembling, "capture_for", lambda _: graph_double)
    monkeypatch.setattr(assembling, "capture_passes_for", lambda _: graph_double)
    n_caches, rigs = watch_caches(monkeypatch), []
    made = micro.Rig

    def rig(*args):
        assert n_caches() == 0
        rigs.append(args)
        return made(*args)

    monkeypatch.setattr(micro, "Rig", rig)
    bench = bench_in(tmp_path, "graphs")
    micro.measure_all(bench, None)
    assert n_caches() == 0 and [args[-1] for args in rigs] == [-1, -1, 0]
    written = json.loads((tmp_path / "out" / "micro.json").read_text())["results"]
    assert {f"beside, priority {priority}" for priority in (-1, 0)} <= written.keys()
    assert {name.split()[0] for name in written["profile"]} == {"encode", "prefill", "decode"}
    for name, case in written["cases"].items():
        judged = case["ahead_s" if name.startswith("decode") else "p50_s"]
        assert case["of_floor"] == pytest.approx(judged / case["floor_s"])
        assert ("ahead_s" in case) is name.startswith("decode") and "device_s" not in case


@pytest.mark.parametrize("mode", ["sdpa", "cuda-cores"])
def test_few_cases_have_all_stages(tmp_path, mode):
    """The slower modes have little time."""
    bench = bench_in(tmp_path, mode)
    micro.measure_all(bench, 3)
    assert [name.split()[0] for name in bench.results["cases"]] == ["decode", "prefill", "encode"]
    assert "profile" not in bench.results


def test_a_case_of_pictures_alone_captures_decodes_too(tmp_path, monkeypatch):
    """Their graphs read the first block: on a GPU, a rig without blocks lost the device."""
    monkeypatch.setattr(assembling, "capture_for", lambda _: graph_double)
    made, blocks = micro.Rig, []

    def rig(*args):
        blocks.append(made(*args))
        return blocks[-1]

    monkeypatch.setattr(micro, "Rig", rig)
    bench = bench_in(tmp_path, "graphs")
    micro.again(bench, "encode 1", once=True)
    assert blocks[0]._n_blocks == {"kv": 1}
