"""The FlashInfer backend with doubles of its wrappers: attention, plans, and what happens where it does not work."""

from __future__ import annotations

import gc
import inspect
import re
import sys
from contextlib import nullcontext

import pytest
import torch

from hydrainfer.core import Role
from hydrainfer.families import read_config
from hydrainfer.models import attentions_of
from hydrainfer.ops import KV, AttentionBatch, Captured, PagedAttention, reference, select
from hydrainfer.ops.cuda.flashinfer import find_flashinfer
from hydrainfer.ops.cuda.flashinfer_modules import Module, modules_for
from tests.checkpoints import make_llava
from tests.cuda.fake import CUDA, fake_cuda
from tests.cuda.wrappers import CPU, Backend, WrapperDouble
from tests.ops.test_variants import BATCHES, close, paged, random
from tests.runtime.harness import Rig
from tests.runtime.test_graphs import outputs

pytestmark = pytest.mark.cpu

BF16 = torch.bfloat16


def attended(backend: Backend, counts, contexts, heads, kv_heads, *seen, dim=64, value_dim=0, sinks=None, cap=0.0):
    """What the backend and the reference compute in the last of three layers."""
    cache, batch = paged(counts, contexts, kv_heads, dim, BF16, *seen, value_dim=value_dim)
    qk = random(sum(counts), heads + kv_heads, dim, dtype=BF16, seed=7)
    q, keys = qk.split([heads, kv_heads], 1)
    kv = KV(keys, random(sum(counts), kv_heads, value_dim or dim, dtype=BF16, seed=8))
    reference.write_kv(cache, kv, batch)
    backend.prepare(batch)
    for _ in range(3):  # layers
        got = backend.attention(q, kv, cache, batch, dim**-0.5, sinks, cap)
    return got, reference.attention(q, kv, cache, batch, dim**-0.5, sinks, cap)


@pytest.mark.parametrize("ranges", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (28, 4), (5, 1)])
@pytest.mark.parametrize("shape", BATCHES)
def test_attention_is_the_references(heads, kv_heads, shape, ranges):
    counts, contexts, *seen = BATCHES[shape]
    backend = Backend(CPU, ranges=ranges)
    close(*attended(backend, counts, contexts, heads, kv_heads, *seen))
    n_decodes, whole = sum(n == 1 for n in counts), len(seen) == 2
    wanted = ["plain"] * (n_decodes > 0) + ["ranges" if whole else "plain"] * (n_decodes < len(counts))
    assert backend.kinds == ([] if whole and not ranges else wanted), "decodes and chunks apart"
    assert all(w.plans == 1 for w in backend.made), "once for all layers"


@pytest.mark.parametrize("cuda_cores", [False, True])
@pytest.mark.parametrize("shape", ["window", "mixed"])
def test_attention_with_a_cap_is_the_references(shape, cuda_cores):
    counts, contexts, *seen = BATCHES[shape]
    backend = Backend(CPU, cuda_cores=cuda_cores)
    close(*attended(backend, counts, contexts, 4, 2, *seen, cap=0.5))
    assert all(w.module.capped and w.plans == 1 for w in backend.made) and backend.made


@pytest.mark.parametrize("more", [{"whole": True}, {"sinks": True}])
def test_a_cap_beside_what_flashinfer_has_in_other_modules_is_attended_by_torch(more):
    attention = PagedAttention("kv", BF16, 4, 2, 64, 64, 0.125, cap=50.0, **more)
    found, (note,) = find_flashinfer(CPU, [attention], WrapperDouble)
    assert found is None and "caps no scores" in note
    counts, contexts, *seen = BATCHES["pictures" if "whole" in more else "window"]
    backend, sinks = Backend(CPU, ranges=True), random(4, dtype=torch.float32) if "sinks" in more else None
    close(*attended(backend, counts, contexts, 4, 2, *seen, sinks=sinks, cap=0.5))
    assert not backend.made


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (192, 128)])
def test_attention_with_sinks_is_the_references(dim, value_dim, window):
    counts, contexts, *_ = BATCHES["mixed"]
    backend, sinks = Backend(CPU), random(8, dtype=torch.float32) * 3
    close(*attended(backend, counts, contexts, 8, 2, window, dim=dim, value_dim=value_dim, sinks=sinks))
    assert backend.kinds == ["sinks", "sinks"]


