"""Several instances: their plans, the hub in front of them, the launcher that starts them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hydrainfer.assemble.engine import Facts, Surroundings, build_engine
from hydrainfer.cache import CacheSet
from hydrainfer.cluster import Front, Hub, InProcess, Mesh, Node, NodePlan, PixelClient, Roster, host_identity
from hydrainfer.config import ServeConfig
from hydrainfer.core import Layout, LifecycleEvent, OutputSink, PixelSource, Role
from hydrainfer.engine import Engine
from hydrainfer.storage import LocalExports

_RUN_PREFIX = "hydrainfer-"


class Cluster(NamedTuple):
    """`kv_tokens`: what the smallest whole KV cache holds."""

    hub: Hub
    facts: dict[str, Any]
    kv_tokens: int
    pools: Callable[[], dict[str, CacheSet]]


class Birth(msgspec.Struct, frozen=True):
    """What an instance needs to build its engine beside its `NodePlan`."""

    config: ServeConfig
    n_context: int
    share: float
    n_threads: int


def build_node(birth: Birth, local: LocalExports, plan: NodePlan) -> Callable[[Node], tuple[Engine, Facts]]:
    """In the instance's own thread or process."""

    def build(node: Node) -> tuple[Engine, Facts]:
        pixels = PixelClient(plan.pixels, plan.keys)
        node.at_end.append(pixels.close)
        around = Surroundings(node.sink, node.record, node.wake, pixels, node)
        role = Role.parse(plan.roles[plan.name])
        built = build_engine(
            birth.config,
            role,
            around,
            n_context=birth.n_context,
            share=birth.share,
            n_threads=birth.n_threads,
            local=local,
        )
        kv = {} if built.kv_tokens is None else {"kv_tokens": built.kv_tokens}
        return built.engine, {**built.facts, **kv}

    return build


def start_cluster(
    config: ServeConfig,
    layout: Layout,
    n_context: int,
    sink: OutputSink,
    record: Callable[[LifecycleEvent], None],
    pixels: PixelSource,
) -> Cluster:
    """Start every instance of the layout and wait for them."""
    roles = _names(layout)
    n_threads = config.threads or len(os.sched_getaffinity(0))
    birth = Birth(config, n_context, 1 / len(roles), max(1, n_threads // len(roles)))
    launcher = InProcess(partial(build_node, birth, LocalExports()))
    folder = _run_folder()
    roster = Roster({name: Role.parse(role) for name, role in roles.items()}, config.balancing)
    front = Front(roster, sink, record, stall_s=config.stall_s)
    hub = Hub(front, Mesh(f"ipc://{folder}/hub"), launcher, pixels, f"ipc://{folder}/pixels", lambda: _remove(folder))
    shared = {"hub": hub.address, "pixels": hub.pixels_at, "bind": f"ipc://{folder}/{{name}}-{{incarnation}}"}
    plans = [
        NodePlan(name, roles, **shared, hub_host=host_identity(), secret=os.urandom(32), balancing=config.balancing)
        for name in roles
    ]
    hub.start(plans, config.start_timeout_s)
    kv_tokens = min(int(f["kv_tokens"]) for f in hub.facts.values() if "kv_tokens" in f)

    def pools() -> dict[str, CacheSet]:
        return {n: node.engine.scheduler.room.caches for n, node in launcher.nodes.items() if node.engine is not None}

    return Cluster(hub, _together(hub.facts), kv_tokens, pools)


def _names(layout: Layout) -> dict[str, str]:
    """E0, E1, P0 … and their roles."""
    seen: Counter[str] = Counter()
    names = {}
    for role in map(str, layout.instances):
        names[f"{role}{seen[role]}"] = role
        seen[role] += 1
    return names


def _together(facts: dict[str, Facts]) -> dict[str, Any]:
    """The facts of all instances in one table: what differs is listed."""
    merged: dict[str, list[str]] = {}
    for name in sorted(facts):
        for option, value in facts[name].items():
            values = merged.setdefault(option, [])
            if option.endswith("_gib") or str(value) not in values:
                values.append(str(value))
    merged.pop("kv_tokens", None)
    found: dict[str, Any] = {option: ", ".join(values) for option, values in merged.items()}
    found["threads"] = f"{found['threads']} for each of {len(facts)} instances"
    return found


def _run_folder() -> str:
    """For the sockets of this run; only this user may look inside. Folders of runs whose server is dead are removed."""
    for old in Path(tempfile.gettempdir()).glob(f"{_RUN_PREFIX}*-*"):
        pid = old.name.removeprefix(_RUN_PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _remove(str(old))
    return tempfile.mkdtemp(prefix=f"{_RUN_PREFIX}{os.getpid()}-")


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
