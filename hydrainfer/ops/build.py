"""Compilation of `kernels/cpu` and `kernels/cuda` on the user's machine, into the cache folder: the first once for each
virtual environment, the second once for each GPU architecture, also on a machine without a GPU."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hydrainfer.config import cache_folder
from hydrainfer.config.shipped import shipped
from hydrainfer.core import ConfigError
from hydrainfer.ops.cpu.native import Kernels

_log = logging.getLogger(__name__)
_HOW_LONG = "ten seconds where the cores are free, else up to a minute"
_KEPT_S = 30 * 86400.0
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno")
_CUDA_FLAGS = ("-O3",)
_COMPILING = threading.Lock()  # the environment is the process's
_DONE = "done"  # a file beside a complete library


class _Build(NamedTuple):
    """A source file and how to compile it. `key` names the folder of the result; `environment`: variables that the
    compilation reads."""

    name: str
    source: Path
    key: str
    flags: Mapping[str, Any]
    environment: Mapping[str, str] = {}


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
        import tvm_ffi

        flags = {"extra_cflags": list(_FLAGS), "extra_ldflags": ["-fopenmp"]}
        key = _key(folder, compiler, f"{tvm_ffi.libinfo.find_include_path()} {tvm_ffi.__version__}")
        return Kernels(_load(_Build("hydra_cpu", folder / "ops.cpp", key, flags)), key), ()
    except Exception as e:  # a compiler can fail in any way; the torch operators do not need it
        return None, (f"CPU kernels did not build ({cause(e)}); using torch operators (slower decode)",)


def load_cuda_kernels() -> tuple[Any | None, tuple[str, ...]]:
    """The module of `kernels/cuda`, or None and the reason in one line. The first call for a GPU architecture compiles
    for about ten seconds, unless `build_cuda_kernels` has done that before."""
    try:
        return _load(_cuda_build()), ()
    except ConfigError as e:
        return None, (f"{e}; using torch operators",)
    except Exception as e:  # as for the CPU
        return None, (f"CUDA kernels did not build ({cause(e)}); using torch operators",)


def build_cuda_kernels(architectures: str | None = None) -> Path:
    """The library of `kernels/cuda`, compiled if that is not cached, but not loaded. `architectures` ("9.0"): default,
    those of this machine's GPUs, or of `TVM_FFI_CUDA_ARCH_LIST` in the environment. The library's folder may be copied
    to the same place below another machine's cache folder. Raises anything."""
    import tvm_ffi.cpp

    build = _cuda_build(architectures)
    library = _build_folder(build.key) / f"{build.name}.so"
    if not library.with_name(_DONE).exists():
        _compiled(build, tvm_ffi.cpp.build)
    return library


def _cuda_build(architectures: str | None = None) -> _Build:
    """The build of `kernels/cuda`. Its key has the architecture, and nothing else of this machine: the library needs
    neither this processor nor this compiler. Raises `ConfigError` if there cannot be one."""
    import tvm_ffi

    folder, compiler, architectures = shipped("kernels") / "cuda", nvcc(), architectures or _architectures()
    if not (folder / "ops.cu").exists():
        raise ConfigError("CUDA kernels are not part of this installation")
    if not architectures:
        raise ConfigError("no GPU found, and TVM_FFI_CUDA_ARCH_LIST is not set, so CUDA kernels are not built")
    key = _digest(folder, "cuda", *_CUDA_FLAGS, architectures, tvm_ffi.__version__, platform.machine())
    environment = {"TVM_FFI_CUDA_ARCH_LIST": architectures}
    if compiler is not None:
        environment["CUDA_HOME"] = str(Path(compiler).parent.parent)  # where tvm_ffi looks
    elif not (_build_folder(key) / _DONE).exists():
        raise ConfigError("no nvcc found (CUDA_HOME), so CUDA kernels are not built")
    return _Build("hydra_cuda", folder / "ops.cu", key, {"extra_cuda_cflags": list(_CUDA_FLAGS)}, environment)


def _architectures() -> str:
    """The architectures of this machine's GPUs as tvm_ffi takes them ("8.0 9.0"); without a GPU, what the environment
    says."""
    if not torch.cuda.is_available():
        return os.environ.get("TVM_FFI_CUDA_ARCH_LIST", "")
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return " ".join(f"{major}.{minor}" for major, minor in sorted(found))


def _load(build: _Build) -> Any:
    """The module of a build, compiled if that is not cached. A complete library is loaded without ninja, which would
    compile again whenever a path in its command differs."""
    import tvm_ffi.cpp

    target = _build_folder(build.key)
    if (target / _DONE).exists():
        return tvm_ffi.load_module(str(target / f"{build.name}.so"))
    return _compiled(build, tvm_ffi.cpp.load)


def _compiled(build: _Build, compile_with: Callable[..., Any]) -> Any:
    """The result of `compile_with` for this build, whose folder is marked as complete afterwards."""
    target, folder = _build_folder(build.key), build.source.parent
    kept = _kept(folder, target / "sources") / build.source.name
    if not (target / f"{build.name}.so").exists():
        _log.warning("compiling the kernels of %s, once for this environment: %s", folder.name, _HOW_LONG)
    ninja_on_path()
    with _COMPILING, _set(build.environment):
        made = compile_with(build.name, sources=str(kept), build_directory=str(target), **build.flags)
    (target / _DONE).touch()
    return made


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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


def cause(e: Exception) -> str:
    """An error in one line."""
    return f"{type(e).__name__}: {' '.join(str(e).split())[:160]}"


def nvcc() -> str | None:
    """The path of the CUDA compiler, first looked for in CUDA_HOME and CUDA_PATH; None if there is none."""
    homes = [home for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    places = [*(f"{home}/bin" for home in homes), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(places)) or shutil.which("nvcc")


def build_resampler(source: str = "resample") -> str:
    """The path of the library compiled from `resample.cpp`, for `processor.pictures.resample`, or from another source
    of `kernels/cpu`. Empty if there is no compiler or if the source needs AVX2 and the processor has none. Compiling
    takes a second or two, once on a machine."""
    folder, compiler = _sources(), _compiler()
    if folder is None or compiler is None:
        return ""
    try:
        library = _build_folder(_key(folder, compiler)) / f"{source}.so"
        if not library.exists():
            _compile(compiler, folder / f"{source}.cpp", library)
    except (OSError, subprocess.SubprocessError) as e:
        _log.info("%s.cpp did not compile: %s", source, type(e).__name__)
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


def ninja_on_path() -> None:
    """Append the installed `ninja` to PATH, unless there is one. It lies beside our Python interpreter, whose folder
    may not be on PATH. PATH stays so, because other threads may compile, too."""
    if shutil.which("ninja") is None:
        with suppress(ImportError):
            import ninja

            os.environ["PATH"] = f"{os.environ.get('PATH', '')}{os.pathsep}{ninja.BIN_DIR}"


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


def _sources() -> Path | None:
    folder = shipped("kernels") / "cpu"
    return folder if (folder / "ops.cpp").exists() else None


def _key(folder: Path, compiler: str, headers: str = "") -> str:
    """A name that changes with the sources, the flags, the compiler, the folder and version of its other headers and
    the processor, for which the code is specialised. Without that folder two virtual environments would compile in
    turns: ninja compiles again when a command changes."""
    features, cpuinfo = "", Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return _digest(folder, *_FLAGS, compiler, headers, platform.machine(), features)


def _digest(folder: Path, *facts: str) -> str:
    """A name that changes with the files of a folder and with these facts."""
    digest = hashlib.sha256(" ".join(facts).encode())
    for source in sorted(folder.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]
