"""Engines as numbers: how each schedules, what its host does for a step and a picture, and how far plans of it are off.

A device is what its datasheet says; how much of it comes through, and in which order work is done, is the engine's.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from hydrainfer.config import converted, locate, read_yaml
from hydrainfer.core import ConfigError, CostModel
from hydrainfer.engine import Overlap
from hydrainfer.planner.costs.hardware import Hardware
from hydrainfer.planner.simulation import ServerCost
from hydrainfer.scheduler import Budgets, Policy

Scheduling = Literal["stage-level", "decode-first", "prefill-first"]
_ARITHMETIC = (
    "encode_image_s",
    "encode_token_s",
    "encode_attention_s",
    "prefill_token_s",
    "prefill_attention_s",
    "decode_token_s",
    "decode_context_s",
)
_OVERLAP: dict[Scheduling, Overlap] = {"stage-level": "free", "decode-first": "off", "prefill-first": "off"}


class EngineModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine, as files of configs/engines describe it.

    `scheduling`: "stage-level" (HydraInfer), "decode-first" (decodes of all, then chunks within the budget; pictures
    between steps) or "prefill-first" (whole prompts, then decodes). `tokens`, `images`, `running`: its budgets,
    whatever the SLO; None: by the SLO. `step_base_s`, `encode_base_s`: host time per step and per vision batch that no
    device hides, None: the device's. `slower`: times longer than described that arithmetic takes, and `mixed` times
    that where an instance encodes besides (both fitted: `profiling.calibrating`). `server`: what all but the model
    takes of the host. `error`: what was measured lies within a factor of 1 + `error` of what was predicted, nine times
    in ten (docs/planning.md); None: not known. `sources`: of the numbers. Raises `ConfigError`.
    """

    name: str
    scheduling: Scheduling = "stage-level"
    tokens: int | None = None
    images: int | None = None
    running: int | None = None
    step_base_s: float | None = None
    encode_base_s: float | None = None
    slower: float = 1.0
    mixed: float = 1.0
    server: ServerCost = ServerCost()
    error: float | None = None
    sources: str = ""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(EngineModel):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not 0.0 <= value < math.inf:
                raise ConfigError(f"engine {self.name}: {field.name} must not be negative", param=field.name)
        if not self.slower or not self.mixed:
            raise ConfigError(f"engine {self.name}: slower and mixed must be positive", param="slower")
        server = self.server
        if not server.cores > 0.0 or server.processes < 1 or min(server.workers, server.threads, server.step_s) < 0:
            rule = "server.cores and processes must be positive, its workers, threads and step_s must not be negative"
            raise ConfigError(f"engine {self.name}: {rule}", param="server")

    @property
    def overlap(self) -> Overlap:
        return _OVERLAP[self.scheduling]

    @property
    def policy(self) -> Policy:
        if self.scheduling == "stage-level":
            return Policy()
        batching: Literal["stage-level", "prefill-first"] = "stage-level"
        if self.scheduling == "prefill-first":
            batching = "prefill-first"
        return Policy(order="fcfs", encode_wait_s=0.0, batching=batching)

    def budgets(self, base: Budgets) -> Budgets | None:
        """The engine's own budgets, None if they follow from the SLO. `base`: has what it leaves open."""
        if self.tokens is None:
            return None
        images, running = self.images or base.images, self.running or base.running
        return Budgets(tokens=self.tokens, images=images, image_tokens=self.tokens, running=running, step_s=base.step_s)

    def on(self, device: Hardware) -> Hardware:
        """The device as this engine drives it."""
        own = {"step_base_s": self.step_base_s, "encode_base_s": self.encode_base_s}
        return msgspec.structs.replace(device, **{name: s for name, s in own.items() if s is not None})

    def cost(self, cost: CostModel, mixed: bool = False) -> CostModel:
        """The cost of a described device as this engine uses it; `mixed`: by an instance that encodes besides."""
        by = self.slower * (self.mixed if mixed else 1.0)
        return msgspec.structs.replace(cost, **{name: getattr(cost, name) * by for name in _ARITHMETIC})


def slowed(cost: CostModel, by: float) -> CostModel:
    """The same model with all times `by` times as long."""
    ratios = ("overlap_slowdown", "prefill_overlap_slowdown")
    times = {k: v * by for k, v in msgspec.structs.asdict(cost).items() if k not in ratios}
    return msgspec.structs.replace(cost, **times)


def with_steps(cost: CostModel, step_s: float) -> CostModel:
    """The same model with so much more for each batch."""
    bases = {"step_base_s": cost.step_base_s + step_s, "encode_base_s": cost.encode_base_s + step_s}
    return msgspec.structs.replace(cost, **bases)


def read_engine(name: str) -> EngineModel:
    """The engine that a file, or the one of this name in configs/engines, describes. Raises `ConfigError`."""
    path = locate("engines", name)
    return converted({"name": path.stem, **read_yaml(path)}, EngineModel, str(path), "engine")
