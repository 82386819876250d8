"""The preparation of a question for the planner: the model's shape, batch times of a device, the workload's trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from hydrainfer.checkpoint import has_weights, locate_model, name_of
from hydrainfer.config import Slo, inline_slo, locate, read_cost_model, read_slo, read_yaml
from hydrainfer.core import ConfigError, CostModel, Layout
from hydrainfer.machine import n_cores
from hydrainfer.planner.costs import (
    WEIGHT_BYTES,
    CostFile,
    EngineModel,
    Hardware,
    ModelShape,
    read_cost_file,
    read_engine,
    read_hardware,
)
from hydrainfer.planner.inputs import prompts_of, shape_of, trace_of
from hydrainfer.planner.nouns import ServerCost, TraceRequest
from hydrainfer.planner.search import DeviceKind, Study, candidates_of, study_of
from hydrainfer.profiling.options import ProfileQuestion
from hydrainfer.workload.sources import Constant, Gamma, OpenLoop, Poisson, Workload, read_workload

Measure = Callable[[str, int], CostFile]
"""A function that measures a model with a number of CPU threads."""
_LONGER = 6  # multiples of the first run: two more runs, of 2 and 4 times its length
_MEASURED_ERROR, _EMULATED_ERROR = 0.25, 0.1  # benchmarks/b15_simulator_truth.py
_MEMORY_SHARE = 0.5  # of a CPU's memory: other programs need the rest
_AS_DTYPE = "as-dtype"


class ProfileSetup(NamedTuple):
    """A question with all that its study needs. `kinds`: if there are several kinds of devices, each kind and its
    number; then `device` is the first kind. `threads`: CPU threads of an instance, if the times are of a CPU."""

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
    kinds: tuple[tuple[Hardware, int], ...] = ()

    def study(self, slo: Slo | None = None, n_devices: int | None = None) -> Study:
        """The study, with another SLO if given. On a CPU, `n_devices` instances share this machine's memory. Raises
        `ConfigError`."""
        device = self.device
        if self.kind != "gpu":
            memory = device.memory_bytes / (n_devices or self.n_instances)
            device = msgspec.structs.replace(device, memory_bytes=memory)
        return study_of(
            self.shape,
            device,
            self.trace,
            slo or self.slo,
            cost=self.cost,
            kind=self.kind,
            engine=self.engine,
            server=self._server(n_devices or self.n_instances),
            target=self.question.target,
            more=self.more,
            unlike=[device for device, _ in self.kinds[1:]],
        )

    @property
    def n_instances(self) -> int:
        """The number of instances of the largest layout."""
        return self.question.devices // self.question.tensor_parallel

    @property
    def hardware(self) -> str:
        """The devices in words, without their number if all are alike."""
        return " + ".join(f"{n} {device.name}" for device, n in self.kinds) or self.device.name

    def per_hour(self, n_devices: int) -> float | None:
        """The price of `n_devices` instances for an hour; None if not known."""
        if (prices := _prices(self.question)) is None:
            return None
        names = (self.question.hardware or "").split(",")
        if self.kinds:
            each = [
                n * prices.get(name.partition(":")[0], prices.get("", 0.0)) for name, (_, n) in zip(names, self.kinds)
            ]
            return sum(each) * self.question.tensor_parallel
        return n_devices * self.question.tensor_parallel * next(iter(prices.values()))

    def watts(self, n_devices: int) -> float | None:
        """The power of `n_devices` instances at their boards' limits; None if not known."""
        each = [(d.watts, n) for d, n in self.kinds or ((self.device, n_devices),)]
        return sum(watts * n for watts, n in each) if all(watts for watts, _ in each) else None

    @property
    def servable(self) -> bool:
        """Whether `hydrainfer serve` can run what is planned."""
        q = self.question
        if self.engine.scheduling != "stage-level":
            return False
        return q.tensor_parallel == 1 and q.weights == _AS_DTYPE and not self.kinds

    @property
    def flags(self) -> list[str]:
        """The flags of `hydrainfer serve` for the planned number formats and, on a CPU, for the limits that slices
        keep."""
        q = self.question
        given = {
            "--device": "cpu" if self.kind == "cpu" else None,
            "--dtype": self.dtype,
            "--quantization": None if q.quantization == "none" else q.quantization,
            "--slo": self.slo.inline if self.kind == "cpu" else None,
        }
        return [word for name, value in given.items() if value is not None for word in (name, value)]

    @property
    def dtype(self) -> str | None:
        """The dtype that was asked for or measured; None if the server chooses."""
        return self.question.dtype or (self.cost.dtype if isinstance(self.cost, CostFile) else None)

    @property
    def model_error(self) -> float | None:
        """See `LayoutPlan`."""
        if self.cost is None:
            return self.engine.error
        return _EMULATED_ERROR if self.kind == "emulated" else _MEASURED_ERROR

    def _server(self, n_devices: int) -> ServerCost:
        """The engine's server cost. If instances compute on a CPU, the server shares the same cores with them."""
        server = self.engine.server
        if self.kind == "gpu":
            return server
        threads, workers = self.threads or max(1, n_cores() // n_devices), min(server.workers, n_cores())
        return msgspec.structs.replace(
            server, cores=float(n_cores()), each=False, threads=threads * (self.kind == "cpu"), workers=workers
        )

    def candidates(self, study: Study, n_devices: int | None = None) -> Sequence[Layout]:
        of_kind = {device.name: n for device, n in self.kinds}
        return candidates_of(study, of_kind or n_devices or self.n_instances)


def prepare(q: ProfileQuestion, measure: Measure) -> ProfileSetup:
    """The setup of a question. Raises `ConfigError` or `CheckpointError` with a one-line message, before any long work
    except a call of `measure`."""
    _check(q)
    model = locate_model(q.model)
    workload = read_workload(q.workload, data=q.data, pictures=q.pictures)
    slo = slo_of(q.slo, name_of(model), workload.dataset)
    trace = tuple(trace_of(workload, prompts_of(q.model), q.requests, q.seed, _arrivals(q)))
    cost, device, kind, threads = _times(q, model, measure)
    if q.quantization != "none" and kind != "cpu":
        raise ConfigError(f"--quantization {q.quantization} is for CPUs, not for {device.name}", param="quantization")
    dtype = q.dtype or (cost.dtype if isinstance(cost, CostFile) else None)
    shape = shape_of(q.model, dtype, q.quantization)
    shape = msgspec.structs.replace(shape, weights=q.weights)
    engine = read_engine(q.engine)
    if cost is not None and engine.scheduling != "stage-level":
        raise ConfigError("measured and emulated times are HydraInfer's: leave --engine out", param="engine")
    more, kinds = _more(q, workload), _kinds(q)
    return ProfileSetup(q, shape, device, cost, kind, workload, trace, more, slo, threads, engine, kinds)


def _check(q: ProfileQuestion) -> None:
    if q.devices < 1:
        raise ConfigError(f"{q.devices} devices cannot serve anything; give at least one", param="devices")
    if q.devices % q.tensor_parallel:
        raise ConfigError(
            f"{q.devices} devices are no groups of {q.tensor_parallel}; choose --devices as a multiple",
            param="tensor_parallel",
        )
    if q.weights not in (_AS_DTYPE, *WEIGHT_BYTES):
        known = ", ".join((_AS_DTYPE, *WEIGHT_BYTES))
        raise ConfigError(f"no weights {q.weights!r}; there are {known}", param="weights")
    if q.weights != _AS_DTYPE and q.quantization != "none":
        raise ConfigError("--weights and --quantization both say how weights are stored: give one", param="weights")
    for name, given in (("tensor-parallel", q.tensor_parallel > 1), ("weights", q.weights != _AS_DTYPE)):
        if given and (q.hardware is None or q.cost_model is not None):
            raise ConfigError(
                f"--{name} is for a described device, such as --hardware h800: measured times are of what was measured",
                param=name.replace("-", "_"),
            )
    _prices(q)
    if q.objective != "goodput" and not (q.rate and q.rate > 0.0):
        raise ConfigError(f"--objective {q.objective} needs a --rate of requests per second", param="rate")
    if not 0.0 < q.target <= 1.0:
        raise ConfigError(f"--target is a share above 0 and at most 1, not {q.target:g}", param="target")
    if q.hardware is not None and q.cost_model is not None and not _is_assumed(q.cost_model):
        raise ConfigError("give --hardware or a measured --cost-model, not both", param="hardware")


def _prices(q: ProfileQuestion) -> dict[str, float] | None:
    """The price of each device by its name, or one price for all under "". Raises `ConfigError`."""
    if q.price is None:
        return None
    found: dict[str, float] = {}
    for part in q.price.split(","):
        name, _, number = part.rpartition("=")
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = 0.0
    kinds = [name.partition(":")[0] for name in (q.hardware or "").split(",")]
    if not all(0.0 < price < math.inf for price in found.values()) or not (
        set(found) == {""} or set(found) == set(kinds)
    ):
        raise ConfigError(
            f"--price is what a device costs for an hour, such as 2.5, or {kinds[0] or 'h800'}=2.5 for each kind, not "
            f"{q.price}",
            param="price",
        )
    return found


def _kinds(q: ProfileQuestion) -> tuple[tuple[Hardware, int], ...]:
    """The devices of a text such as `h20:4,h800:4`; () if all are alike. Raises `ConfigError`."""
    parts = (q.hardware or "").split(",")
    if len(parts) < 2:
        return ()
    found = []
    for part in parts:
        name, _, n = part.rpartition(":")
        if not name or not n.isdigit() or int(n) < 1:
            raise ConfigError(f"unlike devices are written as h20:4,h800:4, not {q.hardware}", param="hardware")
        device = read_hardware(name)
        if device.lane_efficiency <= 0.0:
            raise ConfigError(f"{name} is no GPU; unlike devices are", param="hardware")
        found.append((device.joined(q.tensor_parallel), int(n) // q.tensor_parallel))
        if int(n) % q.tensor_parallel:
            raise ConfigError(f"{n} x {name} are no groups of {q.tensor_parallel}", param="tensor_parallel")
    if len({device.name for device, _ in found}) < len(found):
        raise ConfigError(f"--hardware {q.hardware} names a device twice", param="hardware")
    if sum(n for _, n in found) != q.devices // q.tensor_parallel:
        n_found = sum(n for _, n in found) * q.tensor_parallel
        raise ConfigError(
            f"--hardware {q.hardware} has {n_found} devices, but --devices is {q.devices}", param="devices"
        )
    if q.objective == "devices":
        raise ConfigError("--objective devices is for devices that are alike", param="objective")
    return tuple(found)


def burst_shape(q: ProfileQuestion) -> float:
    """The shape of gamma arrivals. Raises `ConfigError` if a shape is given for other arrivals."""
    if q.burst_shape is not None and q.arrivals != "gamma":
        raise ConfigError("--burst-shape is for --arrivals gamma", param="burst_shape")
    return Gamma(1.0).shape if q.burst_shape is None else q.burst_shape


def _arrivals(q: ProfileQuestion) -> OpenLoop | None:
    """The arrivals that were asked for; None for those of the workload, if it has times."""
    shape = burst_shape(q)
    if q.arrivals is None:
        return None
    kinds: dict[str, OpenLoop] = {"poisson": Poisson(1.0), "constant": Constant(1.0), "gamma": Gamma(1.0, shape)}
    if q.arrivals not in kinds:
        raise ConfigError(f"no arrivals {q.arrivals!r}: one of {', '.join(kinds)}", param="arrivals")
    return kinds[q.arrivals]


def _more(q: ProfileQuestion, workload: Workload) -> tuple[TraceRequest, ...]:
    """Requests for the longer runs at a rate; none if the workload has a fixed number of requests."""
    if workload.source != "synthetic":
        return ()
    return tuple(trace_of(workload, prompts_of(q.model), _LONGER * q.requests, (q.seed + 1) << 20, _arrivals(q)))


def slo_of(text: str, model: str, dataset: str) -> Slo:
    """The SLO in `text`: limits, or NAME[:DATASET] of configs/slo, or empty for the model's own preset. Raises
    `ConfigError`."""
    if (limits := inline_slo(text)) is not None:
        return limits
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
        kinds = _kinds(q)
        device = kinds[0][0] if kinds else read_hardware(q.hardware).joined(q.tensor_parallel)
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
    if q.dtype is not None and file.dtype != q.dtype:
        raise ConfigError(f"{q.cost_model} was measured in {file.dtype}, not in {q.dtype}", param="dtype")
    if file.quantization != q.quantization:
        raise ConfigError(
            f"{q.cost_model} was measured with --quantization {file.quantization}, not {q.quantization}",
            param="quantization",
        )
    on_gpu = file.device.startswith("cuda")
    return file, measured_device(file), "gpu" if on_gpu else "cpu", None if on_gpu else file.threads


def _is_assumed(path: Path) -> bool:
    return "kind" not in read_yaml(path.expanduser())


def measured_device(file: CostFile) -> Hardware:
    """The device of a measurement, of which only the memory counts: the times are those measured."""
    if file.device.startswith("cuda"):
        name, memory = str(file.hardware.get("gpu", "gpu")), float(file.hardware["gpu_memory_bytes"])
        return msgspec.structs.replace(read_hardware("h100"), name=name, memory_bytes=memory)
    name = f"{file.threads} of {file.hardware.get('cores', '?')} cores of {file.hardware.get('cpu', 'a CPU')}"
    memory = float(file.hardware["memory_bytes"])
    device = msgspec.structs.replace(read_hardware("this-cpu"), name=name, memory_bytes=memory)
    return msgspec.structs.replace(device, memory_share=_MEMORY_SHARE, lane_efficiency=0.0)
