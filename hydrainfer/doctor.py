"""`hydrainfer doctor`: checks of what this machine has, what a server would use of it, and whether a server works."""

from __future__ import annotations

import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from rich.console import Console

from hydrainfer import builtin, machine
from hydrainfer.config import load
from hydrainfer.core import ConfigError, HydraError, Role
from hydrainfer.version import __version__

if TYPE_CHECKING:
    from hydrainfer.stores import Contents, Place, Trial

GIB = 1 << 30
_PACKAGES = ("torch", "transformers", "ray", "fastapi", "pyzmq", "llguidance", "av", "flashinfer-python", "decord")
_HEAD_DIM = 128  # the head size of most language models
_LOOK_S = 0.5
_BUSY_CORES, _BUSY_SHARE = 0.5, 0.1  # more than that is not the system's own work
_OPEN_FILES = 4096
_IMPORT_TORCH = """
import os, numpy
def pages():
    return int(open("/proc/self/statm").read().split()[1])
before = pages()
import torch
print((pages() - before) * os.sysconf("SC_PAGE_SIZE"))
"""
_NUMA_BALANCING, _NODES = Path("/proc/sys/kernel/numa_balancing"), Path("/sys/devices/system/node")
_QUESTION, _ANSWER = "What is in this picture?", "red circle"


class CheckResult(NamedTuple):
    """The result of one check. `state`: "bad" if a server would not work, "note" if it would be slower or lack a
    feature."""

    name: str
    state: Literal["ok", "note", "bad"]
    says: str


def examine(
    port: int, serve: bool, stores: Sequence[str] = (), begins: Callable[[str], None] = lambda _: None
) -> Iterator[CheckResult]:
    """The results of all checks, one after the other. `serve`: also start servers, which takes about a minute.
    `stores`: the shared stores that servers are to use, if any. `begins` is called before what takes long, with what it
    is."""
    yield CheckResult("hydrainfer", "ok", __version__)
    yield CheckResult("packages", "ok", ", ".join(f"{name} {v}" for name, v in machine.versions(_PACKAGES).items()))
    yield _machine()
    yield _others()
    yield _numa()
    yield _open_files()
    yield from _devices()
    begins("measuring CPU kernels; the first time they are compiled, for up to a minute")
    yield _kernels("CPU kernels", "cpu", "float32")
    yield _resizing()
    yield _port(port)
    yield _shared_memory()
    yield _folder()
    for store in stores:
        yield from _store(store)
    if serve:
        begins("starting a server in this process, and asking it about a picture: some seconds")
        yield _tried("server", {}, "one EPD instance in this process")
        ray = {"layout": "1E1PD", "launcher": "ray", "start_timeout_s": 180.0, "log_level": "error"}
        begins("starting Ray and two instances, and asking them: up to a minute")
        yield _tried("Ray", ray, "1E1PD as Ray actors, with a picture's embeddings moved between them")


def examine_model(name: str) -> Iterator[CheckResult]:
    """Whether a model is served, from the files that describe it; of a name on the hub only these are fetched, a few
    KiB. If it is: its family, its caches, and what a usual picture becomes."""
    from hydrainfer.checkpoint import REFERENCE, locate_description, name_of
    from hydrainfer.families import parse_config
    from hydrainfer.models import cache_specs
    from hydrainfer.planner.inputs import shape_of
    from hydrainfer.processor import image_adapter

    try:
        path = locate_description(name)
        model = parse_config(path).model
        shape = shape_of(str(path))
        adapter = image_adapter(model)
        picture = None if adapter is None else adapter.fit(*REFERENCE)
    except HydraError as e:
        yield CheckResult("model", "bad", e.message)
        return
    text, everything = model.text, Role.parse("EPD")
    says = f"{name_of(path)} is served: {model.architecture}, {text.layers} layers, {model.dtype}"
    if model.fp8 is not None:
        says += " widened from FP8"
    yield CheckResult("model", "ok", f"{says}, {shape.weight_bytes(everything) / GIB:.3g} GiB of weights")
    for spec in cache_specs(model, everything, model.dtype):
        if spec.paged:
            each = f"{spec.block_bytes // spec.block_tokens:,} bytes per token"
            seen = f", of the last {spec.window:,} tokens" if spec.window else ""
            yield CheckResult(f"cache {spec.name}", "ok", f"{each}{seen}, {len(spec.layers)} layers")
        else:
            yield CheckResult(f"cache {spec.name}", "ok", f"{spec.block_bytes:,} bytes per request and kept state")
    yield CheckResult("context", "ok", f"{text.context:,} tokens")
    if picture is None:
        yield CheckResult("pictures", "ok", "none, it takes text only")
        return
    videos = "videos, too" if model.vision.videos is not None else "no videos"
    width, height = REFERENCE
    yield CheckResult(
        "pictures", "ok", f"one of {width} x {height} is {picture.n_tokens + picture.n_inner:,} tokens; {videos}"
    )


