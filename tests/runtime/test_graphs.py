"""Decode steps and pictures by graphs, with a double that computes a step anew where a graph would be replayed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from hydrainfer import LLM, SamplingParams
from hydrainfer.assemble import model as assembling
from hydrainfer.core import DEVICE_LOST, InternalError, Role, TokenWork
from hydrainfer.models import PatchedPicture, load_model
from hydrainfer.models.lfm3_tower import Lfm3Vision
from hydrainfer.models.picture import Squares
from hydrainfer.models.vit import FrameVision
from hydrainfer.ops import KV, GridRows, OpSet, reference, select, select_ops, torch_variants
from hydrainfer.runtime.graphs import ROWS, PassGraphs
from hydrainfer.runtime.packing import Paged, one_token, padded
from tests.checkpoints import make_picture
from tests.checkpoints_qwen import make_qwen
from tests.checkpoints_text import make_text
from tests.runtime.harness import IMAGE, Prompt, Rig

pytestmark = pytest.mark.cpu

PROMPTS = [
    Prompt([1, 5, 6, IMAGE, 7], [1]),
    Prompt(list(range(1, 30)), []),
    Prompt([1, 9], []),
    Prompt([1, IMAGE, 8, IMAGE], [2, 3]),
    Prompt([1, 4, 4, 4, 4, 4, 4], []),
]


class Captures:
    """Captures a step as what computes it, and counts."""

    def __init__(self) -> None:
        self.n, self.replays = 0, 0

    def __call__(self, run):
        self.n += 1
        hidden = run()

        def replay() -> None:
            self.replays += 1
            hidden.copy_(run())

        return replay, hidden


def outputs(rig: Rig) -> list[list[int]]:
    lengths = [3, 9, 7, 12, 5]  # they end one after the other: batches of five to one
    return rig.run([rig.sequence(prompt, n) for prompt, n in zip(PROMPTS, lengths)])


@pytest.mark.parametrize("before", [False, True], ids=["at first use", "at start"])
def test_tokens_are_those_without_graphs(checkpoints, rig, before):
    captures = Captures()
    with_graphs = Rig(checkpoints(), capture=captures)
    try:
        if before:
            with_graphs.language.capture()
            assert captures.n == len(ROWS) and not captures.replays
        assert outputs(with_graphs) == outputs(rig)
        assert captures.n == (len(ROWS) if before else 4), "for 8, 4, 2 and 1 rows"
        assert captures.replays >= 7
    finally:
        with_graphs.close()


def in_place(op, n_rows: int):
    """`op`, whose first `n_rows` arguments are rows, as a kernel computes it that a graph has: every row reads its
    state when the rows before it have written theirs, and one whose target is -1 leaves none."""

    def step(*args):
        *others, batch = args
        if not batch.captured:
            return op(*args)
        out = None
        for i in range(batch.n_decodes):
            one = replace(batch, n_decodes=1, sources=batch.sources[i : i + 1], targets=batch.targets[i : i + 1])
            if one.targets[0] >= 0:
                made = op(*(rows[i : i + 1] for rows in others[:n_rows]), *others[n_rows:], one)
                out = torch.full((batch.n_decodes, made.shape[1]), float("nan")) if out is None else out
                out[i] = made[0]
        return out

    return step


def write_kv(cache, fresh, batch, write=reference.write_kv) -> None:
    """`reference.write_kv` as the kernel writes: not where there is no slot."""
    kept = batch.slots >= 0
    write(cache, KV(*(rows[kept] for rows in fresh)), replace(batch, slots=batch.slots[kept]))


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5"])
def test_recurrent_states_are_those_without_graphs(tmp_path, monkeypatch, kind):
    """Padding rows continue from no state and leave none: a copy of a row would step its state twice."""
    captures = Captures()
    prompts = [list(range(3, n)) for n in (9, 40, 23)]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (20, 11, 6)]
    path = make_text(tmp_path / kind, kind)
    monkeypatch.setattr(reference, "write_kv", write_kv)
    monkeypatch.setattr(reference, "short_conv", in_place(reference.short_conv, 1))
    monkeypatch.setattr(select, "_chunked", in_place(select._chunked, 4))
    found = []
    for capture in (None, captures):
        monkeypatch.setattr(assembling, "capture_for", lambda _, on=capture: on)
        with LLM(path, device="cpu", native_kernels=False, threads=1) as llm:
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            found.append([answer.outputs[0].token_ids for answer in outputs])
    assert found[0] == found[1]
    assert captures.n == len(ROWS) and captures.replays > 10


def test_embeddings_are_those_without_graphs(checkpoints):
    captures, model = Captures(), load_model(checkpoints(), Role.parse("E"))
    pictures = [PatchedPicture(make_picture(i, 56)) for i in range(Squares.sizes[-1] + 2)]
    plain = {n: model.encode(pictures[-n:]) for n in (*Squares.sizes, len(pictures))}
    with torch.inference_mode():
        PassGraphs(model.vision.passes, captures).capture_all()
    assert captures.n == len(Squares.sizes)
    kept = []
    for n, want in plain.items():
        kept += zip(model.encode(pictures[-n:]), want)
    assert captures.replays == len(Squares.sizes), "more pictures than any graph has go without"
    for got, want in kept:  # all of them: one pass does not overwrite what another made
        torch.testing.assert_close(got, want)


PASSES = {  # grids in tokens → the buckets of 64, 256 and 512 patches that hold them; None: none does
    "nothing to pad": ([(1, 8, 8)], 256),
    "one picture": ([(1, 5, 9)], 256),
    "tiny": ([(1, 1, 1)], 64),
    "several": ([(1, 2, 2), (1, 3, 5), (1, 9, 4)], 256),
    "a video and a picture": ([(2, 4, 6), (1, 7, 7)], 512),
    "more pictures than a small bucket has frames": ([(1, 1, 2)] * 5, 512),
    "more pictures than any has": ([(1, 2, 2)] * 8, None),
    "too large": ([(1, 11, 12)], None),
}
NARROW = [(1, 1, 64)]  # no window is whole


class Frozen(Captures):
    """Replays as a graph does: with all that the host said while it was captured, and what memory holds now."""

    def __call__(self, run):
        bucket, step = run.__self__, run.__self__._step

        def frozen() -> torch.Tensor:
            bucket._step, now = step, bucket._step
            try:
                return run()
            finally:
                bucket._step = now

        return super().__call__(frozen)


def varlen(q, k, v, starts, ends, longest, longest_k, *, scale):
    """torch's `varlen_attn`, by the places that are on the device; demands what FlashAttention does."""
    assert starts is ends and starts.dtype == torch.int32 and starts.is_contiguous() and longest == longest_k
    assert all(x.dim() == 3 and x.stride(-1) == 1 and x.shape[-1] % 8 == 0 for x in (q, k, v))
    out = torch.full(q.shape, float("nan"))
    for first, stop in zip(starts.tolist(), starts.tolist()[1:]):
        assert 0 <= stop - first <= longest
        scores = torch.einsum("qhd,khd->hqk", q[first:stop], k[first:stop]) * scale
        out[first:stop] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[first:stop])
    assert starts[-1] == len(q), "rows that no segment has stay as they are, and NaN times 0 is NaN"
    return out


