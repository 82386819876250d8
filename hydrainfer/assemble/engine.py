"""Assembly of one engine: the weights and caches of its role, lanes, scheduler, and moves between instances if it has
peers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from hydrainfer.assemble.draft_model import guesser_of, load_draft
from hydrainfer.assemble.drafting import drafters_of, drafting_of, guessing_of, said_of
from hydrainfer.assemble.model import Progress, attention_and_graphs, lanes_for, load_for, runners_for
from hydrainfer.assemble.sizes import (
    GIB,
    ahead_of,
    budgets_of,
    cache_sizes,
    dtype_of,
    host_tier_sizes,
    no_memory,
    overlap_of,
    torch_device,
)
from hydrainfer.assemble.store import OpenStore, open_store, stored_of
from hydrainfer.cache import DEVICE, HOST, STORE, CacheSet, CacheSizes, CacheSpec, StoreTier, tokens_in
from hydrainfer.checkpoint import ModelConfig
from hydrainfer.cluster import Facts, Node
from hydrainfer.config import ServeConfig
from hydrainfer.core import CostModel, Guessing, Lane, OutputSink, PixelSource, Role, Stage, owner_of
from hydrainfer.engine import (
    Copies,
    Engine,
    EventSink,
    Mover,
    Moves,
    Overlap,
    Runner,
    Stored,
    Timing,
    WaitFor,
    tier_movers,
)
from hydrainfer.grammar import Follower, Grammars
from hydrainfer.machine import instruction_sets
from hydrainfer.models import Model
from hydrainfer.ops import block_copier, settle
from hydrainfer.runtime import (
    EmulatedDevice,
    EmulatedRunner,
    LaneThread,
    spoken_ids,
)
from hydrainfer.scheduler import Budgets, Drafting, Policy, Scheduler
from hydrainfer.storage import (
    ACCESS,
    BlockStore,
    CudaQueue,
    Exports,
    LayerLoader,
    LocalExports,
    Region,
    Routes,
    StorePuller,
    between_tiers,
    needs_shared,
)

_BROKEN_AFTER = 3  # failed batches


class Surroundings(NamedTuple):
    """An engine's surroundings: the sinks of its outputs, and the sources of time and pictures. `node`: its place among
    several instances, which share `local` if they are in one process. `grammars`: None if no request has one."""

    sink: OutputSink
    record: EventSink
    wake: Callable[[], None]
    pixels: PixelSource
    clock: Callable[[], float] = time.monotonic
    node: Node | None = None
    local: LocalExports | None = None
    grammars: Grammars | None = None


class Sizing(NamedTuple):
    """The resources of an engine. `share`: its share of the free memory. `cost`: the cost model of an emulated
    device."""

    n_context: int
    share: float = 1.0
    n_threads: int = 1
    cost: CostModel | None = None


class Built(NamedTuple):
    """An engine and its facts. `kv_tokens`: the tokens that fit its whole KV cache; None without a limit or a KV
    cache."""

    engine: Engine
    caches: CacheSet
    facts: Facts
    kv_tokens: int | None


class _Settled(NamedTuple):
    """The options that may be `auto`, resolved for this machine. `ahead`: `--async-scheduling`."""

    device: torch.device
    dtype: str
    overlap: Overlap
    ahead: bool


def build_engine(
    config: ServeConfig,
    described: ModelConfig,
    role: Role,
    around: Surroundings,
    sizing: Sizing,
    on_progress: Progress | None = None,
) -> Built:
    """Open the store, load what the role needs and assemble the engine. Raises `ConfigError` or `CheckpointError`."""
    device = torch_device(config)
    dtype, overlap = dtype_of(config, device, described.dtype), overlap_of(config, device)
    settled = _Settled(device, dtype, overlap, ahead_of(config, device))
    drafters = drafters_of(config, device, described, ahead=settled.ahead)
    described = guessing_of(described, drafters)
    if config.store is None:
        return _build(config, described, role, around, sizing, settled, drafters, None, on_progress)
    store = open_store(config, described, dtype)  # now: what is wrong with it shall not be found after minutes
    try:
        return _build(config, described, role, around, sizing, settled, drafters, store, on_progress)
    except BaseException:
        store.shared.close()
        raise


def _build(
    config: ServeConfig,
    described: ModelConfig,
    role: Role,
    around: Surroundings,
    sizing: Sizing,
    settled: _Settled,
    drafters: tuple[str, ...],
    store: OpenStore | None,
    on_progress: Progress | None,
) -> Built:
    """Load what the role needs and assemble the engine, with this store if there is one. Raises `ConfigError` or
    `CheckpointError`."""
    device, dtype, overlap, _ = settled
    node, guessing = around.node, None
    model, lanes = None, dict[Lane, LaneThread]()
    if sizing.cost is None:
        pause = (lambda: lanes[Lane.VISION].pause()) if overlap == "slice" else None
        model = load_for(config, described, role, dtype, sizing.n_threads, on_progress, pause)
    weight_bytes, draft = 0 if model is None else model.weight_bytes, None
    if model is not None and config.draft_model is not None and role.runs(Stage.DECODE):
        draft = load_draft(config, described, dtype, device, sizing.n_threads, sizing.share)
        weight_bytes += draft.n_bytes
    sizes = cache_sizes(config, described, role, dtype, device, sizing.n_context, sizing.share, weight_bytes)
    host = host_tier_sizes(config, described, role, dtype, sizing.n_context)
    stores, clear = _stores(sizes, device, shared=node is not None and needs_shared(config.transport, device))
    hosted = _host_stores(host, device)
    settle(device)  # lanes and copies have their own streams, which do not wait for this one
    caches = CacheSet(*sizes, None if model is None else clear)
    budgets = budgets_of(config, overlap)
    follower = None if around.grammars is None or model is None else Follower(around.grammars)
    drafting = Drafting()
    if role.runs(Stage.DECODE):
        guessing = Guessing.of(config.drafts, config.max_drafts)
        drafting = drafting_of(config, drafters, budgets, model, follower, described.text.vocab)
    tier = None if store is None else store.tier(caches.specs)
    scheduler = _scheduler(config, role, caches, budgets, CacheSet(host), drafting, tier)
    engines: list[Engine] = []  # the engine, once it exists: lanes already run before, to capture graphs
    runners: Mapping[Lane, Runner]
    computed: Facts = {}
    loading: dict[str, WaitFor] = {}
    if model is None:
        assert sizing.cost is not None
        runners = _emulated(described, role, stores, around, sizing.cost, overlap, guessing)
    else:
        busy = (lambda _: False) if overlap == "slice" else lambda lane: any(e.lanes.busy(lane) for e in engines)
        lanes |= lanes_for(model, around.wake, sizing.n_threads, busy, shared=overlap == "slice")
        guesser = None if draft is None else guesser_of(config, described, draft, stores.values())
        runners = of_model = runners_for(config, model, lanes, stores, around.pixels, follower, guesser, loading)
        computed = _operators(model)
        if draft is not None:
            computed["draft_model"] = f"{config.draft_model}, {draft.n_bytes / GIB:.2g} GiB"
        if drafting.drafters:
            computed["drafts"] = said_of(drafting)
        if device.type == "cuda":
            computed["attention"], computed["graphs"] = attention_and_graphs(config, model, of_model)
    stored = None
    if store is not None and tier is not None:
        stored = stored_of(store.shared, tier, scheduler, stores, around.wake, around.clock)
    engine = Engine(
        scheduler,
        runners,
        around.sink,
        around.record,
        overlap,
        moves=None if node is None else _moves(config, node, around.local, scheduler, stores, hosted),
        moved=None if node is None else node.moved,
        give_up_after=float("inf") if node is None else _BROKEN_AFTER,  # a single instance is not restarted
        ready=(lambda _: True) if around.grammars is None else around.grammars.ready,
        copies=_copies(scheduler, stores, hosted, stored, around.wake, loading),
        ahead=settled.ahead,
    )
    engines.append(engine)
    kv_tokens = tokens_in(sizes.most)
    facts = _facts(config, settled, sizing.n_threads, sizes.blocks, hosted, model is None) | computed
    if store is not None:
        facts["store"] = store.fact
    return Built(engine, caches, facts, None if kv_tokens == float("inf") else int(kv_tokens))


def _facts(
    config: ServeConfig,
    settled: _Settled,
    n_threads: int,
    blocks: dict[CacheSpec, int],
    hosted: dict[str, BlockStore],
    emulated: bool,
) -> Facts:
    """The resolved options of the engine, for people. `blocks`: the number of each cache; `hosted`: the stores in host
    memory."""
    return {
        "device": "emulated" if emulated else str(settled.device),
        "dtype": settled.dtype,
        **({} if config.quantization == "none" else {"quantization": config.quantization}),
        "threads": n_threads,
        "overlap": settled.overlap,
        **({"async_scheduling": "on"} if settled.ahead else {}),
        **_gib_by_option(blocks),
        **({"host_cache_gib": round(sum(s.n_bytes for s in hosted.values()) / GIB, 3)} if hosted else {}),
    }


def _stores(
    sizes: CacheSizes, device: torch.device, shared: bool
) -> tuple[dict[str, BlockStore], Callable[[int], None] | None]:
    """The stores of the caches, and a function that zeroes an extent of shared memory; None if none is shared. Zeroing
    is needed because one cache's numbers may be NaNs for another, and masked rows are read, too."""
    blocks, split = sizes
    try:
        if split is None:
            return {spec.name: BlockStore(spec, n, device, shared) for spec, n in blocks.items()}, None
        size = split.extent_bytes
        region = Region.of("arena", split.n_extents * size, device, shared)
        stores = {
            spec.name: BlockStore(spec, split.numbered(spec.name), device, region=region)
            if spec.name in split.blocks
            else BlockStore(spec, n, device, shared)
            for spec, n in blocks.items()
        }
    except (MemoryError, RuntimeError, OSError):  # torch's out-of-memory errors are RuntimeErrors
        raise no_memory(blocks) from None
    return stores, lambda extent: region.clear(extent * size, size)


