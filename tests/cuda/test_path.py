"""Encode, prefill, decode and sampling of 7B models on fake `cuda:0` tensors: no tensor is on the wrong device, no
shape is wrong, and nothing waits for the device before the tokens are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from hydrainfer.cache import CacheSet
from hydrainfer.core import (
    EncodeWork,
    ExportHandle,
    LiveSequence,
    MediaSpan,
    Request,
    Role,
    SamplingParams,
    StepBatch,
    TokenWork,
)
from hydrainfer.core import Lane as LaneName
from hydrainfer.families import read_config
from hydrainfer.grammar import Guided
from hydrainfer.models import Model, PatchedPicture
from hydrainfer.models.vit import FrameVision
from hydrainfer.ops import ScanBatch, select, select_ops, torch_variants, upload
from hydrainfer.ops.cuda.kernels import CudaKernels
from hydrainfer.runtime import LaneThread, LanguageRunner, VisionRunner, capture_passes_for, graphs
from hydrainfer.runtime.graphs import PassGraphs
from hydrainfer.runtime.packing import PackedTokens, pack_tokens
from hydrainfer.runtime.sampler import choose, sample
from hydrainfer.runtime.sampling import plan_sampling
from hydrainfer.storage import BlockStore, LocalExports
from hydrainfer.storage.local import LocalTransport
from tests.cuda.demands import KernelsDouble
from tests.cuda.fake import CUDA, fake_cuda

pytestmark = pytest.mark.cpu

MODELS = Path(__file__).parents[2] / "configs" / "models"
PICTURES = {  # pixels and grid
    "llava-1.5-7b": ((336, 336, 3), None),
    "llava-next-7b": ((5, 336, 336, 3), (2, 48, 32)),
    "qwen2-vl-7b": ((1, 224, 336, 3), (1, 8, 12)),
    "qwen2.5-vl-7b": ((1, 140, 336, 3), (1, 5, 12)),
    "qwen3-vl-8b": ((4, 128, 192, 3), (2, 4, 6)),
}
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.7),
    "published": SamplingParams(temperature=0.1, top_k=1, top_p=0.001, repetition_penalty=1.05),
    "nucleus": SamplingParams(temperature=1.0, top_p=0.9),
    "everything": SamplingParams(
        temperature=0.7, top_k=20, top_p=0.8, min_p=0.1, presence_penalty=0.5, min_tokens=4, logit_bias=((7, 1.0),)
    ),
}


class FakeRig:
    """One EPD instance without weights. Batches run on the caller's thread, which has the fake mode."""

    def __init__(self, name: str, layers: int, capture=None) -> None:
        config = read_config(MODELS / name)
        object.__setattr__(config.text, "layers", layers)
        self.shape, self.grid = PICTURES.get(name, ((0,), None))
        ops = select_ops(CUDA, torch.bfloat16, config.text.head_dim)
        self.model = Model(config, Role.parse("EPD"), ops, torch.bfloat16, CUDA)
        self.specs = specs = self.model.cache_specs()
        self.caches = CacheSet(dict.fromkeys(specs, 4096))
        self.stores = {spec.name: BlockStore(spec, 4096, CUDA) for spec in specs}
        self.pixels = np.zeros(self.shape, np.uint8)
        language, vision = (LaneThread(name, CUDA, lambda: None) for name in ("language", "vision"))
        self.language = LanguageRunner(self.model, self.stores.values(), language, capture=capture)
        self.lanes, self.n_requests = (language, vision), 0
        if self.model.vision is not None:
            self.vision = VisionRunner(self.model, self.stores["embed"], lambda _: self.pixels, vision)

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()

    def sequence(self, sampling: SamplingParams = SAMPLINGS["greedy"], n_text: int = 20) -> LiveSequence:
        self.n_requests += 1
        seen, media = [], ()
        if self.model.vision is not None:
            n = self.model.vision.rows(PatchedPicture(self.pixels, self.grid))
            seen, media = [self.model.config.media_tokens[0]] * n, (MediaSpan(1, n, b"key", "pixels", self.grid),)
        ids = (1, *seen, *range(300, 300 + n_text))
        name = f"r{self.n_requests}"
        request = Request(id=name, prompt_ids=ids, sampling=sampling, max_tokens=64, seed=1, media=media, eos_ids=(2,))
        seq = LiveSequence(request, (0.0, 0), 0.0)
        need = {spec.name: spec.need(request, 0, len(ids) + 8) for spec in self.specs}
        seq.hold.blocks = self.caches.reserve(name, need).blocks
        return seq

    def packed(self, work: list[TokenWork], before: list[TokenWork] = ()) -> PackedTokens:
        r = self.language
        embed = self.stores["embed"].spec if "embed" in self.stores else None
        return pack_tokens(work, r._tables, embed, r._rotary, r._sums, before)

    def hidden(self, work: list[TokenWork]) -> torch.Tensor:
        return self.language._forward(self.packed(work))[1]


