"""Attention over the paged cache by FlashInfer (the `cuda` extra).

A batch is planned once for all layers of the same shape: its decodes in one plan, its chunks in another, because the
tile of queries follows the average request of a plan. One kernel per plan and layer computes them: FlashInfer's paged
prefill on tensor cores, for any number of query heads per KV head.
"""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hydrainfer.ops import reference, torch_variants
from hydrainfer.ops.alone import alone
from hydrainfer.ops.batch import KV, AttentionBatch, Captured
from hydrainfer.ops.build import cause, ninja_on_path
from hydrainfer.ops.cuda.flashinfer_modules import Kind, Module, PagedAttention, make_wrapper
from hydrainfer.ops.pinned import to_device

WORKSPACE_BYTES = 128 << 20
_LONGEST = 1 << 20
"""Tokens; a context that is split over the whole GPU, which takes the most workspace."""
_GROUPS = (1, 2, 4)
"""Query heads per KV head for which the kernel without tensor cores may be the faster one."""
_TOLERANCE = 0.02
_LONGEST_WINDOW = 4096  # of those that the check goes beyond
_MOST_ROWS = 128
"""Rows of a request that fill the largest tile of queries."""
_OTHERWISE = "attention by torch, which gathers pages first"

_host = partial(torch.tensor, dtype=torch.int32)


