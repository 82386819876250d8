"""MiMo-V2.5, section 4.2: the throughput of prefill over the prefix, with a chunk of 16K new tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.figure import Curves, save_curves
from benchmarks.prfaas.mimo_cost import PRO, SMALL, without_windows
from benchmarks.prfaas.models import shape
from benchmarks.prfaas.report import row
from benchmarks.prfaas.setting import KI
from hydrainfer.planner.costs import DecoderShape

TITLE = "MiMo-V2.5: prefill over the prefix, with a chunk of 16K"
HAS_FIGURE = True
CHUNK = 16 * KI
PREFIXES = [0, 128, 256, 384, 512, 640, 768, 896, 1024]
_END, _PAPERS = 1024, 0.12
TEXT = """\
From FLOPs alone, whatever the device: matrices and attention run at the same share of the peak. The report has two
numbers, 1 x near no prefix and about 0.12 x at 1M, and does not say which of its models the figure shows.
MiMo-V2.5-Pro comes to 0.092, MiMo-V2.5 to 0.076. The shape of the fall follows from the layers: only 10 of 70 layers
see the prefix, and yet a token of the last chunk takes 866 GFLOP for attention and 80 for its weights.

What does not hold is the level at 1M: 23 % below the report's for the larger model. It would come out if attention
reached 1.4 times the matrices' share of the peak (MiMo-V2.5: 1.7 times), or if a chunk took a fixed time beside. FLOPs
do not tell these apart. Without windows 0.021 x would be left."""


def relative(decoder: DecoderShape) -> list[float]:
    """Tokens per second of a chunk after each of `PREFIXES` x 1,024 tokens, relative to one without prefix."""
    alone = decoder.flops(CHUNK)
    return [alone / decoder.flops(CHUNK, n * KI) for n in PREFIXES]


def faster_attention(decoder: DecoderShape, share: float) -> float:
    """How many times the matrices' speed attention must have for a relative throughput of `share` at 1M."""
    matrices = 2 * CHUNK * decoder.used_weights
    first, last = (decoder.attention_flops(CHUNK, n * KI) for n in (0, _END))
    return (share * last - first) / (matrices * (1.0 - share))


def compute() -> dict[str, Any]:
    """Relative throughputs of both models, and of the larger one without windows."""
    pro, small = shape(PRO), shape(SMALL)
    series = {PRO: relative(pro), SMALL: relative(small), "without windows": relative(without_windows(pro))}
    at_end = PREFIXES.index(_END)
    per_token = pro.attention_flops(CHUNK, _END * KI) / CHUNK
    rows = [
        row(f"{PRO} at 1M, of no prefix", _PAPERS, series[PRO][at_end]),
        row(f"{SMALL} at 1M, of no prefix", _PAPERS, series[SMALL][at_end]),
        row(f"{PRO} at 1M without windows", None, series["without windows"][at_end]),
        row(
            f"{PRO}: speed of attention over that of matrices at which 0.12 holds", None, faster_attention(pro, _PAPERS)
        ),
        row(f"{SMALL}: the same", None, faster_attention(small, _PAPERS)),
        row(f"{PRO} at 1M: GFLOP of attention per token", None, per_token / 1e9),
        row(f"{PRO}: GFLOP of matrices per token", None, 2 * pro.used_weights / 1e9),
    ]
    return {"rows": rows, "prefixes_k": PREFIXES, "relative": series}


def draw(results: dict[str, Any], path: Path) -> None:
    """Relative throughput over the prefix."""
    x = [float(n) for n in results["prefixes_k"]]
    save_curves(
        path, [Curves(TITLE, "prefix, 1,024 tokens", "tokens/s, of no prefix", x, results["relative"], log=False)]
    )
