"""The fastest attention for vision towers, measured once on this machine and remembered."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hydrainfer.ops.batch import Segments
from hydrainfer.ops.cpu.native import Kernels
from hydrainfer.ops.cpu.remembered import remembered
from hydrainfer.ops.torch_variants import attention_segments_sdpa

_PICTURES, _HEADS, _DIM = (577, 577), 8, 64  # as CLIP's at 336 pixels
_ROUNDS = 3


def fastest_in_segments(dtype: torch.dtype, kernels: Kernels, threads: int | None = None) -> str:
    """The fastest variant of `attention_segments` with this many threads (default: torch's current number):
    "native-cpu" or "torch-sdpa"."""
    found: dict[str, Callable] = {"native-cpu": kernels.attention_segments, "torch-sdpa": attention_segments_sdpa}
    what = (str(dtype), kernels.build, _PICTURES, _HEADS, _DIM)

    def whole(kept: dict[str, float]) -> bool:
        return kept.keys() == found.keys()

    seconds = remembered("attention", what, dict[str, float], whole, lambda: _race(found, dtype), threads)
    return min(found, key=seconds.__getitem__)


def _race(found: dict[str, Callable], dtype: torch.dtype) -> dict[str, float]:
    """The shortest time of one call, in seconds, by variant. The variants take turns."""
    segments = Segments(_PICTURES, torch.device("cpu"))
    q, k, v = torch.ones((sum(_PICTURES), 3, _HEADS, _DIM), dtype=dtype).unbind(1)
    best = dict.fromkeys(found, float("inf"))
    with torch.inference_mode():
        for _ in range(1 + _ROUNDS):
            for name, attend in found.items():
                start_s = time.perf_counter()
                attend(q, k, v, segments, 1.0)
                best[name] = min(best[name], time.perf_counter() - start_s)
    return best
