"""Kernels that are built beforehand are those that a server asks for, placed where it finds them without a compiler."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from hydrainfer.assemble import prebuilt
from hydrainfer.cli import app
from hydrainfer.core import ConfigError
from hydrainfer.ops.cuda.flashinfer_modules import Module

pytestmark = pytest.mark.cpu
MODELS = Path(__file__).parents[2] / "configs" / "models"
BF16 = torch.bfloat16


@pytest.fixture
def flashinfer(monkeypatch, tmp_path):
    """A FlashInfer that compiles by writing a file. `wanted`, `built`: the modules asked for and compiled."""
    found = SimpleNamespace(wanted=[], built=[], aot=tmp_path / "aot")

    def spec(module):
        name = "_".join(map(str, module))

        def build():
            (stubs,) = (word[2:] for word in os.environ["FLASHINFER_EXTRA_LDFLAGS"].split() if word.startswith("-L"))
            assert (Path(stubs) / "libcuda.a").exists(), "linkers look for the driver"
            (tmp_path / name).write_text(f"compiled for {os.environ['FLASHINFER_CUDA_ARCH_LIST']}")
            found.built.append(name)

        return SimpleNamespace(name=name, build=build, jit_library_path=tmp_path / name)

    def modules_for(wanted):
        found.wanted = list(dict.fromkeys(wanted))
        return [spec(module) for module in found.wanted]

    for name in ("flashinfer", "flashinfer.jit", "flashinfer.jit.env"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["flashinfer.jit"].env = sys.modules["flashinfer.jit.env"]
    found.env = sys.modules["flashinfer.jit.env"]
    found.env.FLASHINFER_AOT_DIR, found.env.FLASHINFER_WORKSPACE_DIR = found.aot, tmp_path / "0.7.2" / "90a"
    monkeypatch.setattr(prebuilt, "modules_for", modules_for)
    monkeypatch.setattr(prebuilt, "build_cuda_kernels", lambda arch: tmp_path / f"hydra_cuda-{arch}.so")
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "")
    monkeypatch.setenv("FLASHINFER_EXTRA_LDFLAGS", "")
    return found


def test_all_that_some_models_ask_for_is_built_once(flashinfer):
    names = ["llava-1.5-7b", "llama-3.1-8b", "qwen2-vl-7b", "gpt-oss-20b", "gemma-3-4b"]
    command = ["build-kernels", *(str(MODELS / name) for name in names), "--arch", "9.0"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert flashinfer.wanted == [
        Module("plain", torch.float16, 128, 128, False),  # LLaVA, as it is published
        Module("plain", BF16, 128, 128, False),
        *(Module("sinks", BF16, 64, 64, windowed) for windowed in (False, True)),
        Module("plain", BF16, 256, 256, False),
        Module("ranges", BF16, 256, 256, False),
        Module("plain", BF16, 256, 256, True),
    ]
    assert len(flashinfer.built) == 7 and len(result.output.splitlines()) == 8
    assert "hydra_cuda-9.0.so" in result.output and os.environ["FLASHINFER_EXTRA_LDFLAGS"] == ""
    for name in flashinfer.built:
        assert (flashinfer.aot / name / f"{name}.so").read_text() == "compiled for 9.0"
    CliRunner().invoke(app, command)
    assert len(flashinfer.built) == 7, "what is there is not compiled again"


def test_modules_for_another_gpu_take_the_place_of_those_that_are_there(flashinfer, tmp_path):
    """FlashInfer loads what lies there, whatever it was compiled for."""
    command = ["build-kernels", str(MODELS / "llava-1.5-7b"), "--arch"]
    CliRunner().invoke(app, [*command, "9.0"])
    (name,) = flashinfer.built
    library = flashinfer.aot / name / f"{name}.so"
    loaded = library.open()
    flashinfer.env.FLASHINFER_WORKSPACE_DIR = tmp_path / "80"
    result = CliRunner().invoke(app, [*command, "8.0"])
    assert result.exit_code == 0 and library.read_text() == "compiled for 8.0"
    assert loaded.read() == "compiled for 9.0", "a server that runs keeps what it has loaded"
    loaded.close()


@pytest.mark.parametrize("arch", ["", "9", "90", "9.0a", "sm_90", "8.0 9.0"])
def test_a_name_that_no_server_looks_for_is_refused(flashinfer, arch):
    with pytest.raises(ConfigError, match="one compute capability"):
        list(prebuilt.prebuild([str(MODELS / "llava-1.5-7b")], arch))
    assert not flashinfer.built


def test_kernels_built_for_another_gpu_are_replaced(flashinfer, tmp_path):
    """FlashInfer finds its modules by name, so that it would load them on any GPU; its own folder outlives upgrades."""
    model = str(MODELS / "llava-1.5-7b")
    for n, folder in enumerate(("0.7.2/90a", "0.7.2/80", "0.8.0/80"), 1):
        flashinfer.env.FLASHINFER_WORKSPACE_DIR = tmp_path / folder
        list(prebuilt.prebuild([model], "9.0"))
        (name,) = set(flashinfer.built)
        assert len(flashinfer.built) == n and [*flashinfer.aot.rglob("*.so")] == [flashinfer.aot / name / f"{name}.so"]
    (flashinfer.aot / name / f"{name}.txt").unlink()  # it was stopped before the end
    list(prebuilt.prebuild([model], "9.0"))
    assert len(flashinfer.built) == 4


def test_a_kernel_that_does_not_build_is_reported_in_one_line(flashinfer, monkeypatch):
    def fails(arch):
        raise RuntimeError("ninja: error:\nmany lines")

    model = str(MODELS / "llava-1.5-7b")
    monkeypatch.setattr(prebuilt, "build_cuda_kernels", fails)
    with pytest.raises(ConfigError) as failed:
        list(prebuilt.prebuild([model], "9.0"))
    assert "ninja: error: many lines" in failed.value.message
    monkeypatch.setattr(prebuilt, "build_cuda_kernels", lambda arch: "here")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="FlashInfer is not installed"):
        list(prebuilt.prebuild([model], "9.0"))
