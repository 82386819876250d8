"""Table 3 from shapes: bytes of six models from their layers, the seconds that the measured Φ means, a roofline."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.figure import Curves, save_curves
from benchmarks.prfaas.models import h200, shape
from benchmarks.prfaas.report import row
from benchmarks.prfaas.setting import GBIT, KI
from benchmarks.prfaas.table3 import LENGTHS, TABLE_3, without_a_point
from hydrainfer.planner.costs import Latent

TITLE = "Table 3 from shapes: bytes, seconds, and a roofline"
HAS_FIGURE = True
RING = "Ring-2.5-1T"
TEXT = """\
The paper prints Φ alone. S follows from the layers, so T = S / Φ is what its authors measured. It is plausible in
every cell: T ascends with length in all six models, a prompt of 1K takes 0.34 to 0.48 s (the paper's own model: 0.44),
arithmetic reaches 0.2 to 43 % of the peak, and T = a + b l + c l² passes all points within 5.4 %. Ring-2.5-1T is the
sharpest check: its curve has three numbers and passes four points within 0.03 %. Without its 294 MB of float32 states,
96 % of S at 1K, 1K would take 13 ms; with states of 16 bits the curve would miss by 3 %. So the paper's S has them,
most likely in float32.

What follows for a plan: bytes need no measuring, and seconds three or four lengths. Φ at 8K or 32K from the three other
points is 0.1 to 17 % off by the curve of T, with a median of 6 %; by the line between logarithms of Φ (table3) it is up
to 36 % off, with a median of 18 %.

What does not hold: the roofline. It is assumed, and within 5 % in one cell of 24. At 1K it is 5 to 44 times too fast,
as a prefill takes 0.29 to 0.44 s however short the prompt, and the roofline assumes 1.5 ms. With that fixed time added
(last column) it is within 8 % at 1K and 8K. At 128K the two dense models then take 0.94 and 1.08 times what it says,
the four hybrids 1.25 to 1.73 times; FLOPs do not say why. That FP8 has twice the peak is not assumed.

The 4.5 x of MLA over GQA are 4.44 if GQA had 8 KV heads of the latent's own dimensions (192 and 128); against Ling-1T,
which has 8 KV heads of 128, they would be 3.56. The 36 x are of keys and values alone: with the states 30 x are left at
128K, and 20 x at 32K."""


class Curve(NamedTuple):
    """Seconds of a prefill of l x 1,024 tokens: constant + linear l + square l²."""

    constant: float
    linear: float
    square: float

    @classmethod
    def through(cls, lengths: tuple[int, ...], seconds: list[float]) -> Curve:
        """The curve with the least squares of relative errors; through all points if there are three."""
        relative = np.vander(lengths, 3, increasing=True) / np.array(seconds)[:, None]
        numbers, *_ = np.linalg.lstsq(relative, np.ones(len(lengths)), rcond=None)
        return cls(*(float(number) for number in numbers))

    def seconds(self, length: int) -> float:
        return self.constant + self.linear * length + self.square * length**2


def measured_s(model: str) -> list[float]:
    """Seconds at each of `LENGTHS`: exact bytes over the paper's Φ."""
    rates = zip(LENGTHS, TABLE_3[model], strict=True)
    return [shape(model).cache_bytes(n * KI) / (gbps * GBIT) for n, gbps in rates]


def curve_without(model: str, length: int) -> Curve:
    """The curve through the points of all other lengths."""
    points = [(n, s) for n, s in zip(LENGTHS, measured_s(model), strict=True) if n != length]
    return Curve.through(tuple(n for n, _ in points), [s for _, s in points])


def points(model: str) -> list[dict[str, float]]:
    """Bytes, seconds and arithmetic at each of `LENGTHS`."""
    decoder, seconds = shape(model), measured_s(model)
    curve = Curve.through(LENGTHS, seconds)
    found = []
    for length, papers, s in zip(LENGTHS, TABLE_3[model], seconds, strict=True):
        kv_bytes, flops_per_s = decoder.cache_bytes(length * KI), decoder.flops(length * KI) / s
        roofline_s = decoder.prefill_s(h200(), length * KI)
        found.append(
            {
                "length_k": length,
                "kv_bytes": kv_bytes,
                "seconds": s,
                "curve_s": curve.seconds(length),
                "flops_per_s_and_device": flops_per_s / h200().group,
                "share_of_peak": flops_per_s / h200().flops_per_s,
                "paper_gbps": papers,
                "roofline_gbps": kv_bytes / roofline_s / GBIT,
                "roofline_factor": s / roofline_s,
                "factor_with_fixed_time": s / (roofline_s + curve.constant),
            }
        )
    return found


def compute() -> dict[str, Any]:
    """All points, and what holds of them."""
    models = {model: points(model) for model in TABLE_3}
    rows = [*_sanity_rows(models), *_ring_rows(), *_curve_rows()]
    for model, found in models.items():
        for p in found:
            cell = f"Φ at {p['length_k']}K by a roofline (assumed), {model}, Gbps"
            rows.append(row(cell, p["paper_gbps"], p["roofline_gbps"]))
    return {"rows": rows, "table": _table(models), "models": models}


def _curve_error(kv_bytes: list[float], model: str) -> float:
    """The largest relative error of the curve through all points, if the model left these bytes."""
    seconds = [n / (gbps * GBIT) for n, gbps in zip(kv_bytes, TABLE_3[model], strict=True)]
    curve = Curve.through(LENGTHS, seconds)
    return max(abs(curve.seconds(n) / s - 1.0) for n, s in zip(LENGTHS, seconds, strict=True))


def _sanity_rows(models: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    seconds = {model: [p["seconds"] for p in found] for model, found in models.items()}
    every = [p for found in models.values() for p in found]
    shares = [p["share_of_peak"] for p in every]
    kv_bytes = {model: [p["kv_bytes"] for p in found] for model, found in models.items()}
    errors = {model: _curve_error(sizes, model) for model, sizes in kv_bytes.items()}
    states = shape(RING).cache_bytes(0)
    halved = [n - states / 2 for n in kv_bytes[RING]]
    return [
        row("models whose seconds ascend with length, of 6", None, sum(s == sorted(s) for s in seconds.values())),
        row("shortest prefill of 1K, s", None, min(s[0] for s in seconds.values())),
        row("longest prefill of 1K, s", None, max(s[0] for s in seconds.values())),
        row("least share of the bfloat16 peak", None, min(shares)),
        row("largest share of the bfloat16 peak", None, max(shares)),
        row("largest error of a + b l + c l²", None, max(errors.values())),
        row(f"the same, {RING}", None, errors[RING]),
        row(f"the same, {RING} with states of 16 bits", None, _curve_error(halved, RING)),
    ]


def _ring_rows() -> list[dict[str, Any]]:
    """What MLA and the ratio of layers save of Ring-2.5-1T's bytes, against grouped heads in all layers."""
    ring = shape(RING)
    n_latent = sum(group.count for group in ring.layers if isinstance(group.attention, Latent))
    per_token = ring.cache_bytes(KI + 1) - ring.cache_bytes(KI)
    grouped = 8 * (192 + 128) * ring.item_bytes  # 8 KV heads of the latent's own dimensions
    all_grouped = ring.n_layers * grouped
    return [
        row(f"{RING}: bytes of GQA over those of MLA", 4.5, grouped * n_latent / per_token),
        row(f"{RING}: layers over those with MLA", 8.0, ring.n_layers / n_latent),
        row(f"{RING}: keys and values, GQA in all layers over the model's", 36.0, all_grouped / per_token),
        row(f"{RING}: the same with states, at 128K", None, all_grouped * 128 * KI / ring.cache_bytes(128 * KI)),
        row(f"{RING}: the same with states, at 32K", None, all_grouped * 32 * KI / ring.cache_bytes(32 * KI)),
    ]


def _curve_rows() -> list[dict[str, Any]]:
    rows = []
    for model, rates in TABLE_3.items():
        for length, papers in list(zip(LENGTHS, rates, strict=True))[1:-1]:
            seconds = curve_without(model, length).seconds(length)
            ours = shape(model).cache_bytes(length * KI) / seconds / GBIT
            rows.append(row(f"Φ at {length}K by the curve without that point, {model}, Gbps", papers, ours))
    by_curve = median(abs(cell["ratio"] - 1.0) for cell in rows)
    by_line = median(abs(cell["ratio"] - 1.0) for cell in without_a_point())
    rows.append(row("median error without a point, by the curve", None, by_curve))
    rows.append(row("median error without a point, by the line between logarithms of Φ", None, by_line))
    return rows


def _table(models: dict[str, list[dict[str, float]]]) -> list[list[str | float]]:
    head = ["model", "1,024 tokens", "S, MB", "T = S / Φ, s", "TFLOP/s per device", "share of the peak"]
    table: list[list[str | float]] = [[*head, "roofline / measured", "the same with the curve's fixed time"]]
    for model, found in models.items():
        for p in found:
            speed = p["flops_per_s_and_device"] / 1e12
            factors = [p["roofline_factor"], p["factor_with_fixed_time"]]
            cells = [p["length_k"], p["kv_bytes"] / 1e6, p["seconds"], speed, p["share_of_peak"], *factors]
            table.append([model, *(float(f"{cell:.3g}") for cell in cells)])
    return table


def draw(results: dict[str, Any], path: Path) -> None:
    """Seconds, and the shares of the peak, over length."""
    models = results["models"]
    seconds = {model: [p["seconds"] for p in found] for model, found in models.items()}
    shares = {model: [p["share_of_peak"] for p in found] for model, found in models.items()}
    x = [float(n) for n in LENGTHS]
    save_curves(
        path,
        [
            Curves("T = S / Φ", "1,024 tokens", "seconds", x, seconds),
            Curves("arithmetic", "1,024 tokens", "share of the bfloat16 peak", x, shares),
        ],
    )
