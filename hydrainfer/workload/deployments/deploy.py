"""The deployments of `bench compare`: layouts and commands that it starts itself, and servers that already run."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec

from hydrainfer.core import ConfigError, Layout
from hydrainfer.workload.deployments.processes import ServerProcess, free_port

_QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server to measure, given by one of `layout` (of `hydrainfer serve`, with `flags`), `start` (a command in which
    {port} and {cores} are filled in) or `url`. `threads`: what is known about the threads of a server started by
    another command. `model`: the model's name on the server; empty: the first one."""

    name: str
    layout: str = ""
    flags: str = ""
    start: str = ""
    url: str = ""
    model: str = ""
    threads: str = ""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.layout, self.start, self.url))) != 1:
            raise ConfigError(f"{self.name}: give one of layout, start and url", param="servers")
        if self.layout and not self.layout.endswith((".yaml", ".yml")):
            Layout.parse(self.layout)

    @property
    def n_instances(self) -> int | None:
        """The number of instances of the layout; None if the layout is a file or the server is not ours."""
        is_file = self.layout.endswith((".yaml", ".yml"))
        if self.layout and not is_file:
            return len(Layout.parse(self.layout).instances)
        return None


class HardwareSlice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hardware that each deployment gets as a whole. `cores`: such as "0-3,8" (empty: all); `gpus`: for
    CUDA_VISIBLE_DEVICES. `threads_per_instance`: of a layout; None: one thread for each of the cores, since on few
    cores instances seldom work at the same time. `model`: for the layouts, as `serve` takes it; None: the built-in
    one."""

    model: str | None = None
    cores: str = ""
    gpus: str | None = None
    threads_per_instance: int | None = None
    start_limit_s: float = 300.0

    @property
    def core_set(self) -> frozenset[int]:
        """The cores as a set. Raises `ConfigError` for cores that this process may not use."""
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        cores = parse_cores(self.cores) if self.cores else frozenset(allowed)
        if not cores <= allowed:
            missing = ", ".join(str(c) for c in sorted(cores - allowed))
            raise ConfigError(
                f"cores {missing} are not there for this process; it has {sorted(allowed)}", param="cores"
            )
        return cores

    @property
    def threads(self) -> int:
        return self.threads_per_instance or len(self.core_set)


def parse_cores(text: str) -> frozenset[int]:
    """The cores in a text such as `"0-3,8"`. Raises `ConfigError`."""
    cores: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ConfigError(f"cores are written 0-3,8, not {text!r}", param="cores") from None
    return frozenset(cores)


def command_of(one: Deployment, place: HardwareSlice, port: int) -> list[str]:
    """The command of a deployment that is started here."""
    if one.start:
        cores = place.cores or ",".join(str(c) for c in sorted(place.core_set))
        return shlex.split(one.start.replace("{port}", str(port)).replace("{cores}", cores))
    model = [place.model] if place.model else []
    command = ["hydrainfer", "serve", *model, "--host", "127.0.0.1", "--port", str(port), "--layout", one.layout]
    if one.n_instances is not None:
        command += ["--threads", str(place.threads * one.n_instances)]
    return [*command, *shlex.split(one.flags)]


@contextlib.asynccontextmanager
async def running(one: Deployment, place: HardwareSlice, log: Path) -> AsyncIterator[tuple[str, ServerProcess | None]]:
    """The URL of the deployment once it is healthy, and its process if it was started here. The process and all that it
    started are gone afterwards. Raises `ServerFailed`, `ConfigError`."""
    if one.url:
        yield one.url, None
        return
    port = free_port()
    command = command_of(one, place, port)
    real = command
    if one.layout:
        real = [sys.executable, "-m", *command]
    with ServerProcess(one.name, real, port, log, _environment(one, place), place.core_set) as process:
        await process.wait_healthy(place.start_limit_s)
        yield process.url, process


def _environment(one: Deployment, place: HardwareSlice) -> Mapping[str, str]:
    """The environment of a server's process. A server that is not ours gets none of the settings that suit ours."""
    gpus = {} if place.gpus is None else {"CUDA_VISIBLE_DEVICES": place.gpus}
    if one.start:
        return {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KMP_", "TOKENIZERS_"))} | gpus
    return _QUIET | dict(os.environ) | gpus
