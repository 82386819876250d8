"""The devices of a question: described, emulated, or measured here, with the times of their batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from hydrainfer.checkpoint import has_weights, name_of
from hydrainfer.config import read_cost_model, read_yaml
from hydrainfer.core import ConfigError, CostModel
from hydrainfer.machine import n_cores
from hydrainfer.planner.costs import CostFile, Hardware, read_cost_file, read_hardware
from hydrainfer.planner.search import DeviceKind
from hydrainfer.profiling.options import ProfileQuestion

Measure = Callable[[str, int], CostFile]
"""A function that measures a model with a number of CPU threads."""
_MEMORY_SHARE = 0.5  # of a CPU's memory: other programs need the rest


class Devices(NamedTuple):
    """The devices that layouts are tried on. `cost`: their batch times; None if these follow from the description.
    `unlike`: if there are several kinds of devices, each kind and its number; then `device` is the first kind.
    `threads`: CPU threads of an instance, if the times are of a CPU."""

    cost: CostModel | CostFile | None
    device: Hardware
    kind: DeviceKind
    threads: int | None = None
    unlike: tuple[tuple[Hardware, int], ...] = ()

    @property
    def hardware(self) -> str:
        """The devices in words, without their number if all are alike."""
        return " + ".join(f"{n} {device.name}" for device, n in self.unlike) or self.device.name


def devices_of(q: ProfileQuestion, model: Path, measure: Measure) -> Devices:
    """The devices of a question about the `model` in this folder. Raises `ConfigError`."""
    if q.cost_model is not None and is_assumed(q.cost_model):
        return _emulated(q, q.cost_model.expanduser())
    if q.cost_model is None and q.hardware is not None:
        return _described(q, q.hardware)
    file = _measurement(q, model, measure)
    device = _measured_device(file)
    if file.device.startswith("cuda"):
        return Devices(file, device, "gpu")
    return Devices(file, device, "cpu", file.threads)


def is_assumed(cost_model: Path) -> bool:
    """Whether a file holds the assumed times of emulated devices, not a measurement."""
    return "kind" not in read_yaml(cost_model.expanduser())


def _described(q: ProfileQuestion, hardware: str) -> Devices:
    unlike = _unlike_devices(q)
    if unlike:
        device = unlike[0][0]
    else:
        device = read_hardware(hardware).joined(q.tensor_parallel)
    kind: DeviceKind = "gpu"
    if device.lane_efficiency <= 0.0:
        kind = "cpu"
    return Devices(None, device, kind, unlike=unlike)


def _emulated(q: ProfileQuestion, path: Path) -> Devices:
    device = msgspec.structs.replace(read_hardware(q.hardware or "this-cpu"), name=f"emulated by {path.stem}")
    return Devices(read_cost_model(path), device, "emulated")


def _measurement(q: ProfileQuestion, model: Path, measure: Measure) -> CostFile:
    """The measurement that was named or is made now. Raises `ConfigError` if it is of something else."""
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
    return file


def _unlike_devices(q: ProfileQuestion) -> tuple[tuple[Hardware, int], ...]:
    """The devices of a text such as `h20:4,h800:4`; () if all are alike. Raises `ConfigError`."""
    parts = (q.hardware or "").split(",")
    if len(parts) < 2:
        return ()
    kinds = []
    for part in parts:
        name, _, n = part.rpartition(":")
        if not name or not n.isdigit() or int(n) < 1:
            raise ConfigError(f"unlike devices are written as h20:4,h800:4, not {q.hardware}", param="hardware")
        device = read_hardware(name)
        if device.lane_efficiency <= 0.0:
            raise ConfigError(f"{name} is no GPU; unlike devices are", param="hardware")
        kinds.append((device.joined(q.tensor_parallel), int(n) // q.tensor_parallel))
        if int(n) % q.tensor_parallel:
            raise ConfigError(f"{n} x {name} are no groups of {q.tensor_parallel}", param="tensor_parallel")
    if len({device.name for device, _ in kinds}) < len(kinds):
        raise ConfigError(f"--hardware {q.hardware} names a device twice", param="hardware")
    if sum(n for _, n in kinds) != q.devices // q.tensor_parallel:
        n_devices = sum(n for _, n in kinds) * q.tensor_parallel
        raise ConfigError(
            f"--hardware {q.hardware} has {n_devices} devices, but --devices is {q.devices}", param="devices"
        )
    if q.objective == "devices":
        raise ConfigError("--objective devices is for devices that are alike", param="objective")
    return tuple(kinds)


def _measured_device(file: CostFile) -> Hardware:
    """The device of a measurement, of which only the memory counts: the times are those measured."""
    if file.device.startswith("cuda"):
        name = str(file.hardware.get("gpu", "gpu"))
        memory = float(file.hardware["gpu_memory_bytes"])
        return msgspec.structs.replace(read_hardware("h100"), name=name, memory_bytes=memory)
    name = f"{file.threads} of {file.hardware.get('cores', '?')} cores of {file.hardware.get('cpu', 'a CPU')}"
    memory = float(file.hardware["memory_bytes"])
    device = msgspec.structs.replace(read_hardware("this-cpu"), name=name, memory_bytes=memory)
    return msgspec.structs.replace(device, memory_share=_MEMORY_SHARE, lane_efficiency=0.0)
