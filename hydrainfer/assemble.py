"""The one file that names concrete classes: from a configuration to a running instance."""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hydrainfer.cache import CacheKind, CacheSet, CacheSpec
from hydrainfer.cluster import LocalLink, Member, Router
from hydrainfer.config import ServeConfig
from hydrainfer.core import ConfigError, Lane, Layout, owner_of
from hydrainfer.engine import Engine, EngineHandle, EngineThread, Moves, OutputSink, Overlap, Runner
from hydrainfer.metrics import PrometheusRecorder
from hydrainfer.models import DTYPES, Model, load_model, read_config, vision_fingerprint
from hydrainfer.ops import select_ops
from hydrainfer.processor import MediaLimits, ModelDescription, PixelStore, Processor, load_description
from hydrainfer.runtime import LanguageRunner, VisionRunner
from hydrainfer.scheduler import Budgets, Policy, Scheduler
from hydrainfer.server import Intake, Sessions
from hydrainfer.storage import (
    BlockStore,
    Exports,
    LocalExports,
    Routes,
    StorePuller,
    check_transport,
    needs_shared,
)

Progress = Callable[[int, int], None]
_GIB = 1 << 30
_CUDA_WORKSPACE_BYTES = 2 * _GIB
_PICTURES_CACHED = 64
_TOKENS_PER_RUNNING = 1024  # the automatic KV cache holds this many tokens for each of max_running requests


@dataclass(frozen=True, slots=True)
class Instance:
    """The running instances of one layout and what the server and the offline API need beside them. `engine`: the only
    instance, or the router in front of several. `pools`: the caches of each, by name. `facts`: the resolved values of
    options that were `auto`."""

    config: ServeConfig
    name: str
    intake: Intake
    sessions: Sessions
    engine: EngineHandle
    recorder: PrometheusRecorder
    pools: dict[str, CacheSet]
    facts: dict[str, Any]

    @property
    def caches(self) -> CacheSet:
        """Of the only instance."""
        (caches,) = self.pools.values()
        return caches

    def close(self) -> None:
        """End what runs, stop every thread. Safe to repeat."""
        self.intake.close()
        self.engine.close()
        self.sessions.settle_all()


@dataclass(frozen=True, slots=True)
class _Part:
    """One instance before it runs: its name, weights and the sizes of its caches."""

    name: str
    model: Model
    sizes: dict[CacheSpec, int]


