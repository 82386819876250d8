"""From a model, a device, a workload and an SLO to the study that the search runs, and from a layout to its file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import yaml

from hydrainfer.cache import CacheKind, CacheSpec
from hydrainfer.config import Slo
from hydrainfer.core import CostModel, Layout, Role, Stage
from hydrainfer.core.stage import ROLE_NAMES
from hydrainfer.engine import Overlap
from hydrainfer.planner.bound import work_of
from hydrainfer.planner.budgets import SEQUENCES, budgets_for, mix_of
from hydrainfer.planner.costfile import CostFile
from hydrainfer.planner.hardware import Hardware
from hydrainfer.planner.shape import ModelShape, blocks_of, cost_of
from hydrainfer.planner.study import Station, Study
from hydrainfer.planner.trace import TraceRequest
from hydrainfer.scheduler import Budgets

_KV_TOKENS_PER_RUNNING = 1024  # what `hydrainfer serve` gives on a CPU, where memory is not all for caches


def study_of(
    shape: ModelShape,
    device: Hardware,
    trace: Sequence[TraceRequest],
    slo: Slo,
    *,
    measured: CostFile | None = None,
    target: float = 0.9,
) -> Study:
    """Every instance has a `device`; batches take what was `measured` on one, or what its peaks allow. Budgets are
    those of the paper's section 4.2, for as many decodes as requests within the SLO bring about. Raises `ConfigError`:
    the model does not fit."""
    cost = measured.cost if measured is not None else cost_of(shape, device)
    on_gpu = measured.device.startswith("cuda") if measured is not None else device.lane_efficiency > 0.0
    overlap: Overlap = "free" if on_gpu else "off"
    base = Budgets() if on_gpu else Budgets(running=64)
    stations = {}
    for name in ROLE_NAMES:
        role = Role.parse(name)
        mix = mix_of(trace, _decodes_at_once(role, trace, slo, cost, base.running))
        budgets = budgets_for(measured or cost, role, slo, mix, overlap=overlap, base=base)
        blocks = blocks_of(shape, device, role)
        stations[name] = Station(cost=cost, blocks=blocks if on_gpu else _on_cpu(blocks, base), budgets=budgets)
    link = measured.link() if measured is not None and measured.copies else device.link
    return Study(stations=stations, trace=tuple(trace), slo=slo, target=target, link=link, overlap=overlap)


def _decodes_at_once(role: Role, trace: Sequence[TraceRequest], slo: Slo, cost: CostModel, most: int) -> int:
    """Little's law: requests that this role's own work lets through per second, times how long they may decode."""
    if not role.runs(Stage.DECODE) or slo.tpot_s is None:
        return 16 if role.runs(Stage.DECODE) else 1
    works = [work_of(t, cost, most) for t in trace]
    shared = role.runs(Stage.PREFILL)
    seconds = sum(
        (w.encode_s if role.runs(Stage.ENCODE) else 0.0) + (w.language_s if shared else w.decode_s) for w in works
    )
    outputs = sum(t.n_output for t in trace)
    decodes = math.ceil(outputs * slo.tpot_s / seconds) if seconds > 0.0 else most
    return max(1, min(decodes, most, SEQUENCES[-1]))


def _on_cpu(blocks: Mapping[CacheSpec, int], budgets: Budgets) -> dict[CacheSpec, int]:
    def size(spec: CacheSpec, n: int) -> int:
        return min(n, spec.blocks_for(budgets.running * _KV_TOKENS_PER_RUNNING)) if spec.kind is CacheKind.FULL else n

    return {spec: size(spec, n) for spec, n in blocks.items()}


def layout_file(layout: Layout, study: Study, comment: str = "") -> str:
    """YAML for `hydrainfer serve --layout`: the instances, with the budgets that the study gave them."""
    counts = Counter(map(str, layout.instances))
    groups = []
    for name, n in counts.items():
        role, budgets = Role.parse(name), study.stations[name].budgets
        group: dict[str, str | int] = {"role": name, "count": n, "max_running": budgets.running}
        if role.runs(Stage.PREFILL) or role.runs(Stage.DECODE):
            group["token_budget"] = budgets.tokens
        if role.runs(Stage.ENCODE):
            group["image_budget"] = budgets.images
        groups.append(group)
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + yaml.safe_dump({"instances": groups}, sort_keys=False, default_flow_style=None, width=120)