class _PlanKey(NamedTuple):
    """The properties of a layer that a plan depends on. Queries and cache have the same dtype."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    scale: float
    sinks: bool
    cap: float


@dataclass(eq=False)
class Part:
    """Some consecutive requests of a batch in FlashInfer's layout, either decodes or chunks: request i has rows
    `starts[i] .. starts[i+1]-1` of `rows` and pages `pages[i] .. pages[i+1]-1` of `indices`, the last of which holds
    `last[i]` tokens. `starts`, `pages` and `last` int32 on the host, `indices` int32 on the device. `ranges` [rows, 2]
    int32 on the device: the first and the last token of each row's picture, or -1; None if no picture is seen
    whole."""

    rows: slice
    decodes: bool
    starts: Tensor
    pages: Tensor
    last: Tensor
    indices: Tensor
    ranges: Tensor | None = None
    module: Module | None = None
    wrapper: Any = None


@dataclass(eq=False)
class PagedPlan:
    """A batch in parts. `made_for`: the layer properties that their wrappers were planned for; `taken`: all wrappers
    that the batch uses, with their modules."""

    parts: list[Part]
    made_for: _PlanKey | None = None
    taken: list[tuple[Module, Any]] = field(default_factory=list)


class FlashInfer:
    """`prepare` and `attention` with the references' signatures. `make` makes a wrapper for a module from a workspace
    on `device` and, for use in a CUDA graph, arrays of its own. `cuda_cores`: decodes of models with few query heads
    per KV head use FlashInfer's other decode kernel. What was not checked is attended by torch."""

    def __init__(
        self,
        device: torch.device,
        make: Callable[..., Any] = make_wrapper,
        *,
        cuda_cores: bool = False,
    ) -> None:
        self._device, self._make, self._cuda_cores = device, make, cuda_cores
        self._works: set[Module] = set()
        self._workspace: Tensor | None = None
        self._free: list[tuple[Module, Any]] = []
        self._captured: dict[Captured, PagedPlan] = {}
        self._copied: dict[Any, torch.cuda.Event] = {}  # by wrapper: recorded when its latest plan was copied

    def check(self, attentions: Sequence[PagedAttention]) -> None:
        """Load or compile the modules for these caches, attend with a small batch over each, and compare with the
        reference. Raises anything, `ValueError` if a result is wrong."""
        for attention in attentions:
            self._reserve(attention)
        for attention in attentions:
            self._works.add(attention.module())
            self._compare(attention, [])

    def check_ranges(self, attentions: Sequence[PagedAttention]) -> None:
        """`check` for pictures that are seen whole, which are attended from then on."""
        before = set(self._works)
        try:
            for attention in attentions:
                self._works.add(attention.module("ranges"))
                self._compare(attention, [(2, 18, 21), (3, 2, 9)])
        except Exception:
            self._works = before
            raise

    def prepare(self, batch: AttentionBatch) -> None:
        if batch.spans and all(module.kind != "ranges" for module in self._works):
            return torch_variants.prepare(batch)
        if not batch.counts:  # no row is sampled: nobody attends
            return
        captured = batch.captured
        before = self._captured.get(captured) if captured else None
        plan = batch.plan = PagedPlan(self._parts(batch))
        if captured is None:
            weakref.finalize(plan, self._free.extend, plan.taken).atexit = False
            return
        if before is not None:
            for part, other in zip(plan.parts, before.parts):
                part.module, part.wrapper = other.module, other.wrapper
            if before.made_for:
                self._plan(batch, before.made_for)  # nobody calls `attention` before a replay
        self._captured[captured] = plan

    def attention(
        self,
        q: Tensor,
        fresh: KV,
        cache: KV,
        batch: AttentionBatch,
        scale: float,
        sinks: Tensor | None = None,
        cap: float = 0.0,
    ) -> Tensor:
        """Attention with one plan for all layers of a batch that have the same shape."""
        plan, value_dim = batch.plan, cache.values.shape[3]
        heads, head_dim, kv_heads = q.shape[1], q.shape[2], cache.keys.shape[2]
        wanted = _PlanKey(heads, kv_heads, head_dim, value_dim, q.dtype, scale, sinks is not None, cap)
        if plan is None or plan.made_for != wanted:
            if not self._serves(batch, wanted):
                assert batch.captured is None, "torch's attention depends on the host, a graph would repeat it"
                return torch_variants.attention_sdpa(q, fresh, cache, batch, scale, sinks, cap)
            assert plan is not None, "attention without prepare"
            self._plan(batch, wanted)
        out = torch.empty((*q.shape[:2], value_dim), dtype=q.dtype, device=q.device)
        for part in plan.parts:
            mine, into = q[part.rows], out[part.rows]
            if part.ranges is not None:
                part.wrapper.run(mine, cache, part.ranges, batch.window - 1, batch.window, out=into)
            elif sinks is not None:
                part.wrapper.run(mine, cache, sinks, scale, out=into)
            else:
                part.wrapper.run(mine, cache, out=into)
        return out

    # ---- inside

    def _parts(self, batch: AttentionBatch) -> list[Part]:
        """The decodes, and the chunks."""
        lengths = np.add(batch.contexts, batch.counts)
        n_pages = -(-lengths // batch.block_tokens)
        places = [i * batch.tables.shape[1] + np.arange(n) for i, n in enumerate(n_pages)]
        indices = batch.tables.flatten()[to_device(np.concatenate(places), self._device)]
        last = (lengths - 1) % batch.block_tokens + 1
        rows, pages = [0, *accumulate(batch.counts)], [0, *accumulate(n_pages.tolist())]

        def part(first: int, stop: int) -> Part:
            return Part(
                rows=slice(rows[first], rows[stop]),
                decodes=stop <= batch.n_decodes,
                starts=_host(rows[first : stop + 1]) - rows[first],
                pages=_host(pages[first : stop + 1]) - pages[first],
                last=_host(last[first:stop].tolist()),
                indices=indices[pages[first] : pages[stop]],
                ranges=self._ranges_of(batch, rows[first]) if batch.spans and stop > batch.n_decodes else None,
            )

        bounds = [0, batch.n_decodes, len(batch.counts)]
        return [part(first, stop) for first, stop in pairwise(bounds) if first < stop]

    def _ranges_of(self, batch: AttentionBatch, first_row: int) -> Tensor:
        """`Part.ranges` of the rows from `first_row` on."""
        rows = [0, *accumulate(batch.counts)]
        found = np.full((rows[-1], 2), -1, dtype=np.int32)
        for request, first, stop in batch.spans:
            at = rows[request] - batch.contexts[request]
            found[at + first : at + stop] = first, stop - 1
        return to_device(found[first_row:], self._device)

    def _serves(self, batch: AttentionBatch, wanted: _PlanKey) -> bool:
        """Whether all modules are known to work that a batch needs for layers like `wanted`."""
        shape = wanted.dtype, wanted.head_dim, wanted.value_dim
        lacks = wanted.sinks or wanted.cap or Module("ranges", *shape, False) not in self._works
        if (batch.spans and lacks) or (wanted.sinks and wanted.cap):
            return False
        kind: Kind = "sinks" if wanted.sinks else "plain"
        return Module(kind, *shape, batch.window > 0, wanted.cap > 0) in self._works

    def _module(self, part: Part, batch: AttentionBatch, wanted: _PlanKey) -> Module:
        shape, windowed = (wanted.dtype, wanted.head_dim, wanted.value_dim), batch.window > 0
        if part.ranges is not None:
            return Module("ranges", *shape, False)
        if wanted.sinks:
            return Module("sinks", *shape, windowed)
        few = wanted.heads // wanted.kv_heads in _GROUPS and wanted.head_dim == wanted.value_dim
        kind: Kind = "cuda-cores" if self._cuda_cores and part.decodes and few else "plain"
        return Module(kind, *shape, windowed, wanted.cap > 0)

    def _plan(self, batch: AttentionBatch, wanted: _PlanKey) -> None:
        """Plan a batch for layers like `wanted`."""
        plan: PagedPlan = batch.plan
        for part in plan.parts:
            module = self._module(part, batch, wanted)
            if part.module != module:
                part.module, part.wrapper = module, self._wrapper_for(module, batch.captured)
                plan.taken.append((module, part.wrapper))
            self._plan_part(part, batch, wanted)
        plan.made_for = wanted

    def _plan_part(self, part: Part, batch: AttentionBatch, wanted: _PlanKey) -> None:
        """Plan one part. A wrapper copies its plans to the device through one host buffer, which may still hold the
        plan of the batch before. The wait is rare: at most two batches are in flight."""
        assert part.module is not None
        copied = self._copied.get(part.wrapper)
        if copied is not None:
            copied.synchronize()
        pages = part.pages, part.indices, part.last
        shape = wanted.heads, wanted.kv_heads, wanted.head_dim, batch.block_tokens
        options = {"sm_scale": wanted.scale, "q_data_type": wanted.dtype, "kv_data_type": wanted.dtype}
        if part.module.kind != "ranges":
            options["window_left"] = batch.window - 1
        if wanted.cap:
            options["logits_soft_cap"] = wanted.cap
        if part.module.kind == "cuda-cores":
            part.wrapper.plan(*pages, *shape, **options)
        else:
            options |= {"head_dim_vo": wanted.value_dim, "causal": part.module.kind != "ranges"}
            if batch.captured is not None:
                options["uniform_q_len"] = 1
            part.wrapper.plan(part.starts, *pages, *shape, **options)
        if self._device.type == "cuda":
            copied = self._copied[part.wrapper] = copied or torch.cuda.Event()
            copied.record()

    def _wrapper_for(self, module: Module, captured: Captured | None) -> Any:
        """A wrapper that no live batch uses, since a wrapper holds one plan. All wrappers share one stream and
        workspace."""
        if captured is None:
            for i, (other, wrapper) in enumerate(self._free):
                if other == module:
                    del self._free[i]
                    return wrapper
            return self._make(module, self._memory())
        sizes = {"qo_indptr": captured.rows + 1, "paged_kv_indptr": captured.rows + 1}
        sizes |= {"paged_kv_indices": captured.pages, "paged_kv_last_page_len": captured.rows}
        arrays = {f"{k}_buf": torch.zeros(n, dtype=torch.int32, device=self._device) for k, n in sizes.items()}
        return self._make(module, self._memory(), use_cuda_graph=True, **arrays)

    def _memory(self, n_bytes: int = WORKSPACE_BYTES) -> Tensor:
        """The workspace, of at least `n_bytes`. It is zeroed: kernels that count in it leave zeros behind."""
        if self._workspace is None or self._workspace.numel() < n_bytes:
            self._workspace = torch.zeros(n_bytes, dtype=torch.uint8, device=self._device)
        return self._workspace

    def _reserve(self, attention: PagedAttention) -> None:
        """Make the workspace large enough for the batch that needs most: one request with a tile of queries and a very
        long context. Call this before any batch, as wrappers keep the workspace."""
        module = attention.module()
        wrapper = self._make(module, self._memory())
        n_pages = _LONGEST // attention.block_tokens
        n_bytes, _ = wrapper.workspace_size(
            _host([0, _MOST_ROWS]),
            _host([0, n_pages]),
            torch.zeros(n_pages, dtype=torch.int32),
            _host([attention.block_tokens]),
            attention.heads,
            attention.kv_heads,
            attention.head_dim,
            attention.block_tokens,
            head_dim_vo=attention.value_dim,
            causal=True,
            window_left=attention.window - 1,
            q_data_type=attention.dtype,
            kv_data_type=attention.dtype,
        )
        self._memory(n_bytes)

    def _compare(self, attention: PagedAttention, spans: Sequence[tuple[int, int, int]]) -> None:
        """Attend with decodes and chunks of random numbers. Raises `ValueError` if the result is not the
        reference's."""
        a, size = attention, attention.block_tokens
        counts, contexts = [1, 1, 5, 9], [min(a.window, _LONGEST_WINDOW) + 40, 3, 17, 0]
        lengths = [context + count for context, count in zip(contexts, counts)]
        n_pages = [-(-length // size) for length in lengths]
        firsts = [0, *accumulate(n_pages)]
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(1))
        widths = size * a.kv_heads * a.head_dim, size * a.kv_heads * a.value_dim
        blocks = draw(firsts[-1], sum(widths)).to(a.dtype)
        q = draw(sum(counts), a.heads, a.head_dim).to(a.dtype)
        sinks = draw(a.heads) if a.sinks else None

        def attend(by: Callable[..., Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
            keys, values = blocks.to(device, dtype).split(widths, 1)
            cache = KV(*(x.unflatten(1, (size, a.kv_heads, -1)) for x in (keys, values)))
            longest = max(n_pages)
            tables = _host([[(first + i) % firsts[-1] for i in range(longest)] for first in firsts[:-1]]).to(device)
            on = [_host(x).to(device) for x in (lengths, [0] * sum(counts), [0, *accumulate(counts)])]
            batch = AttentionBatch(counts, contexts, 2, size, tables, on[0], on[1].long(), on[2], a.window, spans)
            if by == self.attention:
                self.prepare(batch)
            on_device = None if sinks is None else sinks.to(device)
            return by(q.to(device, dtype), cache, cache, batch, a.scale, on_device, a.cap).cpu().float()

        got = attend(self.attention, self._device, a.dtype)
        want = attend(reference.attention, torch.device("cpu"), torch.float32)
        error = float((got - want).norm() / want.norm())
        if not error <= _TOLERANCE:  # also if it is not a number
            raise ValueError(f"its result differs from the reference's by {error:.1%}")


def find_flashinfer(
    device: torch.device, attentions: Sequence[PagedAttention], make: Callable[..., Any] | None = None
) -> tuple[FlashInfer | None, tuple[str, ...]]:
    """The backend for a CUDA device, which has computed a batch of each of `attentions`, or None; and what does not
    work, one line each. Modules that are not built yet are compiled, which takes minutes."""
    refusal = next((why for a in attentions if (why := a.refusal())), "")
    if refusal or not attentions:
        return None, (f"{refusal}; {_OTHERWISE}",) if refusal else ()
    if make is None and importlib.util.find_spec("flashinfer") is None:
        return None, (f"FlashInfer is not installed (the `cuda` extra); {_OTHERWISE}",)
    with alone():  # modules are loaded
        return _checked(FlashInfer(device, make or make_wrapper), attentions)


def _checked(found: FlashInfer, attentions: Sequence[PagedAttention]) -> tuple[FlashInfer | None, tuple[str, ...]]:
    """The result of `find_flashinfer` for a FlashInfer that is installed."""
    ninja_on_path()  # FlashInfer calls it by its name
    try:
        found.check(attentions)
    except Exception as e:  # an import, a compiler, a driver or a kernel can fail in any way
        return None, (f"FlashInfer does not work here ({cause(e)}); {_OTHERWISE}",)
    try:
        found.check_ranges([each for each in attentions if each.whole and not each.sinks])
    except Exception as e:
        return found, (f"FlashInfer does not attend to whole pictures here ({cause(e)}); their prompts by torch",)
    return found, ()