@pytest.fixture
def kernels(monkeypatch):
    double = KernelsDouble()
    monkeypatch.setattr(select, "cuda_kernels", lambda: (CudaKernels(double), ()))
    monkeypatch.setattr(torch_variants, "has_flash_attention", lambda device: True)
    monkeypatch.setattr(torch_variants, "has_grouped_products", lambda device: True)
    return double


@pytest.fixture(params=list(PICTURES)[:3])
def on_cuda(request, monkeypatch, kernels):
    with fake_cuda(monkeypatch) as recorder:
        rig = FakeRig(request.param, layers=3)
        yield rig, recorder
        rig.close()


def whole(seq: LiveSequence, start: int = 0, stop: int | None = None) -> TokenWork:
    n = len(seq.tokens)
    stop = n if stop is None else stop
    return TokenWork(seq, start, stop - start, stop == n)


def decode(rig: FakeRig, sampling: SamplingParams = SAMPLINGS["greedy"]) -> TokenWork:
    seq = rig.sequence(sampling)
    seq.tokens.append(5)
    return TokenWork(seq, len(seq.tokens) - 1, 1, True)


def step_of(work: list[TokenWork]) -> StepBatch:
    return StepBatch(1, LaneName.LANGUAGE, work, len(work), len(work))


def test_encode_does_not_wait(on_cuda):
    rig, recorder = on_cuda
    recorder.waits.clear()
    for _ in range(2):
        seqs = [rig.sequence() for _ in range(3)]
        places = [rig.vision._place(EncodeWork(seq, 0)) for seq in seqs]
        result = rig.vision._execute(StepBatch(1, LaneName.VISION, [], 3), places)
        assert result.error is None and not result.failed
    if rig.grid is not None and len(rig.shape) == 4 and rig.shape[0] == 1:
        recorder.waits.clear()  # the first pass makes Qwen's layout on the host, the second one has it
        rig.vision._execute(StepBatch(1, LaneName.VISION, [], 3), places)
    assert not recorder.waits


