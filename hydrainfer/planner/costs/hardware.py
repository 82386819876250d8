"""Models of devices: published peaks, and the shares of them that an engine is assumed to reach."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from hydrainfer.config import converted, locate, read_yaml
from hydrainfer.core import ConfigError
from hydrainfer.planner.nouns import Link

GIB = 1 << 30


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device of a node, as files of configs/hardware describe it.

    Published numbers: `flops_per_s` (dense, at `dtype`), `bytes_per_s` and `memory_bytes` of the memory, and
    `link_bytes_per_s` and `link_latency_s` between two devices of one node, per direction.

    Shares that an engine reaches: `language_efficiency` and `vision_efficiency` of the arithmetic (the vision tower's
    matrices are smaller), `bandwidth_efficiency` and `link_efficiency` of the traffic, `lane_efficiency` of what the
    two lanes could gain side by side (`shape.together`); 0 where the lanes share all resources, such as cores.

    `step_base_s`, `encode_base_s`: the fixed time of each language and each vision batch (packing, launches, sampling,
    waiting for the result). `hides_traffic`: a batch takes the longer of its arithmetic and its traffic; if false, it
    takes their sum, as if no kernels overlapped. Real engines lie between the two. Caches and weights get
    `memory_share` of the memory, less `workspace_bytes` for activations. `message_s`: seconds of a message between
    instances. `watts`: power limit of the board; 0 if not known. `notes`: where the numbers are from.

    `group`: number of these devices in one instance, by tensor parallelism; `sum_s`: the fixed time of an all-reduce,
    which each layer runs twice, without its transfer. Raises `ConfigError`.
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
        links to the others. `added_s` gives the time of their all-reduces."""
        by_group = ("flops_per_s", "bytes_per_s", "memory_bytes", "link_bytes_per_s", "workspace_bytes", "watts")
        more = {name: getattr(self, name) * n for name in by_group}
        if n == 1:
            return self
        return msgspec.structs.replace(self, name=f"TP{n} of {self.name}", group=n, **more)

    def added_s(self, n_bytes: float) -> float:
        """Seconds that a group takes for a ring all-reduce of tensors of `n_bytes`, without the fixed `sum_s`."""
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
    """The hardware described by a file, or by the file of this name in configs/hardware. Raises `ConfigError`."""
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
    """The value, converted to a number if it is a string such as 1e12, which YAML 1.1 does not read as a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
