"""Compilation of the kernels that models use on CUDA before a server starts, also on a machine without a GPU, such as
the one that makes a container image."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hydrainfer.assemble.sizes import dtype_of
from hydrainfer.checkpoint import model_folder
from hydrainfer.config import load
from hydrainfer.core import ConfigError, HydraError, Role
from hydrainfer.families import read_config
from hydrainfer.models import DTYPES, attentions_of
from hydrainfer.ops import PagedAttention, build_cuda_kernels, cause, modules_for, ninja_on_path


def prebuild(models: Sequence[str], arch: str | None) -> Iterator[str]:
    """Compile what these models use, and give a line for each library as soon as it is there. `arch`: the GPU's compute
    capability ("9.0"); None: that of this machine's GPUs. FlashInfer's modules are placed in its own folder for
    modules, from which it loads them without a compiler; those of other architectures, or of another FlashInfer, are
    replaced. Raises `HydraError`."""
    if arch is not None and not re.fullmatch(r"[1-9][0-9]*\.[0-9]", arch):  # a server looks for this very name
        raise ConfigError(f"--arch must be one compute capability, such as 9.0, not {arch!r}", param="arch")
    attentions = [each for name in models for each in _attentions(name)]
    if arch is not None:
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = arch
    try:
        yield f"CUDA kernels: {build_cuda_kernels(arch)}"
        yield from _flashinfer(attentions)
    except HydraError:
        raise
    except Exception as e:  # a compiler can fail in any way
        raise ConfigError(f"a kernel did not build: {cause(e)}") from e


def _attentions(name: str) -> list[PagedAttention]:
    config = load({"model": name}).config
    described = read_config(model_folder(config))
    kind = DTYPES[dtype_of(config, torch.device("cuda"), described.dtype)]
    return attentions_of(described, Role.parse("EPD"), kind, config.block_tokens)


def _flashinfer(attentions: Sequence[PagedAttention]) -> Iterator[str]:
    if importlib.util.find_spec("flashinfer") is None:
        raise ConfigError("FlashInfer is not installed: pip install 'hydrainfer[cuda]'")
    from flashinfer.jit import env

    yield from sorted({f"not built: {why}" for each in attentions if (why := each.refusal())})
    ninja_on_path()
    wanted = [module for each in attentions if not each.refusal() for module in each.modules()]
    made_for = "/".join(Path(env.FLASHINFER_WORKSPACE_DIR).parts[-2:])  # FlashInfer's version and the architectures
    with _driver_stub():
        for spec in modules_for(wanted):
            library = Path(env.FLASHINFER_AOT_DIR) / spec.name / f"{spec.name}.so"
            _place(spec, library, made_for)
            yield f"FlashInfer: {library}"


def _place(spec: Any, library: Path, made_for: str) -> None:
    """Build a module of FlashInfer, unless its `library` is there and was made for the same. A note beside it says what
    it was made for, because FlashInfer finds it by name alone. A process that has loaded another one keeps it."""
    note = library.with_suffix(".txt")
    if library.exists() and note.exists() and note.read_text() == made_for:
        return
    spec.build()
    library.parent.mkdir(parents=True, exist_ok=True)
    part = shutil.copyfile(spec.jit_library_path, library.with_suffix(f".{os.getpid()}"))
    part.replace(library)
    note.write_text(made_for)


@contextmanager
def _driver_stub() -> Iterator[None]:
    """Let linkers find a library of the driver where there is no GPU. Modules name it and use nothing of it."""
    before = os.environ.get("FLASHINFER_EXTRA_LDFLAGS", "")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["ar", "rc", str(Path(folder) / "libcuda.a")], check=True, capture_output=True)
        os.environ["FLASHINFER_EXTRA_LDFLAGS"] = f"{before} -L{folder}".strip()
        try:
            yield
        finally:
            os.environ["FLASHINFER_EXTRA_LDFLAGS"] = before