def _emulated(
    model: ModelConfig,
    role: Role,
    stores: dict[str, BlockStore],
    around: Surroundings,
    cost: CostModel,
    overlap: Overlap,
    guessing: Guessing | None,
) -> dict[Lane, Runner]:
    spoken = spoken_ids(model.text.vocab, min(model.media_tokens, default=model.text.vocab))
    device = EmulatedDevice(cost, around.clock, stores, spoken, around.pixels, overlap == "slice", guessing)
    lanes = [lane for lane in role.lanes if lane is Lane.LANGUAGE or model.vision is not None]
    return {lane: EmulatedRunner(device, lane) for lane in lanes}


def _host_stores(sizes: dict[CacheSpec, int], device: torch.device) -> dict[str, BlockStore]:
    try:
        return {spec.name: BlockStore(spec, n, pinned=device.type == "cuda") for spec, n in sizes.items()}
    except (MemoryError, RuntimeError, OSError):
        raise no_memory(sizes) from None


def _scheduler(
    config: ServeConfig,
    role: Role,
    caches: CacheSet,
    budgets: Budgets,
    host: CacheSet,
    drafting: Drafting,
    store: StoreTier | None,
) -> Scheduler:
    policy = Policy(
        order=config.order,
        encode_gate=config.encode_gate,
        encode_wait_s=config.encode_wait_s,
        headroom_tokens=config.headroom_tokens,
        batching=config.batching,
    )
    return Scheduler(role, caches, budgets, policy, host=host, drafting=drafting, store=store)


