"""One engine: weights and caches of its role, lanes, scheduler, and its dealings with peers if it has any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hydrainfer.assemble.sizes import GIB, SIZE_OPTION, cache_sizes, dtype_of, no_memory, overlap_of, torch_device
from hydrainfer.cache import CacheKind, CacheSet, CacheSpec
from hydrainfer.cluster import Node
from hydrainfer.config import ServeConfig
from hydrainfer.core import Lane, OutputSink, PixelSource, Role
from hydrainfer.engine import Engine, EventSink, Moves, Runner
from hydrainfer.models import DTYPES, Model, load_model, read_config
from hydrainfer.ops import select_ops
from hydrainfer.runtime import LanguageRunner, VisionRunner
from hydrainfer.scheduler import Budgets, Policy, Scheduler
from hydrainfer.storage import BlockStore, LocalExports, LocalTransport, StorePuller

Progress = Callable[[int, int], None]
Facts = dict[str, str | int | float]


class Surroundings(NamedTuple):
    """Where an engine's words go and pictures come from. `node`: its place among several instances."""

    sink: OutputSink
    record: EventSink
    wake: Callable[[], None]
    pixels: PixelSource
    node: Node | None = None


class Built(NamedTuple):
    """`kv_tokens`: what its whole KV cache holds, None if it has none."""

    engine: Engine
    caches: CacheSet
    facts: Facts
    kv_tokens: int | None


def build_engine(
    config: ServeConfig,
    role: Role,
    around: Surroundings,
    *,
    n_context: int,
    share: float = 1.0,
    n_threads: int = 1,
    local: LocalExports | None = None,
    on_progress: Progress | None = None,
) -> Built:
    """Load what the role needs and put it together. `share`: of the free memory. Raises `ConfigError` or
    `CheckpointError`."""
    path, device = Path(config.model).expanduser(), torch_device(config)
    model_config = read_config(path)
    dtype = dtype_of(config, device, model_config.dtype)
    ops = select_ops(device, DTYPES[dtype], model_config.text.head_dim, use_native=config.native_kernels)
    model = load_model(path, role, device, dtype, on_progress, ops)
    sizes = cache_sizes(config, model_config, role, dtype, device, n_context, share)
    try:
        stores = {spec.name: BlockStore(spec, n, model.device) for spec, n in sizes.items()}
    except (MemoryError, RuntimeError):  # torch's own kinds of being out of memory are RuntimeErrors
        raise no_memory(sizes) from None
    caches = CacheSet(sizes)
    scheduler = _scheduler(config, role, caches)
    engine: Engine

    def threads_beside(other: Lane) -> Callable[[], int]:
        """All cores while the other lane is idle, half of them while it runs."""
        return lambda: max(1, n_threads // 2) if engine.in_flight(other) else n_threads

    runners: dict[Lane, Runner] = {}
    if Lane.VISION in role.lanes:
        threads = threads_beside(Lane.LANGUAGE)
        runners[Lane.VISION] = VisionRunner(model, stores["embed"], around.pixels, around.wake, threads)
    if Lane.LANGUAGE in role.lanes:
        threads = threads_beside(Lane.VISION)
        runners[Lane.LANGUAGE] = LanguageRunner(model, stores["kv"], stores.get("embed"), around.wake, threads)
    moves, moved = None, None
    if around.node is not None:
        moves, moved = _moves(around.node, scheduler, stores, local), around.node.moved
    overlap = overlap_of(config, device)
    engine = Engine(scheduler, runners, around.sink, around.record, overlap, moves, moved)
    facts: Facts = {
        "device": str(device),
        "dtype": dtype,
        "threads": n_threads,
        "overlap": overlap,
        **{SIZE_OPTION[spec.kind]: round(n * spec.block_bytes / GIB, 3) for spec, n in sizes.items()},
        "operators": _operators(model),
    }
    return Built(engine, caches, facts, _kv_tokens(sizes))


def _scheduler(config: ServeConfig, role: Role, caches: CacheSet) -> Scheduler:
    policy = Policy(
        encode_gate=config.encode_gate, encode_wait_s=config.encode_wait_s, headroom_tokens=config.headroom_tokens
    )
    budgets = Budgets(tokens=config.token_budget, images=config.image_budget, running=config.max_running)
    return Scheduler(role, caches, budgets, policy)


def _moves(node: Node, scheduler: Scheduler, stores: dict[str, BlockStore], local: LocalExports | None) -> Moves:
    assert local is not None
    exports = {spec: local.add(f"{node.name}/{spec}", store) for spec, store in stores.items()}
    puller = StorePuller(stores, exports, {"local": LocalTransport(local)}, node.wake)
    return Moves(node.name, node.incarnation, scheduler, node.roster, node, puller)


def _kv_tokens(sizes: dict[CacheSpec, int]) -> int | None:
    return next((s.block_tokens * n for s, n in sizes.items() if s.kind is CacheKind.FULL), None)


def _operators(model: Model) -> str:
    """Which variants run, and why not others, in one line each."""
    by_variant: dict[str, list[str]] = {}
    for op, variant in model.ops.describe():
        by_variant.setdefault(variant, []).append(op)
    return "\n".join([*(f"{v}: {', '.join(ops)}" for v, ops in by_variant.items()), *model.ops.notes])