def test_values_may_be_narrower_than_keys():
    backend = Backend(CPU)
    close(*attended(backend, *BATCHES["mixed"], 8, 2, dim=192, value_dim=128))
    assert backend.kinds == ["plain", "plain"]


def test_attention_that_was_not_checked_is_computed_by_torch():
    """Its module may be missing, and a request would fail."""
    backend = Backend(CPU)
    backend._works = {Module("plain", BF16, 64, 64, False)}
    for seen, options in [((), {"sinks": torch.zeros(4)}), ((5,), {}), ((), {"dim": 128}), ((0, [(2, 1, 5)]), {})]:
        close(*attended(backend, *BATCHES["mixed"], 4, 2, *seen, **options))
        assert not backend.made
    close(*attended(backend, *BATCHES["mixed"], 4, 2))
    assert backend.kinds == ["plain", "plain"]
    cache, batch = paged([1, 1], [3, 9], 2, 128, BF16)
    batch.captured = Captured("kv", 2, 64)
    backend.prepare(batch)
    with pytest.raises(AssertionError, match="graph"):
        backend.attention(random(2, 4, 128, dtype=BF16), None, cache, batch, 0.1)


@pytest.mark.parametrize(("heads", "kv_heads", "kind"), [(4, 4, "cuda-cores"), (8, 2, "cuda-cores"), (14, 2, "plain")])
def test_decodes_of_small_groups_without_tensor_cores(heads, kv_heads, kind):
    backend = Backend(CPU, cuda_cores=True)
    close(*attended(backend, *BATCHES["mixed"], heads, kv_heads))
    assert backend.kinds == [kind, "plain"]
    close(*attended(backend, *BATCHES["decodes"], heads, kv_heads, 7))
    close(*attended(backend, *BATCHES["decodes"], heads, kv_heads, sinks=torch.zeros(heads)))
    assert backend.kinds[2:] == [kind, "sinks"]


def test_a_step_that_samples_nothing_plans_nothing():
    """A chunk in the middle of a prompt by itself: no row of it is wanted from the last layer."""
    backend = Backend(CPU)
    backend.prepare(paged([], [], 2, 64, BF16)[1])
    assert not backend.made


def test_living_batches_have_wrappers_of_their_own():
    """All rows and the last ones of a step are two plans; the next step takes the wrappers again."""
    backend = Backend(CPU)
    for _ in range(3):
        step = [paged([1, 1], [3, 9], 2, 64, BF16) for _ in range(2)]
        for cache, batch in step:
            backend.prepare(batch)
            backend.attention(random(2, 4, 64, dtype=BF16), None, cache, batch, 0.125)
        assert step[0][1].plan.parts[0].wrapper is not step[1][1].plan.parts[0].wrapper
        del batch
        step.clear()
        gc.collect()
    assert len(backend.made) == 2


@pytest.mark.parametrize("cuda_cores", [False, True])
def test_a_captured_batch_is_planned_before_each_replay(cuda_cores):
    """Only the first step calls `attention`; the graph that it is captured in has the wrapper's arrays."""
    backend, dim = Backend(CPU, cuda_cores=cuda_cores), 64
    for step, contexts in enumerate(([3, 9], [4, 10], [80, 16])):
        cache, batch = paged([1, 1], contexts, 2, dim, BF16)
        batch.captured = Captured("kv", 2, 64)
        qkv = random(2, 8, dim, dtype=BF16, seed=step)
        q, *kv = qkv.split([4, 2, 2], 1)
        kv = KV(*kv)
        reference.write_kv(cache, kv, batch)
        backend.prepare(batch)
        if not step:
            backend.attention(q, kv, cache, batch, dim**-0.5)
        (wrapper,) = backend.made
        assert wrapper.plans == step + 1 and wrapper.module.kind == ("cuda-cores" if cuda_cores else "plain")
        got = wrapper.run(q, cache, out=torch.empty(2, 4, dim, dtype=BF16))
        close(got, reference.attention(q, kv, cache, batch, dim**-0.5))


