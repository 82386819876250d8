"""The FlashInfer backend with a wrapper that demands what the real one does and computes its plan, on a CPU."""

from __future__ import annotations

import gc

import pytest
import torch

from hydrainfer.ops import KV, AttentionBatch, Captured, reference, select
from hydrainfer.ops.flashinfer import FlashInfer
from tests.cuda.fake import CUDA, fake_cuda
from tests.ops.test_variants import BATCHES, close, paged, random

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")


class WrapperDouble:
    """`BatchPrefillWithPagedKVCacheWrapper`, as its source (0.7.2) has it: what it takes, and plain attention."""

    def __init__(self, workspace: torch.Tensor, use_cuda_graph: bool = False, **buffers: torch.Tensor) -> None:
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
        self.plans, self.planned = 0, False

    def plan(
        self, rows, pages, indices, last, heads, kv_heads, dim, page_size, *,
        causal, sm_scale, window_left, q_data_type, kv_data_type,
    ) -> None:  # fmt: skip
        for each in (rows, pages, last):
            assert each.device == CPU and each.dtype == torch.int32, "else the plan waits for the device"
        n = len(last)
        assert len(rows) == len(pages) == n + 1 and rows[0] == pages[0] == 0
        assert (rows.diff() > 0).all() and (pages.diff() > 0).all()
        assert indices.dtype == torch.int32 and indices.shape == (int(pages[-1]),)
        assert ((last >= 1) & (last <= page_size)).all()
        assert self.fixed is None or (n == self.fixed and len(indices) <= self.room), "not what was captured"
        assert heads % kv_heads == 0 and dim in (64, 128, 256)
        assert q_data_type == kv_data_type and q_data_type in (torch.bfloat16, torch.float16)
        assert causal and (window_left >= 0 or window_left == -1)
        self.rows, self.pages, self.indices, self.last = rows.tolist(), pages.tolist(), indices, last.tolist()
        self.shape, self.page_size, self.dtype = (heads, kv_heads, dim), page_size, q_data_type
        self.scale, self.window_left = sm_scale, window_left
        self.plans += 1

    def run(self, q, cache):
        heads, kv_heads, dim = self.shape
        assert isinstance(cache, tuple)
        keys, values = cache
        assert q.shape == (self.rows[-1], heads, dim) and q.dtype == keys.dtype == self.dtype and q.stride(-1) == 1
        assert keys.shape[1:] == values.shape[1:] == (self.page_size, kv_heads, dim)
        assert keys.stride() == values.stride() and keys.stride()[1:] == (kv_heads * dim, dim, 1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if q.device.type == "cuda":
            return out
        assert ((self.indices >= 0) & (self.indices < keys.shape[0])).all()
        for i, last in enumerate(self.last):
            found = self.indices[self.pages[i] : self.pages[i + 1]].long()
            n = (len(found) - 1) * self.page_size + last
            mine = slice(self.rows[i], self.rows[i + 1])
            k, v = (x[found].flatten(0, 1)[:n].float().repeat_interleave(heads // kv_heads, 1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q[mine].float(), k) * self.scale
            row, column = torch.arange(mine.stop - mine.start)[:, None] + n - (mine.stop - mine.start), torch.arange(n)
            seen = column <= row
            if self.window_left >= 0:
                seen &= column >= row - self.window_left
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[mine] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
        return out


class Backend(FlashInfer):
    def __init__(self, device: torch.device) -> None:
        self.made: list[WrapperDouble] = []
        super().__init__(device, self._double)

    def _double(self, workspace: torch.Tensor, **options) -> WrapperDouble:
        self.made.append(WrapperDouble(workspace, **options))
        return self.made[-1]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (28, 4), (5, 1)])
@pytest.mark.parametrize("shape", BATCHES)
def test_attention_is_the_references(heads, kv_heads, shape):
    counts, contexts, *seen = BATCHES[shape]
    dtype, dim, backend = torch.bfloat16, 64, Backend(CPU)
    cache, batch = paged(counts, contexts, kv_heads, dim, dtype, *seen)
    qkv = random(sum(counts), heads + 2 * kv_heads, dim, dtype=dtype, seed=7)
    q, *kv = qkv.split([heads, kv_heads, kv_heads], 1)
    kv = KV(*kv)
    reference.write_kv(cache, kv, batch)
    backend.prepare(batch)
    for _ in range(3):  # layers
        got = backend.attention(q, kv, cache, batch, dim**-0.5)
    close(got, reference.attention(q, kv, cache, batch, dim**-0.5))
    assert [w.plans for w in backend.made] == ([] if batch.spans else [1]), "once for all layers"


def test_a_step_that_samples_nothing_plans_nothing():
    """A chunk in the middle of a prompt by itself: no row of it is wanted from the last layer."""
    backend = Backend(CPU)
    backend.prepare(paged([], [], 2, 64, torch.bfloat16)[1])
    assert not backend.made


def test_living_batches_have_wrappers_of_their_own():
    """All rows and the last ones of a step are two plans; the next step takes the wrappers again."""
    backend = Backend(CPU)
    for _ in range(3):
        step = [paged([1, 1], [3, 9], 2, 64, torch.bfloat16)[1] for _ in range(2)]
        for batch in step:
            backend.prepare(batch)
        assert step[0].plan.wrapper is not step[1].plan.wrapper
        del batch
        step.clear()
        gc.collect()
    assert len(backend.made) == 2


def test_a_captured_batch_is_planned_before_each_replay():
    """Only the first step calls `attention`; the graph that it is captured in has the wrapper's arrays."""
    backend, dtype, dim = Backend(CPU), torch.bfloat16, 64
    for step, contexts in enumerate(([3, 9], [4, 10], [80, 16])):
        cache, batch = paged([1, 1], contexts, 2, dim, dtype)
        batch.captured = Captured("kv", 2, 64)
        qkv = random(2, 8, dim, dtype=dtype, seed=step)
        q, *kv = qkv.split([4, 2, 2], 1)
        kv = KV(*kv)
        reference.write_kv(cache, kv, batch)
        backend.prepare(batch)
        if not step:
            backend.attention(q, kv, cache, batch, dim**-0.5)
        (wrapper,) = backend.made
        assert wrapper.plans == step + 1
        close(wrapper.run(q, cache), reference.attention(q, kv, cache, batch, dim**-0.5))


def test_a_plan_waits_until_the_one_before_has_left_the_host(monkeypatch):
    """Both pass through the wrapper's one piece of pinned memory; the batch before is not computed yet."""
    notes: list[str] = []

    class Event:
        def record(self) -> None:
            notes.append("record")

        def synchronize(self) -> None:
            notes.append("wait")

    def plan(self, *args, **options) -> None:
        notes.append("plan")
        _shapes_only(self, *args, **options)

    monkeypatch.setattr(WrapperDouble, "plan", plan)
    with fake_cuda(monkeypatch):
        monkeypatch.setattr(torch.cuda, "Event", Event)
        backend = Backend(CUDA)
        q, cache, batches = step_on_cuda()
        for batch in batches:
            backend.prepare(batch)
            backend.attention(q, None, cache, batch, 0.1)
            batch.plan = None
    assert len(backend.made) == 1 and notes == ["plan", "record", "wait", "plan", "record"]


def step_on_cuda() -> tuple[torch.Tensor, KV, list[AttentionBatch]]:
    """Queries, a cache and two batches of the same shape."""
    tables, ids = (torch.zeros(n, dtype=torch.int32, device=CUDA) for n in ((3, 5), (7,)))
    batches = [AttentionBatch([1, 1, 5], [40, 3, 17], 2, 16, tables, ids[:3], ids.long(), ids[:4]) for _ in range(2)]
    kept, q = (torch.zeros(n, dtype=torch.bfloat16, device=CUDA) for n in ((9, 2, 16, 4, 128), (7, 28, 128)))
    return q, KV(kept[:, 0], kept[:, 1]), batches


def test_what_it_is_chosen_for(monkeypatch):
    monkeypatch.setattr(select, "cuda_kernels", lambda: (None, ("no kernels",)))
    monkeypatch.setattr(select, "find_flashinfer", lambda device: (Backend(device), ()))
    was = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        for dtype, dim, wanted in [
            (torch.bfloat16, 128, "flashinfer"),
            (torch.float16, 64, "flashinfer"),
            (torch.float32, 128, "torch-sdpa"),
            (torch.bfloat16, 80, "torch-sdpa"),
        ]:
            ops = select.select_ops(CUDA, dtype, dim)
            assert dict(ops.chosen)["attention"] == dict(ops.chosen)["prepare"] == wanted
        assert dict(select.select_ops(CUDA, torch.bfloat16, 128, use_native=False).chosen)["attention"] == "torch-sdpa"
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)


def test_a_step_plans_without_a_wait(monkeypatch):
    with fake_cuda(monkeypatch) as recorder:
        backend = Backend(CUDA)
        q, cache, (batch, _) = step_on_cuda()
        backend._workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=CUDA)
        recorder.waits.clear()
        monkeypatch.setattr(WrapperDouble, "plan", _shapes_only)
        backend.prepare(batch)
        assert backend.attention(q, None, cache, batch, 0.1).shape == q.shape
        assert not recorder.waits


def _shapes_only(self, rows, pages, indices, last, heads, kv_heads, dim, page_size, **options) -> None:
    """`plan` for tensors that hold nothing."""
    assert rows.device == pages.device == last.device == CPU and indices.device == CUDA
    self.rows, self.shape, self.page_size, self.dtype = [7], (heads, kv_heads, dim), page_size, options["q_data_type"]
