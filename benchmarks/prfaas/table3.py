"""Table 3: KV bytes per second of prefill of six public models, and what clusters of many devices send."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from benchmarks.prfaas.report import row
from benchmarks.prfaas.setting import GBIT, KI, PER_INSTANCE, TABLE_5, h200_times
from hydrainfer.planner.clusters import Cluster, Lengths, Times, TimesPoint, egress_bytes_per_s

TITLE = "Table 3, Equations 1 and 2: KV per second of prefill, egress of large clusters"
HAS_FIGURE = False
LENGTHS = (1, 8, 32, 128)
TABLE_3 = {
    "Kimi Linear": (1.19, 2.29, 3.87, 4.88),
    "MiMo-V2-Flash": (0.82, 2.85, 4.66, 4.71),
    "Qwen3.5-397B": (4.13, 6.28, 8.25, 7.47),
    "Ring-2.5-1T": (7.27, 4.47, 2.59, 1.46),
    "MiniMax-M2.5": (4.94, 32.87, 59.93, 47.82),
    "Qwen3-235B": (4.12, 22.42, 33.35, 21.50),
}
"""Gbps at each of `LENGTHS`, on 8 H200."""
_EGRESS = 0.03
TEXT = """\
Of the six models the paper publishes Φ alone, neither bytes nor seconds. So the first rows check Equation 1 with
Table 5, and the egress of many devices is Equation 2 from the paper's Φ: arithmetic that comes out, and no more than
that. The next section has the models' bytes from their shapes, and what seconds follow.

The rows "without that point" are the error of interpolation: Φ at 8K or 32K from the points on both sides. It is up
to 36 % for models whose curve bends there. Four points over two decades are too few for them; a table to plan with
should have more, or bytes from shapes and a curve of seconds (next section). The case study, with the bend of Table 5
far smaller, is the easy case."""


def times_of(gbps: tuple[float, ...], lengths: tuple[int, ...] = LENGTHS) -> Times:
    """A table with these KV rates. Only their ratio is known of bytes and seconds, and the KV rate between two points
    depends on nothing else, so each prefill takes a second."""
    points = (TimesPoint(n * KI, rate * GBIT, 1.0) for n, rate in zip(lengths, gbps, strict=True))
    return Times(points=tuple(points))


def egress_gbps(model: str, n_devices: int, length: int) -> float:
    """Gbps that so many devices send while they prefill prompts of `length` x 1,024 tokens."""
    times = times_of(TABLE_3[model])
    cluster = Cluster(name=model, times=times, instances=n_devices // PER_INSTANCE, devices=PER_INSTANCE)
    return egress_bytes_per_s(cluster, Lengths.of([length * KI])) / GBIT


def compute() -> dict[str, Any]:
    """Cells that follow from Equations 1 and 2, and the errors of interpolation."""
    rates = h200_times().kv_bytes_per_s([n * KI for n, *_ in TABLE_5]) / GBIT
    rows = [
        row(f"Table 5: Φ at {n}K, Gbps", gbps, float(rate))
        for (n, _, _, gbps), rate in zip(TABLE_5, rates, strict=True)
    ]
    for model, devices, length, tbps in (
        ("MiniMax-M2.5", 512, 32, 3.8),
        ("Qwen3-235B", 512, 32, 2.1),
        ("Ring-2.5-1T", 512, 32, 0.17),
        ("Ring-2.5-1T", 10_000, 128, 1.8),
    ):
        cell = f"egress of {devices:,} devices at {length}K, {model}, Tbps"
        rows.append(row(cell, tbps, egress_gbps(model, devices, length) / 1e3, tolerance=_EGRESS))
    for dense, hybrid, ratio in (("MiniMax-M2.5", "MiMo-V2-Flash", 13.0), ("Qwen3-235B", "Qwen3.5-397B", 4.0)):
        rows.append(row(f"Φ at 32K, {dense} / {hybrid}", ratio, TABLE_3[dense][2] / TABLE_3[hybrid][2]))
    return {"rows": [*rows, *without_a_point()], "ring_128k_512_devices_gbps": egress_gbps("Ring-2.5-1T", 512, 128)}


def without_a_point() -> list[dict[str, Any]]:
    """Φ at 8K and 32K from the points on both sides, where logarithms are linear."""
    rows = []
    for model, rates in TABLE_3.items():
        for (i, length), _ in pairwise(list(enumerate(LENGTHS))[1:]):
            others = times_of(rates[:i] + rates[i + 1 :], LENGTHS[:i] + LENGTHS[i + 1 :])
            interpolated = float(others.kv_bytes_per_s(length * KI)) / GBIT
            cells = row(f"Φ at {length}K without that point, {model}, Gbps", rates[i], interpolated)
            rows.append(cells | {"tolerance": None, "verdict": ""})
    return rows
