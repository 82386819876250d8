"""`driver.c` in place of CUDA's driver, and stores in its memory."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch

from hydrainfer.storage import cuda_ipc
from hydrainfer.storage.way import Tools
from tests.storage.peers import SPECS, content

STREAM = 7


def build(folder: Path, *flags: str) -> Path | None:
    """The library, or None where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / f"libcuda{''.join(flags)}.so"
    source = Path(__file__).parent / "driver.c"
    subprocess.run([compiler, "-O1", "-Wall", "-shared", "-fPIC", *flags, source, "-o", library, "-lrt"], check=True)
    return library


def use(library: Path, log: Path, patch=setattr) -> None:
    """Have this process take `library` for the driver."""
    os.environ["HYDRA_DRIVER_LOG"] = str(log)
    driver = ctypes.CDLL(str(library))
    stream = SimpleNamespace(cuda_stream=STREAM)
    cuda_ipc._primary_context.cache_clear()
    patch(cuda_ipc, "_driver", lambda: driver)
    patch(torch.cuda, "device", lambda device: nullcontext())
    patch(torch.cuda, "current_stream", lambda device: stream)


class DriverStore:
    """A `BlockStore` of "kv" blocks, behind `behind` bytes of an allocation of the driver."""

    def __init__(self, n_blocks: int, seed: int | None = None, behind: int = 0) -> None:
        self.spec, self.n_blocks, self.device = SPECS["kv"], n_blocks, torch.device("cuda", 0)
        size = self.spec.block_bytes
        self._base = ctypes.c_uint64()
        cuda_ipc._call("cuMemAlloc_v2", ctypes.byref(self._base), ctypes.c_size_t(behind + n_blocks * size))
        memory = (ctypes.c_ubyte * (n_blocks * size)).from_address(self._base.value + behind)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8).view(n_blocks, size)
        self.memory = None
        if seed is not None:
            self.bytes.copy_(content("kv", n_blocks, seed))

    def free(self) -> None:
        cuda_ipc._call("cuMemFree_v2", self._base)


def export(pipe, library: Path, log: Path) -> None:
    """A process that offers a store until it hears something."""
    use(library, log)
    store = DriverStore(8, seed=1, behind=4096)
    pipe.send(cuda_ipc.offer("", store, Tools()))
    pipe.recv()
    store.free()
