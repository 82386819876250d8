"""Studies for the search, made from a model, devices, a workload and an SLO; and layout files for serving."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import yaml

from hydrainfer.cache import TOKENS_PER_RUNNING, CacheSpec, Wishes, host_sizes, share_memory, tokens_in
from hydrainfer.config import Slo
from hydrainfer.core import ConfigError, CostModel, Layout, Role, Stage
from hydrainfer.core.stage import ROLE_NAMES
from hydrainfer.engine import Overlap
from hydrainfer.planner.costs import CostFile, EngineModel, Hardware, ModelShape, blocks_of, cost_of
from hydrainfer.planner.nouns import Link, ServerCost, TraceRequest
from hydrainfer.planner.search.budgets import Choice, budgets_for, choices_for, mix_of
from hydrainfer.planner.search.layouts import layouts, placed_layouts, role_of
from hydrainfer.planner.search.study import Station, Study
from hydrainfer.scheduler import RUNNING, STEP_S, Budgets

DeviceKind = Literal["gpu", "cpu", "emulated"]


def study_of(
    shape: ModelShape,
    device: Hardware,
    trace: Sequence[TraceRequest],
    slo: Slo,
    *,
    cost: CostModel | CostFile | None = None,
    kind: DeviceKind = "gpu",
    engine: EngineModel | None = None,
    server: ServerCost | None = None,
    target: float = 0.9,
    more: Sequence[TraceRequest] = (),
    unlike: Sequence[Hardware] = (),
    host_bytes: int = 0,
) -> Study:
    """A study in which every instance runs on a `device` or on one of the `unlike` devices; with unlike devices, roles
    have names such as `PD@h20`. Batch times follow from the device's peaks or, if given, from `cost`. Budgets are those
    of the paper's section 4.2, chosen for each layout. Roles that do not fit the device are left out. `engine`: None
    for HydraInfer without the host time of its server. `server`: replaces the engine's. `more`: requests of the same
    workload, for longer runs. `host_bytes`: host memory of each instance that prefills or decodes. Raises `ConfigError`
    for an empty trace, if no role that prefills or no role that decodes fits, or if host memory is too small."""
    if not trace:
        raise ConfigError("the trace is empty: there is nothing to plan for", param="workload")
    engine = engine or EngineModel(name="hydrainfer")
    longest = max(t.n_prompt + t.n_output for t in trace)
    stations = dict[str, Station]()
    too_large = dict[str, ConfigError]()
    devices = (device, *unlike)
    sees = any(t.pictures for t in trace)
    for one in devices:
        for name in ROLE_NAMES:
            role = Role.parse(name)
            placed = name
            if unlike:
                placed = f"{name}@{one.name}"
            try:
                blocks = blocks_of(shape, one, role)
                _check_room(shape, one, role, blocks, longest)
            except ConfigError as e:
                too_large[placed] = e
                continue
            times = cost
            if times is None:
                mixed = sees and role.runs(Stage.ENCODE) and len(role.stages) > 1
                times = engine.cost(cost_of(shape, engine.on(one)), mixed)
            station = _station(role, times, blocks, shape.context, trace, slo, kind, engine)
            blocks, split = share_memory(station.blocks, Wishes(n_longest=shape.context))
            host = _host_blocks(blocks, role, shape.context, host_bytes)
            stations[placed] = msgspec.structs.replace(station, blocks=blocks, split=split, host=host)
    _check_stages(stations, too_large)
    link = _slowest([one.link for one in devices])
    if isinstance(cost, CostFile) and cost.copies:
        link = cost.link()
    return Study(
        stations=stations,
        trace=tuple(trace),
        more=tuple(more),
        slo=slo,
        target=target,
        link=link,
        overlap=_overlap(kind, engine),
        policy=engine.policy,
        server=server or engine.server,
    )


def _host_blocks(blocks: Mapping[CacheSpec, int], role: Role, n_context: int, n_bytes: int) -> dict[CacheSpec, int]:
    """The number of blocks of each cache in host memory, as in `assemble.sizes`."""
    if not n_bytes or not (role.runs(Stage.PREFILL) or role.runs(Stage.DECODE)):
        return {}
    sizes = host_sizes(blocks, Wishes(n_longest=n_context), n_bytes)
    if not sizes:
        raise ConfigError("--host-cache-gib is less than one block of each cache", param="host_cache_gib")
    return sizes


def _check_stages(stations: Mapping[str, Station], too_large: Mapping[str, ConfigError]) -> None:
    """Raises the `ConfigError` of the smallest role if no role of the devices prefills, or none decodes."""
    for stage in (Stage.PREFILL, Stage.DECODE):
        if any(role_of(name).runs(stage) for name in stations):
            continue

        def rank(name: str, stage: Stage = stage) -> int:
            return len(name) + (not role_of(name).runs(stage))

        raise too_large[min(too_large, key=rank)]


def _slowest(links: Sequence[Link]) -> Link:
    return msgspec.structs.replace(
        links[0],
        bytes_per_s=min(link.bytes_per_s for link in links),
        latency_s=max(link.latency_s for link in links),
        message_s=max(link.message_s for link in links),
    )


def _overlap(kind: DeviceKind, engine: EngineModel) -> Overlap:
    return "slice" if kind == "cpu" else engine.overlap


def _station(
    role: Role,
    cost: CostModel | CostFile,
    blocks: dict[CacheSpec, int],
    n_context: int,
    trace: Sequence[TraceRequest],
    slo: Slo,
    kind: DeviceKind,
    engine: EngineModel,
) -> Station:
    """The description of an instance of this role, with the engine's budgets or those that the SLO allows. `n_context`:
    tokens of the longest request that the model accepts."""
    base = Budgets(step_s=STEP_S)
    if kind != "gpu":
        base = Budgets(running=RUNNING, step_s=STEP_S)
    mix = mix_of(trace)
    overlap = _overlap(kind, engine)
    choices = tuple[Choice, ...]()
    fixed = engine.budgets(base)
    budgets = fixed or budgets_for(cost, role, slo, mix, overlap=overlap, base=base)
    if kind != "gpu":
        blocks = _on_cpu(blocks, max(budgets.running * TOKENS_PER_RUNNING, n_context))
    model = cost.cost if isinstance(cost, CostFile) else cost
    if fixed is not None:
        return Station(cost=model, blocks=blocks, budgets=fixed)
    if role.runs(Stage.DECODE) and overlap != "slice":
        usual = sum(t.n_prompt + t.n_output for t in trace) / len(trace)
        n_fit = max(1, int(min(base.running, tokens_in(blocks) / usual)))
        pictures = sum(len(t.pictures) for t in trace) / len(trace)
        choices = choices_for(cost, role, slo, mix, pictures=pictures, overlap=overlap, base=base, most=n_fit)
    return Station(cost=model, blocks=blocks, budgets=budgets, choices=choices)


def _check_room(shape: ModelShape, device: Hardware, role: Role, blocks: Mapping[CacheSpec, int], longest: int) -> None:
    for spec, n in blocks.items():
        if n < len(spec.span(0, longest)):
            raise ConfigError(
                f"{shape.name} as {role} leaves room for {n * spec.block_tokens} tokens of KV cache on {device.name}, "
                f"but the longest request of the workload has {longest}"
            )


def candidates_of(study: Study, n_devices: int | Mapping[str, int]) -> list[Layout]:
    """All layouts whose roles fit their devices. If the trace has no pictures, layouts with E or ED instances are left
    out. `n_devices`: by kind, if there are several kinds. Raises `ConfigError` if no layout is left."""
    sees = any(t.pictures for t in study.trace)
    fitting = [
        layout
        for layout in (layouts(n_devices) if isinstance(n_devices, int) else placed_layouts(n_devices))
        if all(
            str(role) in study.stations and (sees or str(role).partition("@")[0] not in ("E", "ED"))
            for role in layout.instances
        )
    ]
    if not fitting:
        raise ConfigError(f"no layout of {n_devices} such devices can hold the model", param="devices")
    return fitting


def _on_cpu(blocks: Mapping[CacheSpec, int], n_tokens: int) -> dict[CacheSpec, int]:
    """The cache sizes of a server that is started without options, as in `assemble.sizes`."""
    wishes = Wishes(n_tokens=n_tokens)

    def size(spec: CacheSpec, n: int) -> int:
        wanted = spec.wanted(wishes) if spec.takes_the_rest else None
        return n if wanted is None else min(n, wanted)

    return {spec: size(spec, n) for spec, n in blocks.items()}


PLANNED = ("token_budget", "image_budget", "max_running", "overlap")
"""The options of an instance that a plan sets."""


def layout_file(
    layout: Layout,
    study: Study,
    comment: str = "",
    threads: int | None = None,
    only: Sequence[str] = PLANNED,
    tiers: Mapping[str, str | float] | None = None,
) -> str:
    """YAML for `hydrainfer serve --layout`: the instances with their budgets and overlap from the study (only the
    options in `only`), and with `threads` each. `tiers`: the options `host_cache_gib` and `store`, as far as they are
    set."""
    groups = []
    of_layout = study.budgets(layout)
    for name, n in Counter(map(str, layout.instances)).items():
        role = Role.parse(name)
        budgets = of_layout[name]
        own: dict[str, str | float] = {"max_running": budgets.running}
        if role.runs(Stage.PREFILL) or role.runs(Stage.DECODE):
            own["token_budget"] = budgets.tokens
        if role.runs(Stage.ENCODE):
            own["image_budget"] = budgets.images
        if study.overlap == "slice":  # the server chooses any other by itself
            own["overlap"] = study.overlap
        group: dict[str, str | float] = {"role": name, "count": n, **{k: v for k, v in own.items() if k in only}}
        group |= tiers or {}
        if not study.stations[name].host:
            group.pop("host_cache_gib", None)
        groups.append(group | ({} if threads is None else {"threads": threads}))
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + yaml.safe_dump({"instances": groups}, sort_keys=False, default_flow_style=None, width=120)
