"""Tiny checkpoints of the families that a session asks, with head sizes that FlashInfer takes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkpoints import make_llava
from tests.checkpoints_gemma import make_gemma
from tests.checkpoints_mtp import add_mtp
from tests.checkpoints_qwen import make_qwen
from tests.checkpoints_text import DELTA, make_text

_DELTA_ROPE: dict[str, Any] = dict(DELTA)["rope_parameters"]  # type: ignore[assignment]
_QWEN2: dict[str, Any] = {  # heads of 128
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
_DELTA: dict[str, Any] = {  # states that our kernels take, which a graph needs
    "head_dim": 256,
    "rope_parameters": _DELTA_ROPE | {"mrope_section": [24, 20, 20]},
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
MAKERS: dict[str, Callable[[Path], Path]] = {
    "llava": lambda out: make_llava(out, head_dim=64, hidden=128),
    "qwen2_vl": lambda out: make_qwen("qwen2_vl", out, text=_QWEN2, vision={"hidden_size": 256}),
    "gemma3": lambda out: make_gemma(out, text={"head_dim": 256}),
    "gpt_oss": lambda out: make_text(out, "gpt_oss", head_dim=64),
    "qwen3_5": lambda out: add_mtp(make_qwen("qwen3_5", out, text=_DELTA)),
    "lfm3_vl": lambda out: make_qwen("lfm3_vl", out, text={"head_dim": 64}),
}
PICTURES = ("llava", "qwen2_vl", "gemma3", "qwen3_5", "lfm3_vl")
"""Those that take pictures."""


def tiny(kind: str, models: Path) -> Path:
    """The checkpoint of that kind below `models`, made if it is absent. Several processes may ask at a time."""
    out = models / f"tiny-{kind}"
    if not out.exists():
        models.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=models))
        MAKERS[kind](part)
        try:
            os.rename(part, out)
        except OSError:  # another process was first
            shutil.rmtree(part, ignore_errors=True)
    return out
