"""Tensors that claim to be on `cuda:0` and hold nothing: shapes, devices and waits of the CUDA path, on any machine."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hydrainfer.config import cache_folder

CUDA = torch.device("cuda", 0)


@cache
def _guard() -> str:
    """Empty once the guard is loaded, else why it cannot be."""
    if torch.backends.cuda.is_built():
        return ""  # has its own
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return "no C++ compiler"
    torch_at, source = Path(torch.__file__).parent, Path(__file__).parent / "guard.cpp"
    library = cache_folder() / "tests" / f"guard-{torch.__version__}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}")
        flags = ["-std=c++20", "-shared", "-fPIC", f"-I{torch_at}/include", f"-L{torch_at}/lib", "-lc10"]
        made = subprocess.run([compiler, source, *flags, "-o", part], capture_output=True, text=True, timeout=120)
        if made.returncode:
            return f"the device guard does not compile: {made.stderr[:200]}"
        part.replace(library)
    ctypes.CDLL(str(library))
    return ""


class _Stream:
    """A stream that is always done."""

    def __init__(self, device=None, priority=0) -> None:
        self.priority = priority

    def synchronize(self) -> None:
        pass


class _Event:
    """An event that has happened."""

    def record(self, stream=None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Recorder(TorchDispatchMode):
    """The operators that would reach the device: `calls`, `copies` from the host, and `waits`, those of them that would
    wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.copies: list[str] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = str(func)
        taken, given = ([x for x in tree_leaves(part) if isinstance(x, torch.Tensor)] for part in ((args, kwargs), out))
        copies = name.startswith(("aten.to.", "aten._to_copy", "aten.copy_"))
        devices = {x.device.type for x in (*taken, *given) if x.dim() or copies}
        if "cuda" not in devices or name.startswith(("aten.empty", "prim.")):
            return out
        if copies and "cpu" in devices:
            self.copies.append(name)
            if not (kwargs.get("non_blocking") or True in args[2:]):
                self.waits.append(name)
        elif "index" in name and "cpu" in devices:
            self.waits.append(f"{name} by indices of the host")
        kept = {x.untyped_storage()._cdata for x in taken}
        if func._schema.is_mutable or any(x.untyped_storage()._cdata not in kept for x in given):
            self.calls.append(name)  # else a view
        return out


class _FakeOnDevice(FakeTensorMode):
    """Only tensors on a device are fake: those of the CPU hold numbers, so that files can be read."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        device = next((x for x in leaves if isinstance(x, torch.device)), None)
        if any(isinstance(x, FakeTensor) for x in leaves) or (device is not None and device.type == "cuda"):
            args, kwargs = tree_map_only(torch.Tensor, self.from_tensor, (args, kwargs))
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def fake_cuda(monkeypatch, real_cpu: bool = False):
    """Within it, tensors made on `CUDA` are fake, and unless `real_cpu` those made on the CPU too. Gives a `Recorder`.
    Skips the test where that cannot be."""
    if problem := _guard():
        pytest.skip(problem)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    fake = _FakeOnDevice() if real_cpu else FakeTensorMode()
    with fake, torch.inference_mode(), Recorder() as recorder:
        yield recorder