@pytest.mark.parametrize("kind", ["decode", "prefill", "chunks", "mixed"])
def test_a_step_does_not_wait(on_cuda, kind):
    rig, recorder = on_cuda
    work = {
        "decode": lambda: [decode(rig) for _ in range(3)],
        "prefill": lambda: [whole(rig.sequence()), whole(rig.sequence(n_text=7))],
        "chunks": lambda: [whole(rig.sequence(), 5), whole(rig.sequence(), 2, 40)],
        "mixed": lambda: [decode(rig), whole(rig.sequence(), 5), whole(rig.sequence()), decode(rig)],
    }[kind]()
    recorder.waits.clear()
    hidden = rig.hidden(work)
    logits = rig.model.logits(hidden)
    n = sum(w.sample for w in work)
    assert logits.shape == (n, rig.model.config.text.vocab) and logits.dtype == torch.float32
    assert choose(logits, plan_sampling(work)).shape == (n,)
    assert not recorder.waits, "the step waits for the device before its tokens are read"


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampling_waits_only_for_the_tokens(on_cuda, name):
    """One row alone, and many: with filters they went one by one, with six waits each."""
    rig, recorder = on_cuda
    vocab = rig.model.config.text.vocab
    for n in (1, 60):
        plan = plan_sampling([decode(rig, SAMPLINGS[name]) for _ in range(min(n, 6))] * (n // min(n, 6)))
        recorder.waits.clear()
        recorder.calls.clear()
        logits = torch.empty(n, vocab, device=CUDA)
        chosen = choose(logits, plan)
        assert chosen.device == CUDA and not recorder.waits
        assert len(recorder.calls) < (240 if name == "nucleus" else 60)  # which is searched for bit by bit
        drawn = sample(logits, plan)
        assert drawn.tokens.device == CUDA and not recorder.waits
        with pytest.raises(DataDependentOutputException):  # which is how a read of the device shows here
            drawn.read()


def test_a_grammar_does_not_wait_either(on_cuda):
    rig, recorder = on_cuda
    plan = plan_sampling([decode(rig), decode(rig)])
    plan.guided, plan.blocked = [Guided(1, "r", None, ())], np.zeros((1, 1000), dtype=bool)
    recorder.waits.clear()
    choose(torch.empty(2, 1000, device=CUDA), plan)
    assert not recorder.waits


def test_one_copy_carries_a_step_to_the_device(on_cuda):
    rig, recorder = on_cuda
    work = [decode(rig), whole(rig.sequence())]
    recorder.copies.clear()
    rig.hidden(work)
    assert len(recorder.copies) == 1


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_goes_on_with_tokens_that_the_host_does_not_know(monkeypatch, kernels, graphs, name):
    """It is packed, launched and sampled while the one before is computed; nothing of it waits."""
    with fake_cuda(monkeypatch) as recorder:
        rig = FakeRig("qwen2-vl-7b", layers=2, capture=(lambda run: (lambda: None, run())) if graphs else None)
        runner, work = rig.language, [decode(rig, SAMPLINGS[name]) for _ in range(3)]
        for one in work:
            one.seq.n_computed = one.start
        runner._execute(step_of(work), rig.packed(work), plan_sampling(work))  # graphs are captured
        for part in (recorder.copies, recorder.waits):
            part.clear()
        behind = [TokenWork(w.seq, w.start + 1, 1, True) for w in (work[2], work[0])]
        assert all(w.unknown for w in behind)
        packed = rig.packed(behind, work)
        assert packed.follows.tolist() == [2, 0]
        read = runner._execute(step_of(behind), packed, plan_sampling(behind, packed.follows.tolist()))
        assert runner._before.shape == (3,) and runner._sampled.shape == (2,) and runner._sampled.device == CUDA
        assert len(recorder.copies) <= 5 and not recorder.waits
        with pytest.raises(DataDependentOutputException):
            read()
        rig.close()


def test_a_step_by_a_graph_is_two_copies_and_a_replay(monkeypatch, kernels):
    with fake_cuda(monkeypatch) as recorder:
        rig = FakeRig("qwen2-vl-7b", layers=2, capture=lambda run: (lambda: None, run()))
        for n in (3, 4, 2):
            work = [decode(rig) for _ in range(n)]
            for part in (recorder.copies, recorder.waits, kernels.calls):
                part.clear()
            assert rig.hidden(work).shape == (n, rig.model.config.text.hidden)
            assert kernels.calls.count("write_heads") == (0 if n == 4 else 2), "three are padded to four"
            assert len(recorder.copies) <= 2 and not recorder.waits
        rig.close()


@pytest.mark.parametrize("name", ["qwen3.5-9b", "qwen3-next-80b-a3b", "lfm3-vl-2b", "gpt-oss-20b"])
def test_a_step_of_any_family_by_a_graph(monkeypatch, kernels, name):
    """What a captured step reads lies where the graph reads it; a step waits for nothing."""
    if name not in PICTURES:
        monkeypatch.setitem(PICTURES, name, ((1, 256, 384, 3), (1, 8, 12)))
    fixed: set[str] = set()

    def recorded(arrays, device, memory=None):
        fixed.update(arrays if memory is not None else ())
        return upload(arrays, device, memory)

    monkeypatch.setattr(graphs, "upload", recorded)
    with fake_cuda(monkeypatch) as recorder:
        rig = FakeRig(name, layers=4, capture=lambda run: (lambda: None, run()))
        for n in (3, 4):
            work = [decode(rig) for _ in range(n)]
            for part in (recorder.copies, recorder.waits, kernels.calls):
                part.clear()
            assert rig.hidden(work).shape == (n, rig.model.config.text.hidden)
            assert len(recorder.copies) <= 2 and not recorder.waits
        (graph,) = rig.language._graphs._graphs.values()
        _, on, caches = graph.step
        for batch in (cache.batch for cache in caches):
            used = (batch.sources, batch.targets) if isinstance(batch, ScanBatch) else (batch.slots,)
            assert all(any(array is on[one] for one in fixed) for array in used)
        rig.close()


@pytest.mark.parametrize("name", list(PICTURES))
def test_a_picture_by_a_graph_is_few_copies_and_launches(monkeypatch, kernels, name):
    """Its pixels, and where its rows lie; where sizes differ, that of its patches. Nothing is copied from the host, and
    nothing waits, while a graph is captured."""
    monkeypatch.setattr(FrameVision, "sizes", (256, 512))
    with fake_cuda(monkeypatch) as recorder:
        rig = FakeRig(name, layers=2)
        captured = []

        def capture(run):
            embeddings = run()
            recorder.copies.clear()
            recorder.waits.clear()
            run()
            captured.append(recorder.copies + recorder.waits)
            return (lambda: None), embeddings

        passes = rig.model.vision.passes
        assert passes.captures
        PassGraphs(passes, capture).capture_all()
        assert captured == [[]] * len(passes.sizes)
        for part in (recorder.copies, recorder.waits, recorder.calls):
            part.clear()
        result = rig.vision._execute(
            StepBatch(1, LaneName.VISION, [], 1), [rig.vision._place(EncodeWork(rig.sequence(), 0))]
        )
        assert result.error is None and not result.failed
        assert (
            len(recorder.copies) == (3 if name.startswith("qwen") else 2)
            and not recorder.waits
            and len(recorder.calls) < 20
        ), recorder.calls
        rig.close()


def test_without_flash_attention_pictures_of_any_sizes_are_not_captured(monkeypatch, kernels):
    """Attention would be a call for each length of a pass."""
    monkeypatch.setattr(torch_variants, "has_flash_attention", lambda device: False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 1)
    with fake_cuda(monkeypatch):
        rigs = [FakeRig(name, layers=1) for name in ("qwen2-vl-7b", "llava-1.5-7b")]
        assert [capture_passes_for(rig.model) is None for rig in rigs] == [True, False]
        for rig in rigs:
            rig.close()


def test_launches_of_a_decode_step(on_cuda, kernels):
    """What a step costs a host-bound GPU: operators per layer, counted without views. Less is better."""
    rig, recorder = on_cuda
    work = [decode(rig) for _ in range(4)]
    recorder.calls.clear()
    rig.hidden(work)
    assert kernels.calls.count("write_heads") == kernels.calls.count("silu_and_mul") == 3, "one for each layer"
    assert (len(recorder.calls) + len(kernels.calls)) / 3 < 32, recorder.calls


def test_a_migration_within_the_process_is_one_launch(on_cuda, kernels, monkeypatch):
    rig, recorder = on_cuda
    store, exports = rig.stores["kv"], LocalExports()
    exports.add("a", store)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.cuda.Stream(device))
    handle = ExportHandle(
        owner="E0:1", host="h", process="p", device="cuda:0", n_blocks=store.n_blocks,
        block_bytes=store.spec.block_bytes, ways={"local": "a"},
    )  # fmt: skip
    recorder.waits.clear()
    LocalTransport(exports, CudaKernels(kernels).copy_blocks).copy(handle, [7, 0, 4], store, [1, 2, 9])
    assert kernels.calls == ["copy_blocks"] and not recorder.waits
