"""Devices as numbers: published peaks, and the shares of them that an engine is assumed to reach."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from hydrainfer.config import converted, locate, read_yaml
from hydrainfer.core import ConfigError
from hydrainfer.planner.simulation import Link

GIB = 1 << 30


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device of a node, as files of configs/hardware describe it.

    `flops_per_s` (dense, at `dtype`), `bytes_per_s` and `memory_bytes` of its memory, and per direction between two
    devices of one node `link_bytes_per_s` and `link_latency_s`: published. What an engine reaches of them:
    `language_efficiency` and `vision_efficiency` of the arithmetic (the vision tower's matrices are smaller),
    `bandwidth_efficiency` and `link_efficiency` of the traffic; `lane_efficiency` of what the two lanes could gain side
    by side, 0 where they share all there is, such as cores (`shape.together`). `step_base_s`, `encode_base_s`: what
    each language and each vision batch takes besides (packing, launches, sampling, the wait for the result).
    `hides_traffic`: the larger of a batch's arithmetic and traffic is what it takes; else both, one after the other,
    as if no kernel ran beside another and none were balanced: the two bracket what engines do. Caches and
    weights get `memory_share` of the memory, less `workspace_bytes` for activations. `message_s`: a message between
    instances. `watts`: the board's limit; 0: not known. `notes`: where the numbers are from.

    `group`: how many of these one instance has, by tensor parallelism; `sum_s`: what adding up their parts takes twice
    in each layer, beside the bytes. Raises `ConfigError`.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    link_latency_s: float = 50e-6
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    language_efficiency: float = 0.5
    vision_efficiency: float = 0.4
    bandwidth_efficiency: float = 0.7
    link_efficiency: float = 0.5
    lane_efficiency: float = 0.5
    step_base_s: float = 1.5e-3
    encode_base_s: float = 0.7e-3
    hides_traffic: bool = True
    memory_share: float = 0.9
    workspace_bytes: float = 2.0 * GIB
    message_s: float = 300e-6
    watts: float = 0.0
    group: int = 1
    sum_s: float = 15e-6
    notes: str = ""

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "bytes_per_s", "memory_bytes", "link_bytes_per_s"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"hardware {self.name}: {name} must be positive", param=name)
        for name in (
            "language_efficiency",
            "vision_efficiency",
            "bandwidth_efficiency",
            "link_efficiency",
            "memory_share",
        ):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ConfigError(f"hardware {self.name}: {name} must be a share above 0 and at most 1", param=name)
        if not 0.0 <= self.lane_efficiency <= 1.0:
            raise ConfigError(f"hardware {self.name}: lane_efficiency must be between 0 and 1", param="lane_efficiency")
        for name in (
            "link_latency_s",
            "step_base_s",
            "encode_base_s",
            "workspace_bytes",
            "message_s",
            "watts",
            "sum_s",
        ):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"hardware {self.name}: {name} must not be negative", param=name)
        if self.group < 1:
            raise ConfigError(f"hardware {self.name}: group is a number of devices, at least 1", param="group")

    def joined(self, n: int) -> Hardware:
        """`n` of these as one device, by tensor parallelism: `n` times the arithmetic, memory and traffic, and `n`
        links to the others. What it takes to add up their parts is `added_s`."""
        by_group = ("flops_per_s", "bytes_per_s", "memory_bytes", "link_bytes_per_s", "workspace_bytes", "watts")
        more = {name: getattr(self, name) * n for name in by_group}
        return self if n == 1 else msgspec.structs.replace(self, name=f"TP{n} of {self.name}", group=n, **more)

    def added_s(self, n_bytes: float) -> float:
        """Seconds that the devices of a group take to add up tensors of `n_bytes` in a ring, `sum_s` left out."""
        own = self.link_bytes_per_s / self.group * self.link_efficiency
        return 2.0 * (self.group - 1) / self.group * n_bytes / own

    @property
    def language_flops_per_s(self) -> float:
        return self.flops_per_s * self.language_efficiency

    @property
    def vision_flops_per_s(self) -> float:
        return self.flops_per_s * self.vision_efficiency

    @property
    def traffic_bytes_per_s(self) -> float:
        return self.bytes_per_s * self.bandwidth_efficiency

    @property
    def link(self) -> Link:
        """The link between any two devices of one node."""
        rate = self.link_bytes_per_s * self.link_efficiency
        return Link(bytes_per_s=rate, latency_s=self.link_latency_s, message_s=self.message_s)


def read_hardware(name: str) -> Hardware:
    """The hardware that a file, or the one of this name in configs/hardware, describes. Raises `ConfigError`."""
    try:
        path = locate("hardware", name)
    except ConfigError as e:
        raise ConfigError(
            f"{e.message}; to describe your own, copy configs/hardware/h100.yaml, change its numbers and give its path",
            param="hardware",
        ) from None
    numbers = {k: _number(v) for k, v in read_yaml(path).items()}
    return converted({"name": path.stem, **numbers}, Hardware, str(path), "hardware")


def _number(value: Any) -> Any:
    """A number that YAML 1.1 takes for a string, such as 1e12, as a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