def test_a_captured_batch_that_could_not_be_planned_does_not_stop_the_planning(monkeypatch):
    """The next replay would attend by a plan of other requests, which nobody would notice."""
    backend, fails = Backend(CPU), [False, True, False]
    planned = WrapperDouble.plan

    def plan(self, *args, **options) -> None:
        if fails.pop(0):
            raise torch.OutOfMemoryError
        planned(self, *args, **options)

    monkeypatch.setattr(WrapperDouble, "plan", plan)
    for i in range(3):
        cache, batch = paged([1, 1], [3 + i, 9], 2, 64, BF16)
        batch.captured = Captured("kv", 2, 64)
        with pytest.raises(torch.OutOfMemoryError) if fails[0] else nullcontext():
            backend.prepare(batch)
            if i == 0:
                backend.attention(random(2, 4, 64, dtype=BF16), None, cache, batch, 0.125)
    (wrapper,) = backend.made
    assert wrapper.last == [(3 + 2) % batch.block_tokens + 1, 9 % batch.block_tokens + 1], "those of the last batch"


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
    assert len(backend.made) == 2 and notes == ["plan", "record"] * 2 + ["wait", "plan", "record"] * 2


def step_on_cuda() -> tuple[torch.Tensor, KV, list[AttentionBatch]]:
    """Queries, a cache and two batches of the same shape."""
    tables, ids = (torch.zeros(n, dtype=torch.int32, device=CUDA) for n in ((3, 5), (7,)))
    batches = [AttentionBatch([1, 1, 5], [40, 3, 17], 2, 16, tables, ids[:3], ids.long(), ids[:4]) for _ in range(2)]
    kept, q = (torch.zeros(n, dtype=BF16, device=CUDA) for n in ((9, 2, 16, 4, 128), (7, 28, 128)))
    return q, KV(kept[:, 0], kept[:, 1]), batches


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
    n = 2 if len(last) == 2 else 5  # decodes, or the chunk
    self.rows, self.shape, self.page_size = [n], (heads, kv_heads, dim, dim), page_size
    self.dtype, self.window_left = options["q_data_type"], -1


# ---- works, or is left out


@pytest.fixture
def cuda_select(monkeypatch):
    """`select_ops` for CUDA, whose functions compute on a CPU. `make`: makes FlashInfer's wrappers."""
    monkeypatch.setattr(select, "cuda_kernels", lambda: (None, ()))
    was = torch.backends.cuda.cudnn_sdp_enabled()

    def get(dtype: torch.dtype, dim: int, make=WrapperDouble, **options):
        monkeypatch.setattr(select, "find_flashinfer", lambda _, wanted: find_flashinfer(CPU, wanted, make))
        return select.select_ops(CUDA, dtype, dim, **options)

    yield get
    torch.backends.cuda.enable_cudnn_sdp(was)


def test_what_it_is_chosen_for(cuda_select):
    for dtype, dim, wanted in [
        (torch.bfloat16, 128, "flashinfer"),
        (torch.float16, 64, "flashinfer"),
        (torch.float32, 128, "torch-sdpa"),
        (torch.bfloat16, 80, "torch-sdpa"),
    ]:
        ops = cuda_select(dtype, dim)
        assert dict(ops.chosen)["attention"] == dict(ops.chosen)["prepare"] == wanted
        assert len(ops.notes) == (wanted != "flashinfer"), "a note says why not"
    assert dict(cuda_select(BF16, 128, use_native=False).chosen)["attention"] == "torch-sdpa"
    encoder = cuda_select(BF16, 128, attentions=[])
    assert dict(encoder.chosen)["attention"] == "torch-sdpa" and not encoder.notes, "nothing to attend, nothing said"