def _machine() -> CheckResult:
    sets = ", ".join(machine.instruction_sets()) or "none that are used"
    memory = machine.memory_bytes() / GIB
    n = machine.n_cores()
    cores = f"{n} core{'s' * (n != 1)} of {machine.cpu_name()}"
    says = f"{cores} (instructions: {sets}), {memory:.1f} GiB of memory"
    return CheckResult("machine", "ok", says)


def _others() -> CheckResult:
    """Whether other processes compute. They slow a server down, and what it measures about itself is then wrong."""
    busy, n = machine.busy_cores(_LOOK_S), machine.n_cores()
    says = f"{busy:.1f} cores were busy before anything was started here"
    if busy <= max(_BUSY_CORES, _BUSY_SHARE * n):
        return CheckResult("other processes", "ok", says)
    return CheckResult(
        "other processes", "note", f"{says}: other processes compute, and a server would share with them"
    )


def _numa() -> CheckResult:
    """Whether the kernel moves pages between memory nodes, for which it makes each access to some of them fault."""
    n_nodes = len(list(_NODES.glob("node[0-9]*")))
    try:
        on = _NUMA_BALANCING.read_text().strip() != "0"
    except OSError:
        on = False
    if n_nodes < 2 or not on:
        state = "on" if on else "off"
        return CheckResult("memory nodes", "ok", f"{max(n_nodes, 1)}; kernel.numa_balancing is {state}")
    says = f"{n_nodes}, and kernel.numa_balancing is on: weights are moved about while they are read"
    return CheckResult("memory nodes", "note", f"{says}; turn it off (sysctl -w kernel.numa_balancing=0)")


def _open_files() -> CheckResult:
    """The descriptors that a server may have. It raises the soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n = machine.raise_open_files()
    says = f"{n} (soft limit {soft}, which a server raises)" if soft < n else str(n)
    if n >= _OPEN_FILES:
        return CheckResult("open files", "ok", says)
    return CheckResult(
        "open files", "note", f"{says}: too few for a thousand connections; raise `ulimit -Hn`, now {hard}"
    )


def _devices() -> Iterator[CheckResult]:
    import torch

    if not torch.cuda.is_available():
        yield CheckResult("GPU", "note", "none that torch can use; models run on the CPU")
        return
    for i in range(torch.cuda.device_count()):
        says = f"{i}: {torch.cuda.get_device_properties(i).name}"
        try:
            free, total = torch.cuda.mem_get_info(i)
        except RuntimeError as e:  # it is full, or another process has it for itself
            yield CheckResult("GPU", "bad", f"{says}, which cannot be used ({str(e).partition(chr(10))[0]})")
            continue
        yield CheckResult("GPU", "ok", f"{says}, {total / GIB:.0f} GiB, {free / GIB:.0f} of them free")
    yield _sharing()
    yield _kernels("CUDA kernels", "cuda", "bfloat16")


def _sharing() -> CheckResult:
    """Whether processes compute on a GPU at the same time, which only CUDA's MPS makes possible."""
    folder = machine.mps_folder()
    if folder is not None:
        return CheckResult("GPU sharing", "ok", f"MPS runs ({folder}): processes compute on a GPU at the same time")
    return CheckResult("GPU sharing", "ok", "no MPS: instances that share a GPU take turns, unless in one process")


def _kernels(name: str, device: str, dtype: str) -> CheckResult:
    """The kernel variants for a model. They are compiled the first time. FlashInfer is tried."""
    import torch

    from hydrainfer.ops import select_ops

    ops = select_ops(torch.device(device), getattr(torch, dtype), _HEAD_DIM)
    chosen: dict[str, list[str]] = {}
    for operator, variant in ops.describe():
        chosen.setdefault(variant, []).append(operator)
    says = "; ".join(f"{variant}: {', '.join(operators)}" for variant, operators in chosen.items())
    return CheckResult(name, "note" if ops.notes else "ok", "; ".join([*ops.notes, says]))


def _resizing() -> CheckResult:
    """What resizes pictures, and what it takes if that is torch."""
    from hydrainfer.assemble.media import resampler, resizes_by_torch

    config = load({}).config
    if not resizes_by_torch(config, resampler(config)):
        return CheckResult("resizing", "ok", "our kernel resizes pictures, to torchvision's pixels")
    ran = subprocess.run([sys.executable, "-c", _IMPORT_TORCH], capture_output=True, check=True, text=True)
    says = "torch resizes pictures, since no C++ compiler works or its result differs here"
    takes = f"each media worker loads torch, which takes {int(ran.stdout) >> 20} MiB"
    return CheckResult("resizing", "note", f"{says}: {takes}")


