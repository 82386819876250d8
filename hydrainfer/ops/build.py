"""Compilation of `kernels/cpu` and `kernels/cuda` on the user's machine, once for each virtual environment, into the
cache folder."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ninja
import torch

from hydrainfer.config import cache_folder
from hydrainfer.config.shipped import shipped
from hydrainfer.ops.native import Kernels

_log = logging.getLogger(__name__)
_HOW_LONG = "ten seconds where the cores are free, else up to a minute"
_KEPT_S = 30 * 86400.0
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno")


def load_kernels(device: torch.device) -> tuple[Kernels | None, tuple[str, ...]]:
    """The kernels for this device, or None and the reason in one line.

    The first call in a virtual environment compiles for about ten seconds; later ones load what is cached.
    """
    if device.type != "cpu":
        return None, ()
    folder = _sources()
    if folder is None:
        return None, ("CPU kernels are not part of this installation; using torch operators",)
    compiler = _compiler()
    if compiler is None:
        return None, ("no C++ compiler found, so CPU kernels are not built; using torch operators (slower decode)",)
    try:
        flags = {"extra_cflags": list(_FLAGS), "extra_ldflags": ["-fopenmp"]}
        return Kernels(*_load("hydra_cpu", folder / "ops.cpp", compiler, flags)), ()
    except Exception as e:  # a compiler can fail in any way; the torch operators do not need it
        return None, (f"CPU kernels did not build ({_said(e)}); using torch operators (slower decode)",)


def load_cuda_kernels() -> tuple[Any | None, tuple[str, ...]]:
    """The module of `kernels/cuda`, or None and the reason in one line. The first call in a virtual environment
    compiles for about ten seconds."""
    folder, compiler = shipped("kernels") / "cuda", nvcc()
    if not (folder / "ops.cu").exists():
        return None, ("CUDA kernels are not part of this installation; using torch operators",)
    if compiler is None:
        return None, ("no nvcc found (CUDA_HOME), so CUDA kernels are not built; using torch operators",)
    try:
        os.environ.setdefault("CUDA_HOME", str(Path(compiler).parent.parent))  # where tvm_ffi looks
        return _load("hydra_cuda", folder / "ops.cu", compiler, {"extra_cuda_cflags": ["-O3"]})[0], ()
    except Exception as e:  # as for the CPU
        return None, (f"CUDA kernels did not build ({_said(e)}); using torch operators",)


def _load(name: str, source: Path, compiler: str, flags: Mapping[str, Any]) -> tuple[Any, str]:
    """The module of a source file, compiled if that is not cached, and the key of the build."""
    import tvm_ffi.cpp

    headers = tvm_ffi.libinfo.find_include_path()
    target = _build_folder(_key(source.parent, compiler, headers))
    kept = _kept(source.parent, target / "sources") / source.name
    if not (target / f"{name}.so").exists():
        _log.warning("compiling the kernels of %s, once for this environment: %s", source.parent.name, _HOW_LONG)
    with _ninja_on_path():
        return tvm_ffi.cpp.load(name, sources=str(kept), build_directory=str(target), **flags), target.name


def _build_folder(key: str) -> Path:
    """The folder of a build, which exists. Its time says when it was last used: builds that nobody used for long, of
    earlier versions, are removed."""
    folder = cache_folder() / "kernels" / key
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # another user's
        os.utime(folder)
    for other in folder.parent.iterdir():
        with suppress(OSError):  # another process removes it, too
            if time.time() - other.stat().st_mtime > _KEPT_S:
                shutil.rmtree(other)
    return folder


def _said(e: Exception) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())[:160]}"


def nvcc() -> str | None:
    """The path of the CUDA compiler, first looked for in CUDA_HOME and CUDA_PATH; None if there is none."""
    homes = [home for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    places = [*(f"{home}/bin" for home in homes), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(places)) or shutil.which("nvcc")


def build_resampler() -> str:
    """The path of the library compiled from `resample.cpp`, for `processor.pictures.resample`. Empty if there is no
    compiler or the processor has no AVX2. Compiling takes a second or two, once on a machine."""
    folder, compiler = _sources(), _compiler()
    if folder is None or compiler is None:
        return ""
    try:
        library = _build_folder(_key(folder, compiler)) / "resample.so"
        if not library.exists():
            _compile(compiler, folder / "resample.cpp", library)
    except (OSError, subprocess.SubprocessError) as e:
        _log.info("pictures are resized by Pillow: %s", type(e).__name__)
        return ""
    return str(library)


def _compile(compiler: str, source: Path, library: Path) -> None:
    part = library.with_suffix(f".{os.getpid()}")
    flags = ["-std=c++17", "-O3", "-march=native", "-shared", "-fPIC"]
    try:
        subprocess.run([compiler, *flags, source, "-o", part], check=True, capture_output=True, timeout=120)
        part.replace(library)
    finally:
        part.unlink(missing_ok=True)


def _kept(folder: Path, copy: Path) -> Path:
    """A copy of the sources at a fixed place. Another path or modification time would cause another compilation."""
    if not copy.exists():
        part = Path(tempfile.mkdtemp(dir=copy.parent))
        shutil.copytree(folder, part, dirs_exist_ok=True)
        try:
            part.rename(copy)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    return copy


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Put the installed `ninja` on PATH. It lies beside our Python interpreter, whose folder may not be on PATH."""
    before = os.environ.get("PATH", "")
    if shutil.which("ninja") is None:
        os.environ["PATH"] = f"{ninja.BIN_DIR}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


def _sources() -> Path | None:
    folder = shipped("kernels") / "cpu"
    return folder if (folder / "ops.cpp").exists() else None


def _key(folder: Path, compiler: str, headers: str = "") -> str:
    """A name that changes with the sources, the flags, the compiler, the folder of its other headers and the processor,
    for which the code is specialised. Without that folder two virtual environments would compile in turns: ninja
    compiles again when a command changes."""
    digest = hashlib.sha256(" ".join((*_FLAGS, compiler, headers, platform.machine())).encode())
    for source in sorted(folder.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
        digest.update(flags.encode())
    return digest.hexdigest()[:16]