class Breaks(WrapperDouble):
    """A FlashInfer that is there but does not work. `at`: where."""

    at = ""

    def __init__(self, *args, **options) -> None:
        if self.at == "build":
            raise RuntimeError("Ninja build failed. Ninja output:\nninja: error: cannot find -lcuda")
        super().__init__(*args, **options)

    def plan(self, *args, **options) -> None:
        if self.at == "ninja":
            raise FileNotFoundError(2, "No such file or directory", "ninja")
        super().plan(*args, **options)

    def run(self, q, cache, *more, out):
        if self.at == "run":
            raise torch.AcceleratorError("CUDA error: no kernel image is available")
        super().run(q, cache, *more, out=out)
        if self.at == "result":
            out[-1] += 1.0
        if self.at == "NaN":
            out[0, 0, 0] = float("nan")


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("llava64"), 0, heads=4, kv_heads=2, head_dim=64)


@pytest.fixture(scope="module")
def by_torch(llava):
    """The tokens without FlashInfer."""
    was = torch.backends.cuda.cudnn_sdp_enabled()
    rig = Rig(llava, "bfloat16", ops=select.select_ops(CUDA, BF16, 64, use_native=False))
    yield outputs(rig)
    rig.close()
    torch.backends.cuda.enable_cudnn_sdp(was)


