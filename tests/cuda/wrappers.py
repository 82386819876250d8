"""Doubles of FlashInfer's wrappers, which demand what the real ones do and compute their plans, on a CPU."""

from __future__ import annotations

import itertools

import torch

from hydrainfer.ops import reference
from hydrainfer.ops.cuda.flashinfer import FlashInfer
from hydrainfer.ops.cuda.flashinfer_modules import Module

CPU = torch.device("cpu")


class WrapperDouble:
    """FlashInfer's wrappers, as their source (0.7.2.post1) has them: what they take, and plain attention. A wrapper is
    made for a module; only that of `plain` and `cuda-cores` takes every shape."""

    def __init__(self, module: Module, workspace: torch.Tensor, use_cuda_graph: bool = False, **buffers) -> None:
        assert workspace.dtype == torch.uint8 and workspace.numel() >= 128 << 20
        assert use_cuda_graph == bool(buffers) and all(b.dtype == torch.int32 for b in buffers.values())
        if buffers:
            rows, pages, self.room, last = (
                len(buffers[f"{name}_buf"])
                for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
            )
            assert rows == pages == last + 1
        self.fixed = last if buffers else None
        assert workspace.device.type == "cuda" or not workspace[:: 1 << 20].any(), "it has to be zero"
        self.module, self.workspace, self.plans = module, workspace, 0

    def workspace_size(
        self, rows, pages, indices, last, heads, kv_heads, dim, page_size, *,
        head_dim_vo, causal, window_left, q_data_type, kv_data_type,
    ) -> tuple[int, int]:  # fmt: skip
        assert all(each.device == CPU and each.dtype == torch.int32 for each in (rows, pages, indices, last))
        assert len(indices) == int(pages[-1]) and causal and q_data_type == kv_data_type
        return heads * (1 << 20), 1 << 20

    def plan(self, *args, **options) -> None:
        kind = self.module.kind
        if kind == "cuda-cores":
            args = (torch.arange(len(args[0]), dtype=torch.int32), *args)
            options |= {"causal": True, "head_dim_vo": args[6]}
            assert args[4] // args[5] in (1, 2, 4)
        if kind == "ranges":
            assert "window_left" not in options, "refused"
            options["window_left"] = -1
        self._plan(*args, **options)

    def _plan(
        self, rows, pages, indices, last, heads, kv_heads, dim, page_size, *,
        causal, sm_scale, window_left, q_data_type, kv_data_type, head_dim_vo, uniform_q_len=None, logits_soft_cap=None,
    ) -> None:  # fmt: skip
        for each in (rows, pages, last):
            assert each.device == CPU and each.dtype == torch.int32, "else the plan waits for the device"
        n = len(last)
        assert len(rows) == len(pages) == n + 1 and rows[0] == pages[0] == 0
        assert (rows.diff() > 0).all() and (pages.diff() > 0).all()
        assert indices.dtype == torch.int32 and indices.shape == (int(pages[-1]),)
        assert ((last >= 1) & (last <= page_size)).all()
        assert self.fixed is None or (n == self.fixed and len(indices) <= self.room), "not what was captured"
        assert uniform_q_len is None or (rows.diff() == uniform_q_len).all()
        assert heads % kv_heads == 0 and (dim, head_dim_vo) in ((64, 64), (128, 128), (192, 128), (256, 256))
        kind, dtype, *made_for, windowed, capped = self.module
        assert q_data_type == kv_data_type == dtype and dtype in (torch.bfloat16, torch.float16)
        assert [dim, head_dim_vo] == made_for and causal == (kind != "ranges")
        assert windowed == (window_left >= 0) and window_left >= -1
        assert capped == bool(logits_soft_cap) and (not capped or kind in ("plain", "cuda-cores"))
        self.rows, self.pages, self.indices, self.last = rows.tolist(), pages.tolist(), indices, last.tolist()
        self.shape, self.page_size, self.dtype = (heads, kv_heads, dim, head_dim_vo), page_size, q_data_type
        self.scale, self.window_left, self.cap = sm_scale, window_left, logits_soft_cap or 0.0
        self.plans += 1

    def run(self, q, cache, *more, out):
        heads, kv_heads, dim, value_dim = self.shape
        assert isinstance(cache, tuple)
        keys, values = cache
        assert q.shape == (self.rows[-1], heads, dim) and q.dtype == keys.dtype == self.dtype and q.stride(-1) == 1
        assert out.shape == (*q.shape[:2], value_dim) and out.dtype == q.dtype and out.is_contiguous()
        for part, width in ((keys, dim), (values, value_dim)):
            assert part.shape[1:] == (self.page_size, kv_heads, width)
            assert part.stride()[1:] == (kv_heads * width, width, 1)
        sinks, ranges, window, range_window = None, None, self.window_left, 0
        if self.module.kind == "sinks":
            sinks, scale = more
            assert sinks.shape == (heads,) and sinks.dtype == torch.float32 and scale == self.scale
        elif self.module.kind == "ranges":
            ranges, window, range_window = more
            assert ranges.shape == (len(q), 2) and ranges.dtype == torch.int32 and ranges.is_contiguous()
        else:
            assert not more
        if q.device.type == "cuda":
            return out
        assert ((self.indices >= 0) & (self.indices < keys.shape[0])).all()
        for i, last in enumerate(self.last):
            found = self.indices[self.pages[i] : self.pages[i + 1]].long()
            n = (len(found) - 1) * self.page_size + last
            mine = slice(self.rows[i], self.rows[i + 1])
            k, v = (x[found].flatten(0, 1)[:n].float().repeat_interleave(heads // kv_heads, 1) for x in (keys, values))
            scores = reference.capped(torch.einsum("qhd,khd->hqk", q[mine].float(), k) * self.scale, self.cap)
            row, column = torch.arange(mine.stop - mine.start)[:, None] + n - (mine.stop - mine.start), torch.arange(n)
            seen = column <= row
            if window >= 0:
                seen &= row - column <= window
            if ranges is not None:
                of_picture = (column >= ranges[mine, :1]) & (column <= ranges[mine, 1:])
                if range_window > 0:
                    of_picture &= row - column < range_window
                seen |= of_picture
            scores.masked_fill_(~seen, float("-inf"))
            weights = reference.softmax(scores, None if sinks is None else sinks[:, None, None])
            out[mine] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
        return out


class Backend(FlashInfer):
    """A backend that has checked everything; with `ranges` also pictures that are seen whole."""

    def __init__(self, device: torch.device, *, ranges: bool = False, **options) -> None:
        self.made: list[WrapperDouble] = []
        super().__init__(device, self._double, **options)
        kinds = ("plain", "sinks", "ranges") if ranges else ("plain", "sinks")
        dtypes, heads = (torch.bfloat16, torch.float16), ((64, 64), (128, 128), (192, 128), (256, 256))
        every = itertools.product(kinds, dtypes, heads, (False, True), (False, True))
        self._works = {Module(kind, dtype, *dims, *traits) for kind, dtype, dims, *traits in every}

    def _double(self, module: Module, workspace: torch.Tensor, **options) -> WrapperDouble:
        self.made.append(WrapperDouble(module, workspace, **options))
        return self.made[-1]

    @property
    def kinds(self) -> list[str]:
        return [wrapper.module.kind for wrapper in self.made]
