"""A session on a lent GPU (`make gpu-session`), rehearsed on a CPU: every part of every step with tiny shapes."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu import __main__ as session
from benchmarks.gpu.parts import STEPS, Part, Place
from benchmarks.gpu.targets import summary
from benchmarks.record import ROOT

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]

SLOW = {"test_cuda", "test_cuda_transports", "sanitizer", "test_dali", "b06", "b07", "b08"}  # 10 s and more
PARTS = [
    pytest.param(part, id=f"{step}-{part.name}", marks=[pytest.mark.slow] if part.name in SLOW else [])
    for step, parts in STEPS.items()
    for part in parts
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Steps build on what those before them left."""
    out = tmp_path_factory.mktemp("session")
    return Place("cpu", out, out / "models")


@pytest.mark.parametrize("part", PARTS)
def test_every_part_runs_with_tiny_shapes(part, place, monkeypatch):
    module, *args = part.command(place)
    if module == "benchmarks.gpu.under":  # the tool is not here: it would replace this process by what it runs
        module, *args = args[args.index("--") + 1 :]
    if module == "pytest":
        done = subprocess.run(
            [sys.executable, "-m", module, *args], cwd=ROOT, capture_output=True, text=True, timeout=250
        )
        assert done.returncode in (0, session.NO_TESTS), done.stdout
        return
    threads = torch.get_num_threads()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [module, *args])
    try:
        assert importlib.import_module(module).main() in (None, 0)
    finally:
        torch.set_num_threads(threads)
    if "--out" in args and "--once" not in args and part.name != "cost_model":
        assert json.loads((place.out / f"{part.name}.json").read_text())["results"]


def test_what_a_rehearsal_finds_is_judged(place):
    """Runs after the parts: the words are made of what they wrote, and no target is left out."""
    words = summary(place.out)
    ran = {path.stem for path in place.out.glob("*.json")}
    absent = {"rates", "moves", "killed", "b07", "b03"} - ran | (
        {"micro"} if not any("micro" in s for s in ran) else set()
    )
    assert words[-1].endswith("missed") and sum("not run" in line for line in words) == len(absent), words


def test_a_part_that_hangs_ends_and_the_next_one_runs(tmp_path, monkeypatch, capsys):
    hangs = Part("hangs", 1.0, lambda p: ["http.server", "0"])
    runs = Part("runs", 30.0, lambda p: ["calendar", "2026"])
    fails = Part("fails", 30.0, lambda p: ["calendar", "no year"])
    monkeypatch.setattr(session, "STEPS", {1: (hangs, fails, runs)})
    assert session.main(["1", "--device", "cpu", "--out", str(tmp_path)]) == 1
    ends = json.loads((tmp_path / "step1.json").read_text())
    assert [ends[name]["ended"] for name in ("hangs", "runs")] == ["timed out", "ok"]
    assert ends["fails"]["ended"].startswith("failed")
    assert "hangs: timed out" in (tmp_path / "summary.txt").read_text()


def test_no_gpu_is_said(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert session.main(["2", "--out", str(tmp_path)]) == 3
    assert "no CUDA device" in capsys.readouterr().out


def test_a_missed_target_is_said_in_words(tmp_path):
    case = {"p50_s": 1.0, "min_s": 1.0, "n": 5, "floor_s": 0.5, "of_floor": 2.0}
    cases = {"decode 1 x 512": case, "prefill 512": case, "encode 8": case | {"of_floor": 1.5}}
    results = {"model": "m", "mode": "graphs", "operators": {"attention": "flashinfer"}, "notes": [], "cases": cases}
    (tmp_path / "micro_m_graphs.json").write_text(json.dumps({"results": results}))
    words = summary(tmp_path)
    assert "off target: m, decode 1 x 512: 2.00 × its floor, at most 1.20 wanted" in words
    assert not any("prefill 512" in line for line in words), "too short to fill a GPU"
    assert words[-1] == "1 targets met, 1 missed"


def test_counters_are_of_the_slowest_kernel(tmp_path):
    place = Place("cuda", tmp_path, tmp_path)
    (counters,) = (part for part in STEPS[5] if part.name == "counters")
    assert "--kernel-name" not in counters.command(place)
    rows = [["aten::mm", 9.0, 1], ["void flashinfer::PrefillKernel<float, (int)1>(Params)", 8.0, 1]]
    (tmp_path / "again.json").write_text(json.dumps({"results": {"profile": {"decode 1 x 512": rows}}}))
    command = counters.command(place)
    assert command[command.index("--kernel-name") + 1] == "PrefillKernel"


def test_steps_have_eight_minutes():
    for step, parts in STEPS.items():
        assert len({part.name for part in parts}) == len(parts), step
        assert all(part.limit_s <= session.STEP_LIMIT_S for part in parts)