def start_instance(config: ServeConfig, on_progress: Progress | None = None) -> Instance:
    """Load the model and start the engines. Raises `ConfigError` or `CheckpointError`, one line each."""
    layout = Layout.parse(config.layout)
    device, dtype = _device(config), _dtype(config)
    transport = _transport(config, device)
    path = Path(config.model).expanduser()
    description = load_description(path, max_context=config.max_model_len)
    model_config = read_config(path)
    dtype = dtype or _auto_dtype(device, model_config.dtype)
    ops = select_ops(device, DTYPES[dtype], model_config.text.head_dim, use_native=config.native_kernels)
    models = [load_model(path, role, device, dtype, on_progress, ops) for role in layout.instances]
    sizes = [_cache_sizes(config, m, description.n_context, 1 / len(models)) for m in models]
    for s in sizes:
        description = _fit_context(config, description, s)
    parts = [_Part(n, m, s) for n, m, s in zip(_names(layout), models, sizes)]

    clock = time.monotonic
    pixels = PixelStore(int(config.pixel_memory_mib * 2**20))
    limits = MediaLimits(max_images=config.max_images, max_pixels=config.max_image_pixels)
    processor = Processor(description, pixels, weights=vision_fingerprint(path), dtype=dtype, limits=limits)
    sessions = Sessions(description.vocabulary, pixels, clock, max_requests=config.max_waiting)
    name = config.served_model_name or path.resolve().name

    threads = {part.name: EngineThread(clock, f"engine-{part.name}") for part in parts}
    handle: EngineHandle
    placed: _Placed | None = None
    if len(parts) == 1:
        (handle,) = threads.values()
    else:
        lock = threading.Lock()
        router = Router(
            [Member(part.name, part.model.role, threads[part.name]) for part in parts], lock, config.balancing
        )
        for part in parts:
            threads[part.name].on_death = partial(router.lost, part.name)
        handle, placed = (
            router,
            _Placed(router, LocalLink(threads, lock), transport, LocalExports(), secrets.token_bytes(32)),
        )
    recorder = PrometheusRecorder(name, handle.stats)
    n_threads = config.threads or len(os.sched_getaffinity(0))
    share = max(1, n_threads // len(parts))
    pools = {part.name: CacheSet(part.sizes) for part in parts}
    engines: dict[str, Engine] = {}
    try:
        for part in parts:
            engines[part.name] = _engine(
                config, part, pools[part.name], pixels, threads[part.name], sessions.sink, recorder, share, placed
            )
    except ConfigError:
        for engine in engines.values():  # their lanes have threads already
            engine.close()
        raise
    for part in parts:
        threads[part.name].start(engines[part.name])
    sessions.attach(handle)
    facts = {
        "served_model_name": name,
        "device": str(device),
        "dtype": dtype,
        "max_model_len": description.n_context,
        "threads": n_threads if len(parts) == 1 else f"{share} for each of {len(parts)} instances",
        "overlap": _overlap(config, device),
        **({} if placed is None else {"transport": transport}),
        **_cache_facts(parts),
        "operators": _operators(models[0]),
    }
    intake = Intake(processor, sessions, n_threads=config.preprocess_threads, timeout_s=config.request_timeout_s)
    return Instance(config, name, intake, sessions, handle, recorder, pools, facts)


def _names(layout: Layout) -> list[str]:
    """E0, E1, P0 …"""
    seen: Counter[str] = Counter()
    names = []
    for role in map(str, layout.instances):
        names.append(f"{role}{seen[role]}")
        seen[role] += 1
    return names


class _Placed(NamedTuple):
    """What an engine needs to have peers. `secret`: of this process, nobody else is to join."""

    router: Router
    link: LocalLink
    transport: str
    exports: LocalExports
    secret: bytes


def _engine(
    config: ServeConfig,
    part: _Part,
    caches: CacheSet,
    pixels: PixelStore,
    thread: EngineThread,
    sink: OutputSink,
    recorder: PrometheusRecorder,
    n_threads: int,
    placed: _Placed | None,
) -> Engine:
    model, role = part.model, part.model.role
    policy = Policy(
        encode_gate=config.encode_gate, encode_wait_s=config.encode_wait_s, headroom_tokens=config.headroom_tokens
    )
    budgets = Budgets(tokens=config.token_budget, images=config.image_budget, running=config.max_running)
    scheduler = Scheduler(role, caches, budgets, policy)
    shared = placed is not None and needs_shared(placed.transport, model.device)
    try:
        stores = {spec.name: BlockStore(spec, n, model.device, shared) for spec, n in part.sizes.items()}
    except (MemoryError, RuntimeError, OSError):  # torch's own kinds of being out of memory are RuntimeErrors
        raise _no_memory(part.sizes) from None
    engine: Engine

    def threads_beside(other: Lane) -> Callable[[], int]:
        """All cores while the other lane is idle, half of them while it runs."""
        return lambda: max(1, n_threads // 2) if engine.in_flight(other) else n_threads

    runners: dict[Lane, Runner] = {}
    if Lane.VISION in role.lanes:
        runners[Lane.VISION] = VisionRunner(
            model, stores["embed"], pixels.get, wake=thread.wake, threads=threads_beside(Lane.LANGUAGE)
        )
    if Lane.LANGUAGE in role.lanes:
        runners[Lane.LANGUAGE] = LanguageRunner(
            model, stores["kv"], stores.get("embed"), wake=thread.wake, threads=threads_beside(Lane.VISION)
        )
    moves = None
    if placed is not None:
        puller = _puller(part.name, stores, placed, thread.wake)
        moves = Moves(part.name, 0, scheduler, placed.router, placed.link, puller)
    engine = Engine(scheduler, runners, sink, recorder.record, _overlap(config, model.device), moves)
    return engine


def _puller(name: str, stores: dict[str, BlockStore], placed: _Placed, wake: Callable[[], None]) -> StorePuller:
    device = next(iter(stores.values())).data.device
    exports = Exports(owner_of(name, 0), stores, placed.transport, secret=placed.secret, local=placed.exports)
    routes = Routes(placed.transport, device, secret=placed.secret, local=placed.exports)
    return StorePuller(stores, exports, routes, wake)


def _cache_facts(parts: list[_Part]) -> dict[str, Any]:
    """Sizes as the options give them: per instance."""
    sizes: dict[str, list[float]] = {}
    for part in parts:
        for spec, n in part.sizes.items():
            sizes.setdefault(_SIZE_OPTION[spec.kind], []).append(round(n * spec.block_bytes / _GIB, 3))
    return {option: s[0] if len(s) == 1 else ", ".join(map(str, s)) for option, s in sizes.items()}


def _operators(model: Model) -> str:
    """Which variants run, and why not others, in one line each."""
    by_variant: dict[str, list[str]] = {}
    for op, variant in model.ops.describe():
        by_variant.setdefault(variant, []).append(op)
    return "\n".join([*(f"{v}: {', '.join(ops)}" for v, ops in by_variant.items()), *model.ops.notes])


_SIZE_OPTION = {CacheKind.FULL: "kv_cache_gib", CacheKind.EMBED: "image_cache_gib"}


def _device(config: ServeConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no CUDA device; use --device cpu", param="device")
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def _overlap(config: ServeConfig, device: torch.device) -> Overlap:
    """On a CPU the lanes would only halve each other's cores: taking turns measures better (benchmarks/b05)."""
    if config.overlap == "auto":
        return "free" if device.type == "cuda" else "off"
    return config.overlap


def _transport(config: ServeConfig, device: torch.device) -> str:
    """Between instances of one process, all on one device."""
    check_transport(config.transport, device)
    if config.transport in ("nccl", "cuda-ipc"):
        raise ConfigError(
            f"transport {config.transport} is for instances in processes of their own; use local or auto",
            param="transport",
        )
    return "local" if config.transport == "auto" else config.transport


def _dtype(config: ServeConfig) -> str | None:
    return None if config.dtype == "auto" else config.dtype


def _auto_dtype(device: torch.device, checkpoint: str) -> str:
    """CPU: float32 (few have 16-bit arithmetic). CUDA: the checkpoint's, or bfloat16 if that is float32."""
    if device.type == "cpu":
        return "float32"
    return "bfloat16" if checkpoint == "float32" else checkpoint


def _cache_sizes(config: ServeConfig, model: Model, n_context: int, share: float) -> dict[CacheSpec, int]:
    """Blocks per cache of an instance, from the options or from its share of the memory that is free."""
    specs = {s.kind: s for s in model.cache_specs(kv_block_tokens=config.block_tokens)}
    embed, kv = specs.get(CacheKind.EMBED), specs.get(CacheKind.FULL)
    sizes: dict[CacheSpec, int] = {}
    wants = []
    if embed is not None:
        picture_blocks = embed.blocks_for(model.config.vision.tokens)
        pictures = picture_blocks * max(_PICTURES_CACHED, config.max_images)
        sizes[embed] = _blocks(config.image_cache_gib, embed) or pictures
        wants.append(f"a picture {picture_blocks * embed.block_bytes}")
    if kv is not None:
        n_kv = _blocks(config.kv_cache_gib, kv)
        if n_kv is None:
            wanted = max(kv.blocks_for(config.max_running * _TOKENS_PER_RUNNING), kv.blocks_for(n_context))
            taken = sizes[embed] * embed.block_bytes if embed is not None else 0
            fits = int(_free_bytes(config, model.device) * share - taken) // kv.block_bytes
            n_kv = min(wanted, fits) if model.device.type == "cpu" else fits
        sizes[kv] = n_kv
        wants.append(f"a KV block {kv.block_bytes}")
    if (kv is not None and sizes[kv] < 1) or (embed is not None and sizes[embed] < picture_blocks):
        raise ConfigError(
            f"no memory for the caches of an instance {model.role}: {' and '.join(wants)} bytes; lower --max-running "
            "or give --kv-cache-gib and --image-cache-gib"
        )
    if sum(spec.block_bytes * n for spec, n in sizes.items()) > _total_bytes(model.device):
        raise _no_memory(sizes)
    return sizes


def _no_memory(sizes: dict[CacheSpec, int]) -> ConfigError:
    gib = sum(spec.block_bytes * n for spec, n in sizes.items()) / _GIB
    return ConfigError(
        f"no memory for caches of {gib:.3g} GiB; lower --kv-cache-gib, --image-cache-gib or --max-running"
    )


def _total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _blocks(gib: float | None, spec: CacheSpec) -> int | None:
    return None if gib is None else max(1, int(gib * _GIB) // spec.block_bytes)


def _free_bytes(config: ServeConfig, device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - config.gpu_memory_fraction) * total) - _CUDA_WORKSPACE_BYTES
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 // 2  # half: the rest of the machine lives here, too
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _fit_context(config: ServeConfig, description: ModelDescription, sizes: dict[CacheSpec, int]) -> ModelDescription:
    """The context length can be no longer than what the whole KV cache holds."""
    held = next((s.block_tokens * n for s, n in sizes.items() if s.kind is CacheKind.FULL), description.n_context)
    if held >= description.n_context:
        return description
    if config.max_model_len is not None:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the KV cache holds {held} tokens; "
            "raise --kv-cache-gib or lower --max-model-len",
            param="max_model_len",
        )
    return dataclasses.replace(description, n_context=held)


__all__ = ["Instance", "start_instance"]
