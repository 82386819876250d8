"""A session on a lent GPU (`make gpu-session`), rehearsed on a CPU: every part of every step with tiny shapes."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import __main__ as session
from benchmarks.gpu import probes, shapes
from benchmarks.gpu.parts import HYBRIDS, MODELS, PROBES, STEPS, Part, Place, Step
from benchmarks.gpu.targets import summary
from benchmarks.record import ROOT, revision
from hydrainfer.ops.build import _compiler
from tests.gpu.alike import ROUNDING, TIE, check_alike

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]

SLOW = {"test_whole", "test_ops", "test_cuda", "test_cuda_transports", "test_processes", "b07"}  # 10 s and more
SLOW |= {f"probe_{name}" for name in ("ipc", "qwen2_vl", "gemma3", "gpt_oss", "qwen3_5")}
PARTS = [
    pytest.param(part, id=f"{step.name}-{part.name}", marks=[pytest.mark.slow] if part.name in SLOW else [])
    for step in STEPS
    for part in step.parts
]
BARE = """
import functools
from importlib.machinery import PathFinder
def find_spec(find, name, *rest):
    return None if name.partition(".")[0] in {absent} else find(name, *rest)
PathFinder.find_spec = functools.partial(find_spec, PathFinder.find_spec)
""".replace("{absent}", repr(("ray", "av", "gguf", "openai", "decord")))
COMPILER = _compiler() or ""
TOOLS = ("bash", "sh", "env", "c++", "g++", "gcc", "cc", "ld", "as", "ninja", "df", "free")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Steps build on what those before them left."""
    folder = tmp_path_factory.mktemp("session")
    (folder / "results").mkdir()
    return Place("cpu", folder / "results", folder / "models")


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine without git, ray, av, gguf and the console script, for processes that are started. Gives the folder of
    what a call leaves."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BARE)
    (tmp_path / "bin").mkdir()
    for name in TOOLS:
        if found := shutil.which(name):
            (tmp_path / "bin" / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{ROOT}")
    monkeypatch.setenv("RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.delenv("HYDRAINFER_REVISION", raising=False)
    return tmp_path / "out"


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
        assert json.loads((place.results / f"{part.name}.json").read_text())["results"]


def test_the_summary_of_a_rehearsal_leaves_no_target_out(place):
    """Runs after the parts: the words are made of what they wrote, and no target is left out."""
    words = summary(place.results)
    ran = {path.stem for path in place.results.glob("*.json")}
    absent = {"rates", "moves", "killed", "b07"} - ran
    absent |= {stem for stem in ("micro", "whole") if not any(stem in name for name in ran)}
    assert words[-1].endswith("missed") and sum("not run" in line for line in words) == len(absent), words


@pytest.mark.parametrize("names", [["look", "probe_kernels", "probe_three"]], ids=["some"])
def test_parts_run_without_git_and_without_packages_that_are_not_carried(bare, names, monkeypatch):
    monkeypatch.setenv("CXX", COMPILER)  # by its path elsewhere, for which kernels are compiled already
    assert session.main(["look", "--device", "cpu", "--only", *names]) == 0, (bare / "summary.txt").read_text()
    assert sorted(path.name for path in bare.iterdir()) == ["results.tar.gz", "summary.txt"]
    assert sum(": ok: " in line for line in (bare / "summary.txt").read_text().splitlines()) == 2
    with tarfile.open(bare / "results.tar.gz") as archive:
        kept = json.load(archive.extractfile("results/look.json"))
    assert kept["revision"] == "unknown" and kept["results"]["tools"]["git"] is None
    assert not any(kept["results"]["packages"][name] for name in ("ray", "av", "gguf"))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_whole_session_on_a_bare_machine(bare, tmp_path):
    """Nothing but the archive and the summary comes back from a call, and the next one finds the folder empty."""
    for step in STEPS:
        shutil.rmtree(bare, ignore_errors=True)
        ended = session.main([step.name, "--device", "cpu", "--models", str(tmp_path / "models")])
        assert ended == 0, (bare / "summary.txt").read_text()
        assert len(list(bare.iterdir())) <= 2
    words = (bare / "summary.txt").read_text()
    assert "not run" not in words, words


def ended_parts(*parts, at_once=1):
    return (Step("one", 60.0, parts, at_once=at_once, told=True), Step("two", 60.0, parts[:1]))


def test_a_part_that_hangs_ends_and_the_next_one_runs(tmp_path, monkeypatch):
    hangs = Part("hangs", 1.0, lambda p: ["http.server", "0"])
    runs = Part("runs", 30.0, lambda p: ["calendar", "2026"])
    fails = Part("fails", 30.0, lambda p: ["http.server", "no-port"])
    monkeypatch.setattr(session, "STEPS", ended_parts(runs, hangs, fails, at_once=3))
    monkeypatch.setattr(session, "DRY", 1.0)
    there = ["--device", "cpu", "--results", str(tmp_path / "results"), "--out", str(tmp_path / "out")]
    assert session.main(["one", *there]) == 1
    ends = json.loads((tmp_path / "results" / "ends.json").read_text())["one"]
    assert [ends[name]["ended"] for name in ("hangs", "runs")] == ["timed out", "ok"]
    assert ends["fails"]["ended"].startswith("failed")
    words = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    first = words.index(f"one, fails: {ends['fails']['ended']}")
    assert any("no-port" in line for line in words[first + 1 : first + 4]) and "one, hangs: timed out" in words
    assert words.index("one, hangs: timed out") < next(i for i, line in enumerate(words) if line.startswith("runs: "))


def test_results_outlive_the_folder_that_is_emptied(tmp_path, monkeypatch):
    wrote = Part("wrote", 30.0, lambda p: ["calendar", "2026"])
    monkeypatch.setattr(session, "STEPS", ended_parts(wrote))
    there = ["--device", "cpu", "--results", str(tmp_path / "results"), "--out", str(tmp_path / "out")]
    assert session.main(["one", *there]) == 0
    (tmp_path / "results" / "weights.bin").write_bytes(bytes(session.LARGEST_BYTES + 1))
    shutil.rmtree(tmp_path / "out")
    assert session.main(["two", *there]) == 0
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["results/ends.json", "results/wrote.log"]
        assert set(json.load(archive.extractfile("results/ends.json"))) == {"one", "two"}


def test_a_call_ends_within_its_limit(tmp_path, monkeypatch, capsys):
    hangs = Part("hangs", 60.0, lambda p: ["http.server", "0"])
    monkeypatch.setattr(session, "STEPS", ended_parts(hangs, hangs._replace(name="waits")))
    monkeypatch.setattr(session, "RESERVE_S", 0.0)
    there = ["--device", "cpu", "--results", str(tmp_path / "results"), "--out", str(tmp_path / "out")]
    assert session.main(["one", "two", "--limit-s", "2", *there]) == 1
    ends = json.loads((tmp_path / "results" / "ends.json").read_text())
    assert ends["one"]["hangs"]["ended"] == "timed out" and ends["one"]["hangs"]["seconds"] < 50
    assert ends["one"]["waits"]["ended"] == ends["two"]["hangs"]["ended"] == "no time left"
    assert "two, hangs: no time left" in capsys.readouterr().out


def test_no_gpu_is_said(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert session.main(["micro", "--out", str(tmp_path)]) == 3
    assert "no CUDA device" in capsys.readouterr().out


def test_the_runner_itself_imports_nothing_slow():
    code = "import sys, benchmarks.gpu.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_names_of_the_parts_are_those_of_the_modules():
    assert {*MODELS, *HYBRIDS} == set(shapes.MODELS)
    assert all(callable(probes.probe_of(name)) for name in PROBES)
    names = [part.name for step in STEPS for part in step.parts]
    assert len(set(names)) == len(names)


def test_a_step_ends_within_its_limit_and_a_session_within_a_quarter_of_an_hour():
    for step in STEPS:
        assert step.limit_s <= 480
        assert all(part.limit_s <= step.limit_s for part in step.parts), step.name
        if step.at_once == 1:
            assert sum(part.limit_s for part in step.parts) <= step.limit_s, step.name


def test_the_revision_where_there_is_no_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("HYDRAINFER_REVISION", raising=False)
    assert revision() == "unknown"
    monkeypatch.setenv("HYDRAINFER_REVISION", "abc+changes")
    assert revision() == "abc+changes"


def test_a_missed_target_is_said_in_words(tmp_path):
    case = {"p50_s": 1.0, "min_s": 1.0, "n": 5, "floor_s": 0.5, "of_floor": 2.0}
    cases = {"decode 1 x 512": case, "prefill 512": case, "encode 8": case | {"of_floor": 1.5}}
    results = {"model": "m", "mode": "graphs", "operators": {"attention": "flashinfer"}, "notes": [], "cases": cases}
    (tmp_path / "micro_m_graphs.json").write_text(json.dumps({"results": results}))
    words = summary(tmp_path)
    assert "off target: m, decode 1 x 512: 2.00 × its floor, at most 1.50 wanted" in words
    assert not any("prefill 512" in line for line in words), "too short to fill a GPU"
    assert words[-1] == "1 targets met, 1 missed"


def test_counters_are_of_the_slowest_kernel(tmp_path):
    place = Place("cuda", tmp_path, tmp_path)
    (counters,) = (part for step in STEPS for part in step.parts if part.name == "counters")
    assert "--kernel-name" not in counters.command(place)
    rows = [["aten::mm", 9.0, 1], ["void flashinfer::PrefillKernel<float, (int)1>(Params)", 8.0, 1]]
    (tmp_path / "again.json").write_text(json.dumps({"results": {"profile": {"decode 1 x 512": rows}}}))
    command = counters.command(place)
    assert command[command.index("--kernel-name") + 1] == "PrefillKernel"


def answer(*ids, gap=1.0, logprob=-0.5):
    tops = [SimpleNamespace(logprob=logprob, top=((i, logprob), (99, logprob - gap))) for i in ids]
    return SimpleNamespace(token_ids=ids, logprobs=tops)


def test_answers_in_16_bits_may_part_only_where_two_tokens_are_as_likely():
    check_alike([answer(1, 2, 3)], [answer(1, 2, 3)])
    check_alike([answer(1, 2, 4)], [answer(1, 2, 3, gap=TIE / 2)])
    with pytest.raises(AssertionError, match="token 2: 4, not 3"):
        check_alike([answer(1, 2, 4)], [answer(1, 2, 3, gap=2 * TIE)])
    with pytest.raises(AssertionError, match="apart"):
        check_alike([answer(1, 2, logprob=-0.5 - 2 * ROUNDING)], [answer(1, 2)])
    with pytest.raises(AssertionError, match="only 0 of 3"):
        check_alike([answer(4, 2, 3)], [answer(1, 2, 3, gap=0.0)])
    with pytest.raises(AssertionError, match="apart"):
        check_alike([answer(1, logprob=float("nan"))], [answer(1)])
