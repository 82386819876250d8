"""Attention over the paged cache by FlashInfer (the `cuda` extra).

One plan, and one kernel per layer, compute any mix of chunks and decodes: FlashInfer's paged prefill, which it also
uses for decodes on tensor cores. Its other decode kernel supports only some numbers of query heads per KV head;
Qwen2-VL's 7 is not among them.
"""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hydrainfer.ops import torch_variants
from hydrainfer.ops.batch import KV, AttentionBatch, Captured
from hydrainfer.ops.pinned import to_device

_WORKSPACE_BYTES = 128 << 20
_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128, 256)


class _PlanKey(NamedTuple):
    """The properties of a layer that a plan depends on. Queries and cache have the same dtype."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float


@dataclass(eq=False)
class PagedPlan:
    """A batch in FlashInfer's layout: request i has rows `rows[i] .. rows[i+1]-1` and pages `pages[i] .. pages[i+1]-1`
    of `indices`, the last of which holds `last[i]` tokens. `rows`, `pages` and `last` int32 on the host, `indices`
    int32 on the device. `made_for`: the layer properties that `wrapper` was planned for."""

    wrapper: Any
    rows: Tensor
    pages: Tensor
    last: Tensor
    indices: Tensor
    made_for: _PlanKey | None = None


class FlashInfer:
    """`prepare` and `attention` with the references' signatures. `make` makes a wrapper from a workspace on `device`
    and, for use in a CUDA graph, arrays of its own."""

    def __init__(self, device: torch.device, make: Callable[..., Any] | None = None) -> None:
        self._device, self._make = device, make or _wrapper
        self._workspace: Tensor | None = None
        self._free: list[Any] = []
        self._captured: dict[Captured, PagedPlan] = {}
        self._copied: dict[Any, torch.cuda.Event] = {}  # by wrapper: recorded when its latest plan was copied

    def supports(self, dtype: torch.dtype, head_dim: int) -> bool:
        return dtype in _DTYPES and head_dim in _HEAD_DIMS

    def prepare(self, batch: AttentionBatch) -> None:
        if batch.spans:  # masks that are not causal
            return torch_variants.prepare(batch)
        if not batch.counts:  # no row is sampled: nobody attends
            return
        lengths = np.add(batch.contexts, batch.counts)
        n_pages = -(-lengths // batch.block_tokens)
        places = [i * batch.tables.shape[1] + np.arange(n) for i, n in enumerate(n_pages)]
        chosen = to_device(np.concatenate(places), self._device)
        captured = batch.captured
        before = self._captured.get(captured) if captured else None
        batch.plan = PagedPlan(
            wrapper=before.wrapper if before else self._wrapper_for(captured),
            rows=_host([0, *accumulate(batch.counts)]),
            pages=_host([0, *accumulate(n_pages.tolist())]),
            last=_host(((lengths - 1) % batch.block_tokens + 1).tolist()),
            indices=batch.tables.flatten()[chosen],
        )
        if captured is None:
            weakref.finalize(batch.plan, self._free.append, batch.plan.wrapper).atexit = False
            return
        self._captured[captured] = batch.plan
        if before is not None and before.made_for:
            self._plan(batch, before.made_for)  # nobody calls `attention` before a replay

    def _wrapper_for(self, captured: Captured | None) -> Any:
        """A wrapper that no live batch uses, since a wrapper holds one plan. All wrappers share one stream and
        workspace."""
        if captured is None and self._free:
            return self._free.pop()
        if self._workspace is None:  # zeroed: it holds counters that each kernel leaves at zero
            self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        if captured is None:
            return self._make(self._workspace)
        sizes = {"qo_indptr": captured.rows + 1, "paged_kv_indptr": captured.rows + 1}
        sizes |= {"paged_kv_indices": captured.pages, "paged_kv_last_page_len": captured.rows}
        arrays = {f"{k}_buf": torch.zeros(n, dtype=torch.int32, device=self._device) for k, n in sizes.items()}
        return self._make(self._workspace, use_cuda_graph=True, **arrays)

    def attention(
        self, q: Tensor, fresh: KV, cache: KV, batch: AttentionBatch, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention with one plan for all layers of a batch that have the same shape."""
        if batch.spans or sinks is not None or cache.keys.shape[3] != cache.values.shape[3]:
            return torch_variants.attention_sdpa(q, fresh, cache, batch, scale, sinks)
        plan = batch.plan
        assert plan is not None, "attention without prepare"
        wanted = _PlanKey(q.shape[1], cache.keys.shape[2], q.shape[2], q.dtype, scale)
        if plan.made_for != wanted:
            self._plan(batch, wanted)
        return plan.wrapper.run(q, cache)

    def _plan(self, batch: AttentionBatch, wanted: _PlanKey) -> None:
        """Plan a batch for layers like `wanted`. A wrapper copies its plans to the device through one host buffer,
        which may still hold the plan of the batch before. The wait is rare: at most two batches are in flight."""
        plan = batch.plan
        copied = self._copied.get(plan.wrapper)
        if copied is not None:
            copied.synchronize()
        plan.wrapper.plan(
            plan.rows,
            plan.pages,
            plan.indices,
            plan.last,
            wanted.heads,
            wanted.kv_heads,
            wanted.head_dim,
            batch.block_tokens,
            causal=True,
            sm_scale=wanted.scale,
            window_left=batch.window - 1 if batch.window else -1,
            q_data_type=wanted.dtype,
            kv_data_type=wanted.dtype,
        )
        plan.made_for = wanted
        if self._device.type == "cuda":
            copied = self._copied[plan.wrapper] = copied or torch.cuda.Event()
            copied.record()


def _wrapper(workspace: Tensor, **arrays: Any) -> Any:
    import flashinfer

    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2", **arrays)


_host = partial(torch.tensor, dtype=torch.int32)


def find_flashinfer(device: torch.device) -> tuple[FlashInfer | None, tuple[str, ...]]:
    """The backend for a CUDA device, or None and the reason in one line."""
    if importlib.util.find_spec("flashinfer") is None:
        return None, ("FlashInfer is not installed (the `cuda` extra); attention by torch, which gathers pages first",)
    return FlashInfer(device), ()