def _moves(
    config: ServeConfig,
    node: Node,
    local: LocalExports | None,
    scheduler: Scheduler,
    stores: dict[str, BlockStore],
    hosted: dict[str, BlockStore],
) -> Moves:
    """The engine's moves: its caches exported to peers, and routes from theirs to its own and to those in host memory
    (`hosted`)."""
    device = next(iter(stores.values())).device
    owner, secret, host = owner_of(node.name, node.incarnation), node.plan.secret, node.ip
    exports = Exports(owner, stores, config.transport, host=host, secret=secret, local=local)
    copy_blocks = block_copier(device) if config.native_kernels else None
    routes = Routes(config.transport, device, secret=secret, local=local, copy_blocks=copy_blocks)
    puller = StorePuller({DEVICE: stores, HOST: hosted}, exports, routes, node.wake)
    timing = Timing(patience_s=node.plan.pulse.patience_s)
    return Moves(node.name, node.incarnation, scheduler, node.placer, node, puller, timing)


def _copies(
    scheduler: Scheduler,
    stores: dict[str, BlockStore],
    hosted: dict[str, BlockStore],
    stored: Stored | None,
    wake: Callable[[], None],
    loading: dict[str, WaitFor],
) -> Copies | None:
    """The copies between the tiers of this instance, and from and to its shared store; None if there are none."""
    movers: dict[str, Mover] = {}
    if hosted:
        movers |= tier_movers(*between_tiers({DEVICE: stores, HOST: hosted}, wake))
        movers |= _layer_loader(stores, hosted, wake)
    if stored is not None:
        movers[STORE] = stored
    return Copies(scheduler, movers, stored, loading) if movers else None


def _layer_loader(
    stores: dict[str, BlockStore], hosted: dict[str, BlockStore], wake: Callable[[], None]
) -> dict[str, Mover]:
    """What copies from host memory layer by layer; nothing where a device does not order copies and batches."""
    device = next(iter(stores.values())).device
    copy_blocks = block_copier(device)
    if copy_blocks is None or any(store.spec.block_bytes % ACCESS for store in hosted.values()):
        return {}
    return {HOST: LayerLoader(hosted, stores, lambda: CudaQueue(device, copy_blocks), wake)}


def _gib_by_option(sizes: dict[CacheSpec, int]) -> Facts:
    n_bytes: Counter[str] = Counter()
    for spec, n in sizes.items():
        n_bytes[spec.size_option] += n * spec.block_bytes
    return {option: round(n / GIB, 3) for option, n in n_bytes.items()}


def _operators(model: Model) -> Facts:
    """The facts about operators: those of each variant, and why others do not run, one line each; and the ways that
    matrices are multiplied."""
    by_variant: dict[str, list[str]] = {}
    for op, variant in model.ops.describe():
        by_variant.setdefault(variant, []).append(op)
    facts: Facts = {
        "operators": "\n".join([*(f"{v}: {', '.join(o)}" for v, o in by_variant.items()), *model.ops.notes])
    }
    if model.ops.products is not None:
        facts["matrix_products"] = "\n".join(model.ops.products.describe())
        facts["instruction_sets"] = " ".join(instruction_sets())
    return facts
