"""A question to `hydrainfer profile` made into a study: the model's shape, a device's times, the workload's trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from hydrainfer.checkpoint import has_weights, name_of
from hydrainfer.config import Slo, is_slo_part, locate, parse_slo, read_cost_model, read_slo, read_yaml
from hydrainfer.core import ConfigError, CostModel, Layout
from hydrainfer.machine import n_cores
from hydrainfer.planner.costs import (
    CostFile,
    EngineModel,
    Hardware,
    ModelShape,
    read_cost_file,
    read_engine,
    read_hardware,
)
from hydrainfer.planner.inputs import locate_model, prompts_of, shape_of, trace_of
from hydrainfer.planner.search import DeviceKind, Study, candidates_of, study_of
from hydrainfer.planner.simulation import ServerCost, TraceRequest
from hydrainfer.profiling.calibrating import calibrated, read_measured
from hydrainfer.profiling.options import ProfileQuestion
from hydrainfer.workload.sources import Workload, read_workload

Measure = Callable[[str, int], CostFile]
"""Measures a model with so many CPU threads."""
_LONGER = 6  # times the first run: two more, each twice as long as the one before
_MEASURED_ERROR, _EMULATED_ERROR = 0.25, 0.1  # benchmarks/b15_simulator_truth.py
_MEMORY_SHARE = 0.5  # of a CPU's: the rest of the machine lives there, too


class ProfileSetup(NamedTuple):
    """`threads`: CPU threads of an instance, if the times are of a CPU."""

    question: ProfileQuestion
    shape: ModelShape
    device: Hardware
    cost: CostModel | CostFile | None
    kind: DeviceKind
    workload: Workload
    trace: tuple[TraceRequest, ...]
    more: tuple[TraceRequest, ...]
    slo: Slo
    threads: int | None
    engine: EngineModel

    def study(self, slo: Slo | None = None, n_devices: int | None = None) -> Study:
        """The study with another SLO, or for devices that share this machine's memory with `n_devices`. Raises
        `ConfigError`."""
        device = self.device
        if self.kind != "gpu":
            memory = device.memory_bytes / (n_devices or self.question.devices)
            device = msgspec.structs.replace(device, memory_bytes=memory)
        return study_of(
            self.shape,
            device,
            self.trace,
            slo or self.slo,
            cost=self.cost,
            kind=self.kind,
            engine=self.engine,
            server=self._server(n_devices or self.question.devices),
            target=self.question.target,
            more=self.more,
        )

    @property
    def model_error(self) -> float | None:
        """See `LayoutPlan`."""
        if self.cost is None:
            return self.engine.error
        return _EMULATED_ERROR if self.kind == "emulated" else _MEASURED_ERROR

    def _server(self, n_devices: int) -> ServerCost:
        """The engine's; where instances compute on a CPU, on the same cores as they."""
        server = self.engine.server
        if self.kind == "gpu":
            return server
        threads = self.threads or max(1, n_cores() // n_devices)
        return msgspec.structs.replace(
            server, cores=float(n_cores()), each=False, threads=threads * (self.kind == "cpu")
        )

    def candidates(self, study: Study, n_devices: int | None = None) -> Sequence[Layout]:
        return candidates_of(study, n_devices or self.question.devices)


def prepare(q: ProfileQuestion, measure: Measure) -> ProfileSetup:
    """Raises `ConfigError` or `CheckpointError`, one line, before anything long begins; but `measure` may be called."""
    if q.devices < 1:
        raise ConfigError(f"{q.devices} devices cannot serve anything; give at least one", param="devices")
    if q.objective != "goodput" and not (q.rate and q.rate > 0.0):
        raise ConfigError(f"--objective {q.objective} needs a --rate of requests per second", param="rate")
    if not 0.0 < q.target <= 1.0:
        raise ConfigError(f"--target is a share above 0 and at most 1, not {q.target:g}", param="target")
    if q.hardware is not None and q.cost_model is not None and not _is_assumed(q.cost_model):
        raise ConfigError("give --hardware or a measured --cost-model, not both", param="hardware")
    model = locate_model(q.model)
    workload = read_workload(q.workload, data=q.data, pictures=q.pictures)
    slo = slo_of(q.slo, name_of(model), workload.dataset)
    trace = tuple(trace_of(workload, prompts_of(q.model), q.requests, q.seed))
    cost, device, kind, threads = _times(q, model, measure)
    shape = shape_of(q.model, q.dtype or (cost.dtype if isinstance(cost, CostFile) else None))
    engine = read_engine(q.engine)
    if cost is not None and engine.scheduling != "stage-level":
        raise ConfigError("measured and emulated times are HydraInfer's: leave --engine out", param="engine")
    if q.calibrate is not None:
        engine = calibrated(engine, read_measured(q.calibrate))
    return ProfileSetup(q, shape, device, cost, kind, workload, trace, _more(q, workload), slo, threads, engine)


def _more(q: ProfileQuestion, workload: Workload) -> tuple[TraceRequest, ...]:
    """Requests for the longer runs of the search for goodput; none where the workload has a certain number of them."""
    if q.objective != "goodput" or workload.source != "synthetic":
        return ()
    return tuple(trace_of(workload, prompts_of(q.model), _LONGER * q.requests, (q.seed + 1) << 20))


def slo_of(text: str, model: str, dataset: str) -> Slo:
    """`text`: limits, or NAME[:DATASET] of configs/slo, or nothing for the model's own. Raises `ConfigError`."""
    parts = text.replace(",", " ").split()
    if parts and all(is_slo_part(part) for part in parts):
        return parse_slo(parts)
    name, _, key = text.partition(":")
    try:
        return read_slo(locate("slo", name or model), key or dataset)
    except ConfigError as e:
        hint = "give the SLO, for example --slo ttft=8,tpot=0.08 (seconds)"
        raise ConfigError(f"{hint}; {e.message}" if not name else e.message, param="slo") from None


def _times(
    q: ProfileQuestion, model: Path, measure: Measure
) -> tuple[CostModel | CostFile | None, Hardware, DeviceKind, int | None]:
    if q.cost_model is None and q.hardware is not None:
        device = read_hardware(q.hardware)
        return None, device, "gpu" if device.lane_efficiency > 0.0 else "cpu", None
    if q.cost_model is not None and _is_assumed(q.cost_model):
        path = q.cost_model.expanduser()
        device = msgspec.structs.replace(read_hardware(q.hardware or "this-cpu"), name=f"emulated by {path.stem}")
        return read_cost_model(path), device, "emulated", None
    if q.cost_model is not None:
        file = read_cost_file(q.cost_model.expanduser())
    else:
        if not has_weights(model):
            raise ConfigError(
                f"{q.model} is a configuration without weights, which cannot be measured here: describe the device, "
                "for example --hardware h800",
                param="hardware",
            )
        file = measure(q.model, max(1, n_cores() // q.devices))
    if file.model != name_of(model):
        raise ConfigError(
            f"{q.cost_model} was measured with {file.model}, not with {name_of(model)}", param="cost_model"
        )
    on_gpu = file.device.startswith("cuda")
    return file, measured_device(file), "gpu" if on_gpu else "cpu", None if on_gpu else file.threads


def _is_assumed(path: Path) -> bool:
    return "kind" not in read_yaml(path.expanduser())


def measured_device(file: CostFile) -> Hardware:
    """Its memory; its times are those measured."""
    if file.device.startswith("cuda"):
        name, memory = str(file.hardware.get("gpu", "gpu")), float(file.hardware["gpu_memory_bytes"])
        return msgspec.structs.replace(read_hardware("h100"), name=name, memory_bytes=memory)
    name = f"{file.threads} of {file.hardware.get('cores', '?')} cores of {file.hardware.get('cpu', 'a CPU')}"
    memory = float(file.hardware["memory_bytes"])
    device = msgspec.structs.replace(read_hardware("this-cpu"), name=name, memory_bytes=memory)
    return msgspec.structs.replace(device, memory_share=_MEMORY_SHARE, lane_efficiency=0.0)