def pictures_of(tower: FrameVision, grids: list[tuple[int, int, int]]) -> list[PatchedPicture]:
    rng, side = np.random.default_rng(len(grids)), tower.config.patch * tower.config.merge
    shapes = [(1 if t == 1 else 2 * t, h * side, w * side, 3) for t, h, w in grids]
    return [PatchedPicture(rng.integers(0, 256, s, dtype=np.uint8), grid) for s, grid in zip(shapes, grids)]


def grid_conv(rows: torch.Tensor, weight: torch.Tensor, grid: GridRows) -> torch.Tensor:
    """The kernel's arithmetic: by the places and sizes that are on the device, whatever the host knows of grids."""
    before, after, x = rows.chunk(3, dim=-1)
    (y, x_at), (height, width), m = grid.places.long().T, grid.sizes.long().T, grid.merge

    def row_in_frame(down, right):
        return (down // m * (width // m) + right // m) * m * m + down % m * m + right % m

    first, gated, total = torch.arange(len(rows)) - row_in_frame(y, x_at), before * x, torch.zeros_like(x)
    for i in range(9):
        down, right = y + i // 3 - 1, x_at + i % 3 - 1
        there = (down >= 0) & (down < height) & (right >= 0) & (right < width)
        at = torch.where(there, first + row_in_frame(down, right), 0)
        total += there[:, None] * gated[at] * weight[:, 0, i // 3, i % 3]
    return total * after


def tower_ops(name: str, monkeypatch) -> OpSet:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    ops = replace(select_ops("cpu", torch.float32, 16, use_native=False), grid_conv=grid_conv)
    return replace(ops, attention_segments=torch_variants.attention_segments_varlen) if name == "varlen" else ops


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "lfm3_vl"])
@pytest.mark.parametrize("how", ["by length", "varlen"])
def test_pictures_of_any_sizes_are_those_without_graphs(tmp_path, monkeypatch, family, how):
    """Padding changes nothing, and a replay reads nothing that the host knew while capturing."""
    for tower in (FrameVision, Lfm3Vision):
        monkeypatch.setattr(tower, "sizes", (64, 256, 512))
    lfm3 = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    heads = lfm3 if family == "lfm3_vl" else {"num_heads": 1}  # 32 numbers in each, as FlashAttention can take
    path = make_qwen(family, tmp_path, vision=heads)
    model = load_model(path, Role.parse("E"), ops=tower_ops(how, monkeypatch))
    tower, captures = model.vision, Frozen() if how == "varlen" else Captures()
    passes = PASSES | {"narrow": (NARROW, 512 if tower.cut.window else 256)}
    some = {name: pictures_of(tower, grids) for name, (grids, _) in passes.items()}
    plain = {name: model.encode(pictures) for name, pictures in some.items()}
    with torch.inference_mode():
        PassGraphs(tower.passes, captures).capture_all()
    assert captures.n == 3
    kept = []
    for name, pictures in some.items():
        assert tower.size_of(pictures) == passes[name][1], name
        kept += zip(model.encode(pictures), plain[name])
    assert captures.replays == sum(size is not None for _, size in passes.values())
    for got, want in kept:
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["native-cuda", "reference"])
def test_a_tower_with_grids_is_captured_only_by_the_kernel_that_reads_them_on_the_device(tmp_path, variant):
    path = make_qwen(
        "lfm3_vl", tmp_path, vision={"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    )
    ops = select_ops("cpu", torch.bfloat16, 16, use_native=False)
    varlen = {"replays_segments": torch_variants.takes_varlen}
    ops = replace(ops, chosen=(("attention_segments", "torch-varlen"), ("grid_conv", variant)), **varlen)
    tower = load_model(path, Role.parse("E"), dtype="bfloat16", ops=ops).vision
    assert tower.captures is (variant == "native-cuda")


def test_a_step_is_padded_with_the_decode_that_reads_least():
    contexts = [8000, 30, 500]
    tables, lengths = np.array([[1, 2], [3, 4], [5, 6]], np.int32), np.array([8001, 31, 501], np.int32)
    page = Paged(tables, lengths, np.array([7, 8, 9]), contexts, [])
    one = one_token(["kv"], multimodal=False)
    three = replace(one, ids=np.array([10, 11, 12]), positions=np.array(contexts), counts=[1] * 3, paged={"kv": page})
    five = padded(three, 5)
    assert five.ids.tolist() == [10, 11, 12, 11, 11] and five.positions.tolist() == [8000, 30, 500, 30, 30]
    kv = five.paged["kv"]
    assert kv.contexts == [8000, 30, 500, 30, 30] and kv.lengths.tolist() == [8001, 31, 501, 31, 31]
    assert kv.slots.tolist() == [7, 8, 9, 8, 8] and kv.tables[:, 0].tolist() == [1, 3, 5, 3, 3]
    assert five.n_decodes == len(five.counts) == 5


def test_a_server_captures_before_its_engine_is_there(checkpoints, monkeypatch):
    """Lanes ask the engine whether the other one is busy, also while graphs are captured."""
    decodes, squares = Captures(), Captures()
    chat = [{"role": "user", "content": [{"type": "image", "image": Image.fromarray(make_picture(1, 56))}]}]
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    found = []
    for capture in (False, True):
        monkeypatch.setattr(assembling, "capture_for", lambda _, on=capture: decodes if on else None)
        monkeypatch.setattr(assembling, "capture_passes_for", lambda _, on=capture: squares if on else None)
        with LLM(checkpoints(), device="cpu", overlap="free", threads=1) as llm:
            (answer,) = llm.chat([chat], greedy, use_tqdm=False)
            found.append(answer.outputs[0].token_ids)
    assert found[0] == found[1]
    assert decodes.n == len(ROWS) and squares.n == len(Squares.sizes) and decodes.replays and squares.replays == 1


def test_a_decode_that_does_not_sample_and_too_many_rows(checkpoints, rig):
    captures = Captures()
    with_graphs = Rig(checkpoints(), capture=captures)
    try:
        for n in (3, ROWS[-1] + 1):
            found = []
            for each in (rig, with_graphs):
                seqs = [each.sequence(Prompt([1, 5 + i % 50], []), 2) for i in range(n)]
                work = [TokenWork(s, i % 2, 1, i % 2 == 1) for i, s in enumerate(seqs)]
                found.append(each.step(work).tokens)
                for s in seqs:
                    each.release(s)
            assert found[0] == found[1] and len(found[0]) == n // 2
        assert captures.n == 1, "a batch larger than all graphs goes without"
    finally:
        with_graphs.close()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory\nmore"), torch.AcceleratorError("no")])
def test_a_capture_that_fails_is_said_and_steps_go_without(checkpoints, rig, caplog, error):
    captures = []

    def fails(run):
        captures.append(run())
        if len(captures) == 3:
            raise error
        return (lambda: None), captures[-1]

    broken = Rig(checkpoints(), capture=fails)
    try:
        broken.language.capture()
        (warning,) = caplog.records
        assert "goes without" in warning.message and "\n" not in warning.message and warning.levelname == "WARNING"
        assert outputs(broken) == outputs(rig)
        assert len(captures) == 3
    finally:
        broken.close()


def test_a_device_that_is_lost_while_capturing_ends_the_start(checkpoints, monkeypatch):
    def lost(*args, **kwargs):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    broken = Rig(checkpoints(), capture=lost)
    monkeypatch.setattr(torch, "zeros", lost)
    try:
        with pytest.raises(InternalError) as failed:
            broken.language.capture()
        assert failed.value.code == DEVICE_LOST
    finally:
        broken.close()
