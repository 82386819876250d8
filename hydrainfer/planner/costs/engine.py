"""Models of serving engines: their scheduling, their host time per step and picture, and the error of plans for them.

The numbers of a device's datasheet are in `Hardware`. How much slower an engine computes than described, and in which
order it works, is a property of the engine.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from hydrainfer.config import converted, locate, read_yaml
from hydrainfer.core import ConfigError, CostModel
from hydrainfer.engine import Overlap
from hydrainfer.planner.costs.hardware import Hardware
from hydrainfer.planner.nouns import ServerCost
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

    `scheduling`: "stage-level" (HydraInfer), "decode-first" (decodes of all sequences, then chunks within the budget;
    pictures between steps) or "prefill-first" (whole prompts, then decodes). `tokens`, `images`, `running`: fixed
    budgets of the engine; None if they follow from the SLO. `step_base_s`, `encode_base_s`: host time per step and per
    vision batch during which the device waits; None for the device's own value. `slower`: the factor by which
    arithmetic takes longer than described; `mixed`: one more such factor for instances that also encode (both fitted by
    `benchmarks/calibrating.py`). `server`: host time of everything but the model. `error`: in nine of ten cases, the
    measured value is within a factor of 1 + `error` of the predicted one (docs/planning.md); None if not known.
    `sources`: where the numbers are from. Raises `ConfigError`.
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
        """The engine's own budgets; None if they follow from the SLO. `base`: the values that the engine leaves
        open."""
        if self.tokens is None:
            return None
        images = self.images or base.images
        running = self.running or base.running
        return Budgets(tokens=self.tokens, images=images, image_tokens=self.tokens, running=running, step_s=base.step_s)

    def on(self, device: Hardware) -> Hardware:
        """The device with this engine's host times per step and vision batch."""
        own = {"step_base_s": self.step_base_s, "encode_base_s": self.encode_base_s}
        return msgspec.structs.replace(device, **{name: s for name, s in own.items() if s is not None})

    def cost(self, cost: CostModel, mixed: bool = False) -> CostModel:
        """The cost model of a described device, slowed as this engine is; `mixed`: on an instance that also encodes."""
        by = self.slower * (self.mixed if mixed else 1.0)
        return msgspec.structs.replace(cost, **{name: getattr(cost, name) * by for name in _ARITHMETIC})


def slowed(cost: CostModel, by: float) -> CostModel:
    """The same cost model with all times multiplied by `by`."""
    ratios = ("overlap_slowdown", "prefill_overlap_slowdown")
    times = {k: v * by for k, v in msgspec.structs.asdict(cost).items() if k not in ratios}
    return msgspec.structs.replace(cost, **times)


def with_steps(cost: CostModel, step_s: float) -> CostModel:
    """The same cost model with `step_s` more for each batch."""
    bases = {"step_base_s": cost.step_base_s + step_s, "encode_base_s": cost.encode_base_s + step_s}
    return msgspec.structs.replace(cost, **bases)


def read_engine(name: str) -> EngineModel:
    """The engine described by a file, or by the file of this name in configs/engines. Raises `ConfigError`."""
    path = locate("engines", name)
    return converted({"name": path.stem, **read_yaml(path)}, EngineModel, str(path), "engine")
