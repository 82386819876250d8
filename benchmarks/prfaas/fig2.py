"""Figure 2: KV per second of prefill of MiniMax-M2.5 over the length of the prompt, on eight H200."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.figure import save_lines
from benchmarks.prfaas.models import h200, shape
from benchmarks.prfaas.report import row
from benchmarks.prfaas.setting import GBIT, KI
from benchmarks.prfaas.table3 import LENGTHS, TABLE_3
from benchmarks.prfaas.table3_shapes import Curve, curve_without, measured_s

TITLE = "Figure 2: KV per second of prefill of MiniMax-M2.5"
HAS_FIGURE = True
MODEL = "MiniMax-M2.5"
SHOWN = [1, 2, 4, 8, 16, 32, 64, 128]
_NAN = float("nan")
TEXT = """\
The bytes are exact, from the model's layers: 254 kB per token. The paper prints neither seconds nor the points of
this figure; its text says "roughly 60 Gbps" at 32K. "Curve" divides the bytes by T = a + b l + c l² through Table 3's
seconds, so its cell at 32K is fitted. The curve without 32K shows what such a curve knows of a length that was not
measured: 14 % too much there. Φ rises while the fixed 0.39 s of a prefill weigh, and falls once attention does. Its
highest value lies between two of the paper's points.

The roofline is assumed in all: the shares of the peaks are guesses, and it has no fixed time. It too rises and falls,
but its level is 1.2 times the measured Φ at 128K, 2 times at 32K and 24 times at 1K, and its peak is at 4K."""


def compute() -> dict[str, Any]:
    """Φ in Gbps by the curve and by a roofline, over `SHOWN` x 1,024 tokens."""
    seconds = measured_s(MODEL)
    curve = Curve.through(LENGTHS, seconds)
    by_curve = [_gbps(n, curve.seconds(n)) for n in SHOWN]
    roofline = [_gbps(n, shape(MODEL).prefill_s(h200(), n * KI)) for n in SHOWN]
    fine = range(1, 129)
    peak = max(fine, key=lambda n: _gbps(n, curve.seconds(n)))
    at_32k = SHOWN.index(32)
    without = _gbps(32, curve_without(MODEL, 32).seconds(32))
    rows = [
        row("Φ at 32K by the curve, Gbps", 60.0, by_curve[at_32k], is_calibrated=True),
        row("Φ at 32K by the curve without that point, Gbps", 60.0, without),
        row("Φ at 32K by a roofline (assumed), Gbps", 60.0, roofline[at_32k]),
        row("length of the highest Φ by the curve, 1,024 tokens", None, peak),
        row("highest Φ by the curve, Gbps", None, _gbps(peak, curve.seconds(peak))),
    ]
    return {"rows": rows, "lengths_k": SHOWN, "curve_gbps": by_curve, "roofline_gbps": roofline}


def _gbps(length: int, seconds: float) -> float:
    return shape(MODEL).cache_bytes(length * KI) / seconds / GBIT


def draw(results: dict[str, Any], path: Path) -> None:
    """Measured points, the curve and the roofline."""
    points = dict(zip(LENGTHS, TABLE_3[MODEL], strict=True))
    series = {
        "curve through Table 3's seconds": results["curve_gbps"],
        "roofline (assumed)": results["roofline_gbps"],
        "Table 3": [points.get(n, _NAN) for n in results["lengths_k"]],
    }
    save_lines(path, TITLE, "1,024 tokens", "Gbps", results["lengths_k"], series, log=True)