def _port(port: int) -> CheckResult:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as e:
            return CheckResult(
                "port", "bad", f"127.0.0.1:{port} cannot be had ({e.strerror}); choose another with --port"
            )
    return CheckResult("port", "ok", f"127.0.0.1:{port} is free")


def _shared_memory() -> CheckResult:
    """The room for Ray's objects. Caches of instances do not need it: they are shared memory without a file."""
    from hydrainfer.cluster.folder import OBJECT_STORE_BYTES

    folder = Path("/dev/shm")
    try:
        free = shutil.disk_usage(folder).free
        found = f"{free / GIB:.2f} GiB are free in {folder}"
    except OSError as e:
        free, found = 0, f"{folder} cannot be used ({e.strerror})"
    if free >= OBJECT_STORE_BYTES:
        return CheckResult("shared memory", "ok", found)
    hint = f"Ray, if it is used, takes {OBJECT_STORE_BYTES >> 20} MiB of the temporary directory instead"
    return CheckResult("shared memory", "note", f"{found}: {hint} (containers: --shm-size)")


def _folder() -> CheckResult:
    from hydrainfer.cluster.folder import RunFolder

    try:
        folder = RunFolder(for_ray=True)
    except HydraError as e:
        return CheckResult("folder", "bad", e.message)
    folder.remove()
    return CheckResult("folder", "ok", f"runs keep their sockets and logs in {folder.path.parent}")


def _store(text: str) -> Iterator[CheckResult]:
    """Whether a server can use each place of a shared store."""
    from hydrainfer.stores import parse_places

    try:
        places = parse_places(text)
    except ConfigError as e:
        yield CheckResult("store", "bad", e.message)
        return
    for place in places:
        yield _place(place)


def _place(place: Place) -> CheckResult:
    """Open a place as a server does, write to it and read from it. What is written is removed again."""
    from hydrainfer.stores import StoreError, try_places

    try:
        contents, trial = try_places([place], "hydrainfer doctor")
    except ConfigError as e:
        return CheckResult("store", "bad", e.message)
    except StoreError as e:
        return CheckResult("store", "note", f"{e}; a server starts without it, and tries again")
    return _opened(place, contents, trial)


def _opened(place: Place, contents: Contents, trial: Trial) -> CheckResult:
    """What a place holds, its limit and its speed, and what is wrong with them."""
    from hydrainfer.stores import FolderAddress

    address, limit_bytes = place.address, contents.limit_bytes
    says = f"{place.name}: {contents.n_bytes / GIB:.2f} GiB in use, no limit is set"
    if limit_bytes is not None:
        says = f"{place.name}: {contents.n_bytes / GIB:.2f} of {limit_bytes / GIB:.2f} GiB in use"
    if trial.byte_s:
        says += f"; blocks just written are read at {1 / trial.byte_s / GIB:.2g} GiB/s"
    if trial.full:
        return CheckResult("store", "note", f"{says}; blocks are read, but none are written: {trial.full}")
    if isinstance(address, FolderAddress):
        free = shutil.disk_usage(address.path).free
        says += f"; {free / GIB:.2f} GiB of the disk are free"
        if address.limit_bytes - contents.n_bytes > free:
            return CheckResult("store", "note", f"{says}, which is less than the limit allows: lower gib")
    elif limit_bytes is None and address.ttl_s is None:
        hint = "set maxmemory and an eviction policy there, or ttl_s here"
        return CheckResult("store", "note", f"{says}; nothing removes old blocks: {hint}")
    return CheckResult("store", "ok", f"{says}; it can be read and written")


def _tried(name: str, options: dict[str, object], what: str) -> CheckResult:
    """Start a server, ask its built-in model about a picture, and end it."""
    from hydrainfer.chatting import Server, ask_about
    from hydrainfer.serving import serve_in_background

    begin_s = time.perf_counter()
    try:
        with serve_in_background(load({"port": 0, **options}), Console(quiet=True)) as (url, instance):
            ready_s = time.perf_counter() - begin_s
            answer = "".join(ask_about(Server(url, instance.name), str(builtin.PICTURE), _QUESTION, 48))
    except Exception as e:  # any error is a result of the check
        why = e.message if isinstance(e, HydraError) else f"{type(e).__name__}: {e}"
        return CheckResult(name, "bad", f"{what} did not work: {why}")
    if _ANSWER not in answer:
        return CheckResult(name, "bad", f"{what} started, but answered wrongly: {answer.strip()!r}")
    return CheckResult(name, "ok", f"{what} started in {ready_s:.1f} s and answered rightly")


def report(findings: Iterator[CheckResult], say: Callable[[CheckResult], None]) -> bool:
    """Pass each result to `say` as it comes. Returns whether a server works here."""
    works = True
    for finding in findings:
        say(finding)
        works = works and finding.state != "bad"
    return works
