"""Times of devices that are only described: prefill, KV bytes and decode steps by the roofline of a model's shape.

They are assumed, not measured. MiMo-V2-Flash in 8 bits on half of the devices of Prefill-as-a-Service's Table 3 would
be 1.3 (128K tokens) to 19 (1K) times as fast as measured there (`tests/planner/clusters/test_roofline.py`).
"""

from __future__ import annotations

import numpy as np

from hydrainfer.core import ConfigError, CostModel, Role
from hydrainfer.planner.clusters.tables import DecodeBatch
from hydrainfer.planner.clusters.times import Times
from hydrainfer.planner.costs import EngineModel, Hardware, ModelShape, blocks_of, cost_of

_PER_OCTAVE = 8


class Roofline:
    """One instance of described devices, which decodes or only prefills. `device`: all devices of the instance as one.
    Raises `ConfigError` if the model cannot be divided over them, or does not fit."""

    def __init__(self, shape: ModelShape, device: Hardware, engine: EngineModel, *, decodes: bool) -> None:
        device = engine.on(device)
        self._shape = shape
        self._cost: CostModel = engine.cost(cost_of(shape, device))
        blocks = blocks_of(shape, device, Role.parse("D" if decodes else "P"))
        self._room_bytes = sum(spec.block_bytes * n for spec, n in blocks.items())

    def kv_bytes(self, n_tokens: float) -> float:
        """Bytes that a prompt leaves: keys and values, in windows only the last ones, and the state after its end."""
        shape = self._shape
        values = sum(shape.kv_width(i) * min(n_tokens, window or n_tokens) for i, window in enumerate(shape.seen))
        return values * shape.item_bytes + shape.state_bytes

    def prefill_s(self, n_tokens: float) -> float:
        """Seconds of a prompt that is prefilled alone and at once."""
        n = round(n_tokens)
        return self._cost.language_s(n, n * n, 0, 0)

    def times(self, shortest: float, longest: float) -> Times:
        """The table for prompts between these lengths, with eight points per octave. Raises `ConfigError`."""
        n_points = 2 + int(_PER_OCTAVE * np.log2(longest / shortest))
        tokens = np.geomspace(shortest, max(longest, shortest * 1.01), n_points)
        return Times.sampled([float(n) for n in tokens], self.kv_bytes, self.prefill_s)

    def batch(self, n_context: float, n_held: float, tpot_s: float | None) -> DecodeBatch:
        """The largest batch whose step is within the TPOT, with contexts of `n_context` tokens, and whose sequences fit
        the caches with `n_held` tokens each. Raises `ConfigError` if not even one does."""
        n_most = int(self._room_bytes / self.kv_bytes(n_held))
        if n_most < 1:
            raise ConfigError(
                f"{self._shape.name}: no sequence of {n_held:.0f} tokens fits the caches", param="clusters"
            )
        limit_s = np.inf if tpot_s is None else tpot_s
        if self._step_s(1, n_context) > limit_s:
            raise ConfigError(
                f"a step of one sequence with {n_context:.0f} tokens takes {self._step_s(1, n_context):.3g} s, "
                f"tpot={tpot_s:g} allows for none",
                param="slo",
            )
        low, high = 1, n_most + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._step_s(middle, n_context) <= limit_s:
                low = middle
            else:
                high = middle
        return DecodeBatch(low, self._step_s(low, n_context))

    def _step_s(self, n: int, n_context: float) -> float:
        return self._cost.language_s(0, 0, n, round(n * n_context))
