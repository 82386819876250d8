"""Is a server's peak memory no more than its weights, its caches and a fixed allowance?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

ALLOWANCE_BYTES = 600 * 10**6
HOW = (
    "peak: VmHWM of the server's processes, added up. started: the same when it first answered. weights: the tensors "
    "that it loads, in the dtype it serves. caches: its shared anonymous mappings (only storage/store.py makes such), "
    "allocated = their size, touched = resident at the end; a cache page once touched stays resident, so that the "
    "peak contains no more of them. beyond = peak - weights - touched caches. code: resident pages of files, part of "
    "beyond. The criterion says caches; most of an allocated cache was never written and costs nothing, so that both "
    "readings are judged."
)


def loaded_weight_bytes(path: Path, dtype: str) -> int:
    """The bytes that an EPD instance loads of a checkpoint, without loading it. 12 layers of vision may be 11 in
    use."""
    import torch

    from hydrainfer.core import Role
    from hydrainfer.families import read_config
    from hydrainfer.models import Model
    from hydrainfer.ops import select_ops

    config = read_config(path)
    ops = select_ops("cpu", getattr(torch, dtype), config.text.head_dim, use_native=False)
    return Model(config, Role.parse("EPD"), ops, getattr(torch, dtype), torch.device("meta")).weight_bytes


def memory_check(path: Path, dtype: str, server: dict[str, Any]) -> dict[str, Any]:
    """`server`: what `Bench.facts` says of it. The criterion is judged with allocated and with touched caches."""
    weights, peak = loaded_weight_bytes(path, dtype), server["hwm_sum_bytes"]
    touched, allocated = server["shared_touched_bytes"], server["shared_bytes"]
    return {
        "how": HOW,
        "peak_bytes": peak,
        "started_bytes": server["startup_hwm_bytes"],
        "weight_bytes": weights,
        "cache_touched_bytes": touched,
        "cache_allocated_bytes": allocated,
        "code_bytes": server["file_bytes"],
        "beyond_bytes": peak - weights - touched,
        "allowance_bytes": ALLOWANCE_BYTES,
        "ok_allocated": peak <= weights + allocated + ALLOWANCE_BYTES,
        "ok_touched": peak <= weights + touched + ALLOWANCE_BYTES,
    }


def described(check: dict[str, Any]) -> str:
    mb = {name: f"{value / 1e6:.0f}" for name, value in check.items() if name.endswith("_bytes")}
    verdict = {k: "yes" if check[f"ok_{k}"] else "NO" for k in ("allocated", "touched")}
    return (
        f"peak {mb['peak_bytes']} MB (when started {mb['started_bytes']}) = weights {mb['weight_bytes']} + touched "
        f"caches {mb['cache_touched_bytes']} (of {mb['cache_allocated_bytes']} allocated) + {mb['beyond_bytes']}, of "
        f"which code {mb['code_bytes']}\npeak ≤ weights + caches + {mb['allowance_bytes']} MB: with allocated caches "
        f"{verdict['allocated']}, with touched caches {verdict['touched']}"
    )
