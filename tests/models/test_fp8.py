"""FP8 weights: the numbers that they become, whatever shares a scale and however tensors lie; what is refused."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from hydrainfer.assemble.server import _settled
from hydrainfer.config import ServeConfig
from hydrainfer.core import CheckpointError, Role
from hydrainfer.families import read_config
from hydrainfer.models import fingerprint, load, load_model, stored, whole_fingerprint
from hydrainfer.ops import Int8Weight, select_ops
from hydrainfer.planner.inputs import shape_of
from tests.checkpoints_fp8 import NUMBERS, SCALES, SCALINGS, make_fp8, save_fp8
from tests.checkpoints_gemma import make_gemma
from tests.checkpoints_qwen import make_qwen
from tests.checkpoints_text import make_text
from tests.models.teacher import teacher_forced

pytestmark = pytest.mark.cpu
IDS = torch.randint(3, 1500, (40,), generator=torch.Generator().manual_seed(0)).tolist()
NAME = "model.layers.0.mlp.down_proj.weight"
WIDE = {"intermediate_size": 300, "hidden_size": 200, "head_dim": 40}  # edges that are no multiples of 128


def loaded(path, dtype="float32", quantization="none"):
    ops = select_ops("cpu", getattr(torch, dtype), head_dim=16, quantization=quantization)
    return load_model(path, Role.parse("EPD"), dtype=dtype, ops=ops)


def check_same(one, other):
    ours, theirs = one.slots(), other.slots()
    assert ours.keys() == theirs.keys() and one.weight_bytes == other.weight_bytes
    for name, slot in ours.items():
        a, b = slot.into, theirs[name].into
        assert type(a) is type(b)
        pairs = [(a.values, b.values), (a.scales, b.scales)] if isinstance(a, Int8Weight) else [(a, b)]
        assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs), name


def text(kind, **config):
    return partial(make_text, kind=kind, **config)


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces begin inside of blocks. Returns the sizes of those that were widened."""
    widen, sizes = stored.widened, []

    def noted(numbers, *args, **kwargs):
        sizes.append(numbers.numel())
        return widen(numbers, *args, **kwargs)

    monkeypatch.setattr(stored, "_PIECE_VALUES", 1500)
    monkeypatch.setattr(stored, "widened", noted)
    return sizes


@pytest.mark.parametrize(
    ("make", "how"),
    [
        *((text("qwen3"), how) for how in SCALINGS),
        (text("llama", **WIDE), "usual blocks"),
        *((text("qwen3_moe"), how) for how in ("blocks", "tensor", "row")),
        (text("qwen2_moe"), "uneven blocks"),
        (text("mimo"), "uneven blocks"),
        (text("mixtral"), "blocks"),
        *((text("gpt_oss"), how) for how in ("uneven blocks", "usual blocks, unsaid", "tensor", "row")),
        (text("phi3"), "uneven blocks"),
        (text("glm"), "uneven blocks"),
        (text("lfm3"), "row"),
        (make_gemma, "blocks"),
        (partial(make_qwen, "qwen3_vl_moe"), "uneven blocks"),
    ],
    ids=lambda v: v if isinstance(v, str) else v.keywords.get("kind", "vision") if isinstance(v, partial) else "gemma",
)
def test_weights_are_scale_times_number(tmp_path, small_pieces, make, how):
    """Then cast, bit for bit; and so are logits."""
    published, plain = make_fp8(tmp_path, make, how)
    wide = loaded(plain)
    check_same(narrow := loaded(published), wide)
    for dtype in ("bfloat16", "float16"):
        check_same(loaded(published, dtype), loaded(plain, dtype))
    assert torch.equal(teacher_forced(narrow, IDS), teacher_forced(wide, IDS))
    assert 0 < max(small_pieces) <= 160 * 24, "more than a piece, or a head, was widened at once"


@pytest.mark.parametrize("how", ["blocks", "tensor", "row"])
def test_numbers_are_those_of_transformers(tmp_path, how):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    published, _ = make_fp8(tmp_path, text("mistral"), how)
    slots, scales = loaded(published).slots(), load_file(published / SCALES)
    for name, numbers in load_file(published / NUMBERS).items():
        want = Fp8Dequantize(None)._dequantize_one(numbers, scales[name + SCALINGS[how].ending], torch.float32)
        assert torch.equal(slots[name.replace("model.", "text.")].into, want), name


def test_every_number_becomes_itself(tmp_path):
    """Also those below the smallest normal one, the largest, and NaN."""
    path, _ = make_fp8(tmp_path, text("llama"), "tensor")
    files = {file: load_file(path / file) for file in (SCALES, NUMBERS)}
    every = torch.arange(256, dtype=torch.uint8).repeat(40).view(64, 160).view(torch.float8_e4m3fn)
    files[NUMBERS][NAME], files[SCALES][f"{NAME}_scale_inv"] = every, torch.tensor(3.0)
    save_fp8(path, files, {})
    got = loaded(path).slots()[NAME.replace("model.", "text.")].into
    assert torch.equal(got.nan_to_num(7.0), (every.float() * 3).nan_to_num(7.0))
    assert got.isnan().sum() == 80


