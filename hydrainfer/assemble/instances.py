"""The start of a layout's instances: a single one on a thread, or several behind a hub."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hydrainfer.assemble.drafting import drafters_of, guessing_of
from hydrainfer.assemble.engine import Sizing, Surroundings, build_engine
from hydrainfer.assemble.model import Progress
from hydrainfer.assemble.sizes import ahead_of, block_bytes, check_between_processes, torch_device
from hydrainfer.cache import CacheSet
from hydrainfer.checkpoint import ModelConfig, model_folder
from hydrainfer.cluster import (
    Facts,
    Hub,
    InProcess,
    Keys,
    Launcher,
    Mesh,
    Node,
    NodePlan,
    PixelClient,
    Placer,
    Roster,
    RunFolder,
    ServerSide,
)
from hydrainfer.config import InstanceSpec, ServeConfig, choose_launcher, cost_model_of, settle
from hydrainfer.core import ConfigError, CostModel, Lane, LifecycleEvent, OutputSink, PixelSource, Role
from hydrainfer.engine import Engine, EngineHandle, EngineThread
from hydrainfer.grammar import load_grammars
from hydrainfer.machine import host_identity, in_url, mps_folder, n_cores
from hydrainfer.storage import LocalExports, check_within

if TYPE_CHECKING:
    from hydrainfer.cluster.ray import RayLauncher

_log = logging.getLogger(__name__)


class Started(NamedTuple):
    """A server's engines, as one. `facts`: the resolved values of their options. `kv_tokens`: the tokens that fit the
    smallest KV cache, None without a limit. `pools`: the caches of the instances in this process, by name."""

    engine: EngineHandle
    facts: dict[str, Any]
    kv_tokens: int | None
    pools: Callable[[], dict[str, CacheSet]]


def start_one(
    config: ServeConfig,
    described: ModelConfig,
    spec: InstanceSpec,
    n_context: int,
    surroundings: Callable[..., Surroundings],
    on_progress: Progress | None,
) -> Started:
    """Start a single instance's engine on a thread of this process, directly behind the server. `surroundings` is
    called with `wake`, which wakes the thread. Raises `ConfigError` or `CheckpointError`."""
    thread = EngineThread(time.monotonic, spec.name)
    n_threads = spec.share.threads or config.threads or n_cores()
    share = config.gpu_share if torch_device(config).type == "cuda" else 1.0
    sizing = Sizing(n_context, share, n_threads, cost_model_of(config))
    built = build_engine(
        own_options(config, spec), described, spec.role, surroundings(wake=thread.wake), sizing, on_progress
    )
    thread.start(built.engine)
    return Started(thread, built.facts, built.kv_tokens, partial(dict, {spec.name: built.caches}))


class Birth(NamedTuple):
    """The facts that an instance needs, besides its `NodePlan`, to build its engine. `eos_ids`: the tokens that end an
    answer. `block_bytes`: by cache, the block size that its peers have."""

    config: ServeConfig
    described: ModelConfig
    n_context: int
    eos_ids: tuple[int, ...]
    cost: CostModel | None
    block_bytes: dict[str, int]


def build_node(
    births: Mapping[str, Birth], local: LocalExports | None, plan: NodePlan
) -> Callable[[Node], tuple[Engine, Facts]]:
    """A function that builds an instance's engine, in the instance's own thread or process. `local`: the stores of all
    instances in one process."""

    def build(node: Node) -> tuple[Engine, Facts]:
        config, described, n_context, eos_ids, cost, theirs = births[plan.name]
        role = Role.parse(plan.role)
        speaks = Lane.LANGUAGE in role.lanes and cost is None
        grammars = load_grammars(model_folder(config), described.text.vocab, eos_ids) if speaks else None
        pixels = PixelClient(plan.pixels, plan.keys)
        node.at_end.append(pixels.close)
        n_threads = plan.share.threads_of_one(plan.n_instances)
        share = min(plan.share.gpus or plan.share.of_memory(plan.n_instances), 1.0)
        around = Surroundings(node.sink, node.record, node.wake, pixels, node.clock, node, local, grammars)
        if grammars is not None:
            node.at_end.append(grammars.close)
        built = build_engine(config, described, role, around, Sizing(n_context, share, n_threads, cost))
        try:
            _check_alike(plan.name, built.caches, theirs)
        except ConfigError:
            built.engine.close()
            raise
        kv = {} if built.kv_tokens is None else {"kv_tokens": built.kv_tokens}
        return built.engine, {**built.facts, "transport": config.transport, **kv}

    return build


def start_cluster(
    config: ServeConfig,
    described: ModelConfig,
    specs: Sequence[InstanceSpec],
    n_context: int,
    eos_ids: tuple[int, ...],
    sink: OutputSink,
    record: Callable[[LifecycleEvent], None],
    pixels: PixelSource,
) -> Started:
    """Start every instance of the layout and wait for them. Raises `ConfigError` or `CheckpointError`."""
    if config.cluster_host in ("0.0.0.0", "::", "[::]", "*"):
        raise ConfigError("cluster_host must be the IP that other machines reach, no wildcard", param="cluster_host")
    cost, device = cost_model_of(config), torch_device(config)
    by_ray = choose_launcher(config, specs) == "ray"  # instances of one process share its GPU, and nothing is placed
    specs = settle(specs, config, on_gpu=by_ray and device.type == "cuda" and cost is None)
    alike = guessing_of(described, drafters_of(config, device, described, ahead=ahead_of(config, device)))
    births = {
        s.name: Birth(own_options(config, s), described, n_context, eos_ids, cost, block_bytes(config, alike, s.role))
        for s in specs
    }
    launcher, folder = _launcher_of(config, specs, births, by_ray)
    remote = None if config.cluster_host is None else f"tcp://{in_url(config.cluster_host)}:*"
    keys = None if remote is None else Keys.new()
    roles = {s.name: s.role for s in specs}
    try:
        hub = Hub(
            ServerSide(
                roles,
                sink,
                record,
                stall_s=config.stall_s,
                away_s=config.start_timeout_s,
                placer=Placer(Roster(), config.balancing),
            ),
            Mesh(remote or f"ipc://{folder.path}/hub", keys),
            launcher,
            pixels,
            remote or f"ipc://{folder.path}/pixels",
            folder.remove,
        )
    except BaseException:
        folder.remove()
        raise
    bind = "tcp://{ip}:*" if remote else f"ipc://{folder.path}/" + "{name}-{incarnation}"
    hub.start(_plans(config, specs, hub, bind, keys), config.start_timeout_s)
    kv_tokens = min([n_context, *(int(f["kv_tokens"]) for f in hub.facts.values() if "kv_tokens" in f)])
    return Started(hub, _together(hub.facts), kv_tokens, partial(_pools, launcher))


def _plans(
    config: ServeConfig, specs: Sequence[InstanceSpec], hub: Hub, bind: str, keys: Keys | None
) -> list[NodePlan]:
    """The plan of each instance. `bind`: the pattern of the address that an instance listens at."""
    plan = partial(
        NodePlan,
        n_instances=len(specs),
        hub=hub.address,
        pixels=hub.pixels_at,
        bind=bind,
        hub_host=host_identity(),
        secret=secrets.token_bytes(32),
        keys=keys,
        balancing=config.balancing,
        log_level=config.log_level,
        log_form=config.log_format,
    )
    return [plan(name=s.name, role=str(s.role), share=s.share) for s in specs]


def _check_alike(name: str, caches: CacheSet, theirs: Mapping[str, int]) -> None:
    """Check that requests can move between this instance and its peers. Raises `ConfigError`."""
    for cache, spec in caches.specs.items():
        if spec.block_bytes != theirs.get(cache):
            raise ConfigError(
                f"instance {name} cannot join: blocks of its cache {cache!r} have {spec.block_bytes} bytes, those of "
                f"other instances {theirs.get(cache)}; all need the same version of HydraInfer and the same "
                "--dtype, --block-tokens, --elastic-memory and, for models with an MTP layer, --drafts"
            )


def _launcher_of(
    config: ServeConfig, specs: Sequence[InstanceSpec], births: dict[str, Birth], by_ray: bool
) -> tuple[InProcess | RayLauncher, RunFolder]:
    """The launcher of the instances, and the run's folder."""
    if not by_ray:
        check_within(config.transport)
        return InProcess(partial(build_node, births, LocalExports())), RunFolder(for_ray=False)
    gpu_shares = [spec.share.gpus or 0.0 for spec in specs]
    check_between_processes(config.transport, gpu_shares)
    if any(0.0 < share < 1.0 for share in gpu_shares) and mps_folder() is None:
        _log.warning(
            "instances that share a GPU will take turns on it: here, no NVIDIA MPS runs (nvidia-cuda-mps-control -d)"
        )
    from hydrainfer.cluster.ray import RayLauncher

    folder = RunFolder(for_ray=config.ray_address is None)
    return RayLauncher(partial(build_node, births, None), config.ray_address, folder), folder