@pytest.mark.parametrize("at", ["", "import", "build", "ninja", "run", "result", "NaN"])
def test_a_flashinfer_that_does_not_work_is_left_out_before_anything_is_served(
    llava, by_torch, cuda_select, tmp_path, at, monkeypatch
):
    make = type("Broken", (Breaks,), {"at": at})
    if at == "import":
        (tmp_path / "flashinfer.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
        monkeypatch.syspath_prepend(tmp_path)
        for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
            monkeypatch.delitem(sys.modules, name)
        make = None
    wanted = attentions_of(read_config(llava), Role.parse("EPD"), BF16, 4)
    ops = cuda_select(BF16, 64, make, attentions=wanted)
    assert ops.captures == (not at) == (dict(ops.chosen)["attention"] == "flashinfer")
    assert len(ops.notes) == bool(at)
    assert all("FlashInfer does not work here" in note and "\n" not in note for note in ops.notes)
    rig = Rig(llava, "bfloat16", ops=ops)
    try:
        found, n = outputs(rig), None if at else 1  # from the second token on, FlashInfer's rounding may tell
        assert [tokens[:n] for tokens in found] == [tokens[:n] for tokens in by_torch]
    finally:
        rig.close()


def test_every_cache_is_checked():
    """Full attention works; that of the window is wrong."""

    class Wrong(WrapperDouble):
        def run(self, q, cache, *more, out):
            super().run(q, cache, *more, out=out)
            if self.module.windowed:
                out.zero_()

    both = [PagedAttention(f"kv{w}", BF16, 8, 2, 64, 64, 0.125, window=w) for w in (0, 32)]
    assert find_flashinfer(CPU, both[:1], WrapperDouble)[0] is not None
    found, (note,) = find_flashinfer(CPU, both, Wrong)
    assert found is None and "100.0%" in note


def test_pictures_seen_whole_fall_back_by_themselves():
    """The module for ranges is another one; prompts without such pictures do not need it."""

    class NoRanges(WrapperDouble):
        def __init__(self, module, *args, **options) -> None:
            assert module.kind != "ranges", "does not compile"
            super().__init__(module, *args, **options)

    gemma = [PagedAttention(f"kv{w}", BF16, 8, 4, 256, 256, 1 / 16, window=w, whole=True) for w in (0, 1024)]
    counts, contexts, *seen = BATCHES["pictures in a window"]
    for make, n in ((WrapperDouble, 0), (NoRanges, 1)):
        found, notes = find_flashinfer(CPU, gemma, make)
        assert len(notes) == n and all("whole pictures" in note for note in notes)
        close(*attended(found, counts, contexts, 8, 4, *seen, dim=256))
        assert bool(found._free) and any(m.kind == "ranges" for m, _ in found._free) == (not n)


def test_a_mask_that_is_off_by_one_is_found():
    """The window is passed as FlashInfer counts: `window_left` tokens besides the row's own; ranges as it does."""

    class Shifted(WrapperDouble):
        def run(self, q, cache, *more, out):
            if self.module.kind == "ranges":
                ranges, window, range_window = more
                more = ranges, window, range_window - 1
            elif self.window_left >= 0:
                self.window_left -= 1
            super().run(q, cache, *more, out=out)

    one = PagedAttention("kv", BF16, 4, 4, 64, 64, 0.125, window=2)
    assert find_flashinfer(CPU, [one], Shifted)[0] is None
    assert len(find_flashinfer(CPU, [one._replace(whole=True, window=0)], WrapperDouble)[1]) == 0


def test_the_workspace_is_as_large_as_the_widest_plan():
    class Wide(WrapperDouble):
        def __init__(self, module, workspace, **options) -> None:
            sizes.append(workspace.numel())
            super().__init__(module, workspace, **options)

    sizes: list[int] = []
    wide = PagedAttention("kv", BF16, 256, 8, 64, 64, 0.125)
    assert find_flashinfer(CPU, [wide], Wide)[0] is not None
    assert sizes[0] == 128 << 20 and set(sizes[1:]) == {256 << 20}


@pytest.mark.parametrize("options", [{}, {"cuda_cores": True}, {"ranges": True}], ids=str)
def test_calls_are_those_that_flashinfer_takes(monkeypatch, options):
    """With FlashInfer itself, where it is installed."""
    real = pytest.importorskip("flashinfer")
    of_kind = {
        "plain": real.BatchPrefillWithPagedKVCacheWrapper,
        "sinks": real.BatchPrefillWithPagedKVCacheWrapper,
        "ranges": real.BatchPrefillWithCausalBidirectionalRangesWrapper,
        "cuda-cores": real.BatchDecodeWithPagedKVCacheWrapper,
    }

    def bound(name: str):
        called = getattr(WrapperDouble, name)

        def call(self, *args, **kwargs):
            inspect.signature(getattr(of_kind[self.module.kind], name)).bind(self, *args, **kwargs)
            return called(self, *args, **kwargs)

        return call

    for name in ("plan", "run", "workspace_size"):
        monkeypatch.setattr(WrapperDouble, name, bound(name))
    backend = Backend(CPU, cuda_cores="cuda_cores" in options)
    backend.check([PagedAttention("kv", BF16, 8, 4, 64, 64, 0.125, window=window) for window in (0, 32)])
    backend.check([PagedAttention("kv", BF16, 8, 4, 64, 64, 0.125, sinks=True)])
    backend.check([PagedAttention("kv", BF16, 8, 4, 64, 64, 0.125, cap=30.0)])
    if "ranges" in options:
        backend.check_ranges([PagedAttention("kv", BF16, 8, 4, 64, 64, 0.125, whole=True)])
    assert set(backend.kinds) == {"plain", "sinks"} | {name.replace("_", "-") for name in options}


def test_modules_are_named_by_all_that_they_are_compiled_for(monkeypatch, tmp_path):
    """With FlashInfer itself, where it is installed."""
    pytest.importorskip("flashinfer")
    from flashinfer.jit import env

    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setattr(env, "FLASHINFER_GEN_SRC_DIR", tmp_path)
    wanted = [
        Module(kind, dtype, dim, dim, windowed and kind != "ranges", capped and kind in ("plain", "cuda-cores"))
        for kind in ("plain", "sinks", "ranges", "cuda-cores")
        for dtype in (torch.bfloat16, torch.float16)
        for dim in (64, 128, 256)
        for windowed in (False, True)
        for capped in (False, True)
    ]
    names = [spec.name for spec in modules_for(wanted)]
    assert len(set(names)) == len(set(wanted)) == len(names)
    plain = next(name for name in names if "head_dim_qk_128" in name)
    assert re.search(r"bf16.*use_swa_False.*kv_stride_equal$", plain)
    narrow = modules_for([Module("plain", BF16, 192, 128, False)])
    assert [spec.name.rpartition("f16qk_False")[2] for spec in narrow] == [
        "_kv_stride_equal",
        "_paged_kv_stride_independent",
    ]