@pytest.mark.parametrize(
    ("kind", "how"), [("qwen3", "uneven blocks"), ("qwen3_moe", "tensor"), ("gpt_oss", "row"), ("glm", "blocks")]
)
def test_eight_bits_are_made_of_the_wide_numbers(tmp_path, kind, how):
    published, plain = make_fp8(tmp_path, text(kind), how)
    check_same(loaded(published, quantization="int8"), loaded(plain, quantization="int8"))


def test_a_head_and_a_table_with_scales_of_their_own_are_not_tied(tmp_path):
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    path, _ = make_fp8(tmp_path, text("llama"), "tensor", also=ends)
    files = {file: load_file(path / file) for file in (SCALES, NUMBERS)}
    files[NUMBERS][ends[1]] = files[NUMBERS][ends[0]].clone()
    save_fp8(path, files, {"tie_word_embeddings": True})
    language = loaded(path).language
    factors = [float(files[SCALES][f"{name}_scale_inv"]) for name in ends]
    torch.testing.assert_close(language.head, language.table * (factors[1] / factors[0]))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return make_fp8(tmp_path_factory.mktemp("fp8"), text("qwen3"), "blocks")[0]


@pytest.fixture
def broken(published, tmp_path):
    """A function that writes a copy, after `change` was made to its files, with other fields in config.json."""

    def write(change=lambda files: None, **quantization):
        path = make_text(tmp_path / "broken", "qwen3")
        files = {file: load_file(published / file) for file in (SCALES, NUMBERS)}
        change(files)
        said = {"quant_method": "fp8", "weight_block_size": [16, 16]} | quantization
        save_fp8(path, files, {"quantization_config": said if said["quant_method"] else None})
        return path

    return write


def scales(change):
    """A change of the scales of one tensor."""

    def made(files):
        files[SCALES][f"{NAME}_scale_inv"] = change(files[SCALES][f"{NAME}_scale_inv"])

    return made


def as_e5m2(files):
    files[NUMBERS][NAME] = files[NUMBERS][NAME].to(torch.float8_e5m2)


OF_16 = "of shape [64, 160] needs one per block of quantization_config.weight_block_size [16, 16]"


@pytest.mark.parametrize(
    ("change", "quantization", "words"),
    [
        (lambda files: files[SCALES].pop(f"{NAME}_scale_inv"), {}, [NUMBERS, NAME, f"{NAME}_scale_inv are missing"]),
        (scales(lambda s: s[:, :-1].clone()), {}, [SCALES, f"{NAME}_scale_inv has shape [4, 9]", OF_16]),
        (scales(lambda s: s.t().contiguous()), {}, ["has shape [10, 4]", OF_16]),
        (scales(lambda s: s[None]), {}, ["has shape [1, 4, 10]", OF_16]),
        (scales(lambda s: s[0, 0].clone()), {}, ["has shape []", OF_16]),
        (scales(lambda s: s.int()), {}, [SCALES, f"{NAME}_scale_inv has dtype I32; supported: F32, BF16"]),
        (as_e5m2, {}, [NAME, "has dtype F8_E5M2; supported: F32"]),
        (None, {"weight_block_size": None}, [SCALES, "_scale_inv has shape", "needs one scale, or one per row"]),
        (None, {"quant_method": "fbgemm_fp8", "weight_block_size": None}, ["needs one scale, or one per row"]),
        (None, {"weight_block_size": [16, 32]}, ["weight_block_size [16, 32]"]),
        *(
            (
                None,
                {"weight_block_size": size},
                ["config.json: quantization_config.weight_block_size is", "a list of 2"],
            )
            for size in ([0, 16], [16, -1], [16], [16, 16, 16], [16, 1.5], [16, None], [16, 2**40], [True, 16], 16, "x")
        ),
        (None, {"quant_method": None}, [NUMBERS, "is in FP8", "config.json has no quantization_config"]),
        (None, {"quant_method": "fp9"}, ["its weights are quantised by fp9, which is not supported"]),
    ],
)
def test_damage_is_one_line_before_memory_is_taken(broken, monkeypatch, change, quantization, words):
    path, devices, make = broken(change or (lambda files: None), **quantization), [], load.Model
    monkeypatch.setattr(load, "Model", lambda *args: devices.append(args[4].type) or make(*args))
    with pytest.raises(CheckpointError) as caught:
        loaded(path)
    message = caught.value.message
    assert "\n" not in message and len(message) < 800 and all(w in message for w in words), message
    assert set(devices) <= {"meta"}


def test_the_identity_of_a_model_covers_its_scales(broken, published, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    identities = fingerprint, whole_fingerprint
    want = [identity(published) for identity in identities]
    for change, block, same in ((None, 16, True), (scales(lambda s: s * 2), 16, False), (None, 17, False)):
        path = broken(change or (lambda files: None), weight_block_size=[block, 16])
        assert [identity(path) == before for identity, before in zip(identities, want)] == [same, same]


def test_weights_count_as_what_they_become(published, caplog):
    wide = shape_of(str(published), "bfloat16").weight_bytes(Role.parse("EPD"))
    assert wide == pytest.approx(loaded(published, "bfloat16").weight_bytes, rel=5e-3)
    with caplog.at_level(logging.INFO):
        _settled(ServeConfig(model="", dtype="bfloat16"), read_config(published))
        _settled(ServeConfig(model="", device="emulated", dtype="bfloat16"), read_config(published))
    said = [r.message for r in caplog.records]
    assert said == ["its weights in FP8 become bfloat16 while they are read; activations are not quantised"]