def _pools(launcher: Launcher) -> dict[str, CacheSet]:
    """The caches of each instance that runs in this process."""
    nodes = launcher.nodes if isinstance(launcher, InProcess) else {}
    return {n: node.engine.scheduler.room.caches for n, node in nodes.items() if node.engine is not None}


def own_options(config: ServeConfig, spec: InstanceSpec) -> ServeConfig:
    """The options of one instance: `config`, overridden by the instance's entry in the layout file."""
    return msgspec.structs.replace(config, **spec.own)


def _together(facts: dict[str, Facts]) -> dict[str, Any]:
    """The facts of all instances in one table. Values that differ are listed, with the names of their instances."""
    merged: dict[str, dict[str, list[str]]] = {}  # by option and value
    for name in sorted(facts):
        for option, value in facts[name].items():
            merged.setdefault(option, {}).setdefault(str(value), []).append(name)
    merged.pop("kv_tokens", None)
    found: dict[str, Any] = {}
    for option, values in merged.items():
        listed = [f"{', '.join(names)}: {value}" for value, names in values.items()]
        found[option] = next(iter(values)) if len(values) == 1 else "\n".join(listed)
        of_each = option == "threads" or option.endswith("_gib")
        if len(values) == 1 and of_each and (n := len(next(iter(values.values())))) > 1:
            found[option] += f" for each of {n} instances"
    return found
