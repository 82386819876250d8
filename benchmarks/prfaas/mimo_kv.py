"""MiMo-V2.5, section 1.2: the bytes that a prompt leaves, of nine models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.figure import Curves, save_curves
from benchmarks.prfaas.models import published, shape
from benchmarks.prfaas.report import row
from benchmarks.prfaas.setting import KI

TITLE = "MiMo-V2.5: bytes of keys and values of nine models"
HAS_FIGURE = True
SMALL = ("Hunyuan-3", "MiniMax-M2", "Qwen3.5-397B", "MiMo-V2.5", "DeepSeek-V4-Flash")
LARGE = ("Kimi-K2", "GLM-5", "MiMo-V2.5-Pro", "DeepSeek-V4-Pro")
"""Below and above 500 billion weights."""
SHOWN = [1, 4, 16, 64, 256, 1024]
_IN_TABLE = (1, 32, 128, 1024)
TEXT = """\
All models keep bfloat16; states are float32; the keys that an index of sparse attention keeps are counted. The report's
figure has no numbers in the text, only that both MiMo models rank second. They do from 3K tokens on. Below, Kimi-K2
keeps less than MiMo-V2.5-Pro, whose windows are not yet small against the prompt. Second is a rank among these nine:
Kimi Linear (8 kB per token) and Ring-2.5-1T (12 kB), which the report leaves out, keep less than MiMo-V2.5 (23 kB).

DeepSeek says that V4-Pro keeps 10 % of what V3.2 does; here it is 11.5 %, as everything counts in one format.

The check of the layers is their number of weights: within 2.6 % of what the authors publish for every model. Used per
token: with the head, without the token table. models.yaml has the source of each number."""


def rank(name: str, models: tuple[str, ...], length: int) -> int:
    """The place of a model by its bytes at `length` x 1,024 tokens; 1 has the fewest."""
    return sorted(models, key=lambda model: shape(model).cache_bytes(length * KI)).index(name) + 1


def compute() -> dict[str, Any]:
    """Bytes over `SHOWN`, and ranks."""
    rows = []
    for name, models in (("MiMo-V2.5", SMALL), ("MiMo-V2.5-Pro", LARGE)):
        for length in _IN_TABLE:
            cell = f"rank of {name} among {len(models)}, {length}K"
            rows.append(row(cell, 2, rank(name, models, length), tolerance=0.0))
    share = shape("DeepSeek-V4-Pro").cache_bytes(1024 * KI) / shape("DeepSeek-V3.2").cache_bytes(1024 * KI)
    rows.append(row("DeepSeek-V4-Pro over DeepSeek-V3.2 at 1M (DeepSeek's own claim)", 0.10, share))
    kv_bytes = {name: [shape(name).cache_bytes(n * KI) for n in SHOWN] for name in (*SMALL, *LARGE)}
    return {"rows": rows, "table": _table(), "lengths_k": SHOWN, "kv_bytes": kv_bytes}


def _table() -> list[list[str | float]]:
    lengths = [f"{length}K, GB" for length in _IN_TABLE]
    head = ["model", *lengths, "weights, billions", "published", "used per token", "published", "assumed"]
    table: list[list[str | float]] = [[*head]]
    for name, model in published().items():
        gb = [model.shape.cache_bytes(length * KI) / 1e9 for length in _IN_TABLE]
        head_weights = model.shape.vocab * model.shape.hidden
        total, used = model.shape.weights / 1e9, (model.shape.used_weights + head_weights) / 1e9
        numbers = [*gb, total, model.parameters[0], used, model.parameters[1]]
        table.append([name, *(float(f"{number:.4g}") for number in numbers), "; ".join(model.assumed)])
    return table


def draw(results: dict[str, Any], path: Path) -> None:
    """GB over length, of the smaller and of the larger models."""
    gb = {name: [v / 1e9 for v in values] for name, values in results["kv_bytes"].items()}
    panels = (("below 500 billion weights", SMALL), ("above", LARGE))
    x = results["lengths_k"]
    save_curves(
        path, [Curves(title, "1,024 tokens", "GB", x, {name: gb[name] for name in some}) for title, some in panels]
    )
