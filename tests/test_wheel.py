"""A source archive, the wheel made of it and `pip install --target`: everything the package reads is found there, and
the commands that read it work from another directory."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]
ROOT = Path(__file__).parent.parent
SOURCES = ("hydrainfer", "kernels", "configs", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
USE = """
import json, sys
from pathlib import Path
from typer.testing import CliRunner
import hydrainfer
from hydrainfer.checkpoint import locate_model
from hydrainfer.cli import app
from hydrainfer.config import load, locate, read_cost_model, read_layout
from hydrainfer.ops.build import build_resampler, _sources
from hydrainfer.planner.costs import read_hardware

assert Path(hydrainfer.__file__).is_relative_to(sys.argv[1]), hydrainfer.__file__
runs = [
    ["trace", "textcaps", "--requests", "9", "--out", "trace.jsonl"],
    ["profile", "llava-next-7b", "--devices", "1", "--hardware", "h800", "--workload", "textcaps", "--processes", "1",
     "--requests", "40", "--out", "plan"],
    ["profile", "configs/models/llava-1.5-7b", "--devices", "1", "--hardware", "h100", "--workload", "text",
     "--processes", "1", "--cost-model", "configs/costs/illustrative-h100-llava-7b.yaml", "--requests", "40",
     "--slo", "ttft=8,tpot=0.08"],
]
results = [CliRunner().invoke(app, words) for words in runs]
assert all(r.exit_code == 0 for r in results), [(r.output, r.exception) for r in results]
read_cost_model(Path("configs/cost_models/builtin-cpu.yaml"))
assert Path(hydrainfer.__file__).with_name("server").joinpath("page", "web", "index.html").is_file()
print(json.dumps({
    "layout": len(read_layout("configs/layouts/1e2pd-1epd.yaml")),
    "hardware": read_hardware("this-cpu").name,
    "models": [locate_model(name).name for name in ("llava-1.5-7b", "llava-next-7b", "qwen2-vl-7b")],
    "slo": locate("slo", "qwen2-vl-7b").name,
    "kernels": (_sources() / "resample.cpp").is_file(),
}))
"""


def python(*args, cwd, **env):
    run = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.strip().splitlines()[-1]


def files_under(folder, *names):
    found = [p for name in names for p in (folder / name).rglob("*") if p.is_file()]
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Where it is installed."""
    tree, out = (tmp_path_factory.mktemp(name) for name in ("tree", "out"))
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    archive = python("-c", BUILD, "build_sdist", out, cwd=tree, PYTHONPATH="")
    with tarfile.open(out / archive) as packed:
        packed.extractall(out, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # from 3.11.4 on
    wheel = python("-c", BUILD, "build_wheel", out, cwd=out / archive.removesuffix(".tar.gz"), PYTHONPATH="")
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check")
    subprocess.run([sys.executable, *pip, "--target", out / "target", out / wheel], check=True)
    return out / "target"


def test_all_that_is_read_is_inside_the_package(target):
    shipped = files_under(target / "hydrainfer" / "_data", "kernels", "configs")
    assert shipped == files_under(ROOT, "kernels", "configs") and len(shipped) > 25
    assert {p.name for p in target.iterdir() if not p.name.endswith(".dist-info")} == {"hydrainfer", "bin"}
    own = {name for name in files_under(target, "hydrainfer") if "/_data/" not in name}
    assert own == {name for name in files_under(ROOT, "hydrainfer") if "__pycache__" not in name}
    assert "hydrainfer/py.typed" in own and not list((target / "hydrainfer/_data").rglob("__init__.py"))


def test_the_wheel_works_from_another_directory(target, tmp_path):
    said = json.loads(python("-c", USE, target, cwd=tmp_path, PYTHONPATH=str(target)))
    assert said == {
        "layout": 4,
        "hardware": "this-cpu",
        "models": ["llava-1.5-7b", "llava-next-7b", "qwen2-vl-7b"],
        "slo": "qwen2-vl-7b.yaml",
        "kernels": True,
    }
    assert (tmp_path / "plan/layout.yaml").is_file() and (tmp_path / "trace.jsonl").is_file()
