"""MiMo-V2.5, section 1: what windows in 60 of 70 layers save of arithmetic and of keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figure import Curves, save_curves
from benchmarks.prfaas.models import shape
from benchmarks.prfaas.report import row
from benchmarks.prfaas.setting import KI
from hydrainfer.planner.costs import DecoderShape, Grouped

TITLE = "MiMo-V2.5: full attention over hybrid sliding windows"
HAS_FIGURE = True
PRO, SMALL = "MiMo-V2.5-Pro", "MiMo-V2.5"
SHOWN = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
TEXT = """\
"Full" is the same model with all windows taken away. The 7.0 x are 70 layers over 10. Keys and values come within 5 %
of it from 16K on, FLOPs of attention from 32K on.

What does not hold is "the total compute is roughly 1/7", which "directly translates to a proportional reduction in
prefill cost". That is true of attention's own arithmetic. All tokens also go through 40 billion weights, with windows
or without: without windows a prefill takes 1.8 times the FLOPs at 32K, 3.4 times at 128K and 6.1 times at 1M.

Nor are 7 x those of MiMo-V2.5, of which the report says the same. It has 4 KV heads in the 9 layers with full attention
and 8 in the 39 with windows. Without windows it would keep 9.7 times as much; 5.3 times if all layers had 4 heads,
which is what its model card calls "nearly 6 x"."""


def without_windows(decoder: DecoderShape, kv_heads: int | None = None) -> DecoderShape:
    """The same decoder with full attention in all layers; `kv_heads`: of these layers, None to keep theirs."""
    groups = []
    for group in decoder.layers:
        attention = group.attention
        if isinstance(attention, Grouped) and attention.window:
            heads = kv_heads or attention.kv_heads
            attention = msgspec.structs.replace(attention, window=0, kv_heads=heads)
        groups.append(msgspec.structs.replace(group, attention=attention))
    return msgspec.structs.replace(decoder, layers=tuple(groups))


def ratios(name: str) -> dict[str, list[float]]:
    """Full attention over the model's own, at each of `SHOWN`: FLOPs of attention, of a whole prefill, and bytes."""
    hybrid = shape(name)
    full = without_windows(hybrid)
    tokens = [n * KI for n in SHOWN]
    return {
        "attention": [full.attention_flops(n) / hybrid.attention_flops(n) for n in tokens],
        "prefill": [full.flops(n) / hybrid.flops(n) for n in tokens],
        "bytes": [full.cache_bytes(n) / hybrid.cache_bytes(n) for n in tokens],
    }


def compute() -> dict[str, Any]:
    """Ratios of MiMo-V2.5-Pro over length, and those of MiMo-V2.5 at 1M."""
    found, hybrid = ratios(PRO), shape(PRO)
    full = without_windows(hybrid)
    rows = []
    for length in (32, 128, 1024):
        i = SHOWN.index(length)
        rows += [
            row(f"{PRO}, {length}K: FLOPs of attention", 7.0, found["attention"][i]),
            row(f"{PRO}, {length}K: bytes of keys and values", 7.0, found["bytes"][i]),
            row(f"{PRO}, {length}K: FLOPs of a prefill", 7.0, found["prefill"][i]),
        ]
    small, n = shape(SMALL), 1024 * KI
    alike = without_windows(small, kv_heads=4).cache_bytes(n) / small.cache_bytes(n)
    rows += [
        row(f"{SMALL}, 1024K: bytes of keys and values", 7.0, ratios(SMALL)["bytes"][-1]),
        row(f"{SMALL}, 1024K: the same, if all layers had 4 KV heads", 7.0, alike),
    ]
    tokens = [n * KI for n in SHOWN]
    return {
        "rows": rows,
        "lengths_k": SHOWN,
        "ratios": found,
        "attention_flops": {
            "full": [full.attention_flops(n) for n in tokens],
            "hybrid": [hybrid.attention_flops(n) for n in tokens],
        },
        "kv_bytes": {"full": [full.cache_bytes(n) for n in tokens], "hybrid": [hybrid.cache_bytes(n) for n in tokens]},
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """FLOPs of attention, bytes, and the ratios of both and of a whole prefill."""
    x = results["lengths_k"]
    flops = {name: [v / 1e15 for v in values] for name, values in results["attention_flops"].items()}
    gb = {name: [v / 1e9 for v in values] for name, values in results["kv_bytes"].items()}
    names = {"attention": "FLOPs of attention", "bytes": "bytes of KV", "prefill": "FLOPs of a prefill"}
    series = {label: results["ratios"][key] for key, label in names.items()}
    save_curves(
        path,
        [
            Curves(f"{PRO}: attention", "1,024 tokens", "PFLOP", x, flops),
            Curves(f"{PRO}: keys and values", "1,024 tokens", "GB", x, gb),
            Curves("full / hybrid", "1,024 tokens", "ratio", x, series, linear_y=True),
        ],
    )
