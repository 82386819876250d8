"""GGUF files: what they say is read as their makers meant it, and what is damaged or unknown is refused in one line."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from hydrainfer.checkpoint import locate
from hydrainfer.checkpoint.gguf import folder as folder_room
from hydrainfer.checkpoint.gguf import read_gguf
from hydrainfer.checkpoint.gguf.config import text_json
from hydrainfer.core import CheckpointError, Role
from hydrainfer.families import read_config
from hydrainfer.models import load_model
from hydrainfer.processor import load_description
from tests.caches import take_own_cache
from tests.checkpoints import make_llava
from tests.checkpoints_text import make_text
from tests.gguf_files import AS_PUBLISHED, spell_as_published, write_text, write_vision

pytestmark = pytest.mark.cpu
TEXTS = (
    "It's 12345 o'clock; WE'LL see.\n\n  def f(x):\n\treturn x  # é, 色, \U0001f600\r\n ",
    " leading and trailing  ",
    "",
    "<s>not a turn</s> <|im_start|>user\nhello<|im_end|>",
    "١٢٣ ½ ² don't DON'T ça c'est l'été",
)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        take_own_cache(patch, tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return write_text(make_text(folder / "checkpoint", "llama"), folder / "tiny.gguf", "Q8_0")


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    checkpoint = make_llava(folder / "checkpoint")
    return checkpoint, write_text(checkpoint, folder / "model.gguf"), write_vision(checkpoint, folder / "mmproj.gguf")


def complaint(path, load=False, **options) -> str:
    with pytest.raises(CheckpointError) as e:
        folder = locate(str(path), **options)
        read_config(folder)
        load_description(folder)
        if load:
            load_model(folder, Role.parse("PD"))
    assert "\n" not in e.value.message
    return e.value.message


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_the_configuration_and_the_tokenizer_are_the_checkpoints(tmp_path, kind):
    made = make_text(tmp_path / "checkpoint", kind, **(AS_PUBLISHED if kind == "gemma3" else {}))
    checkpoint = spell_as_published(made)
    folder = locate(str(write_text(checkpoint, tmp_path / "model.gguf")))
    mine, its = read_config(folder), read_config(checkpoint)
    alike = "LlamaForCausalLM" if kind == "mistral" else its.architecture  # nothing in a file tells them apart
    assert mine.architecture == alike and mine.dtype == its.dtype
    assert mine.text == its.text
    theirs, ours = load_description(checkpoint), load_description(folder)
    assert ours.eos_ids == theirs.eos_ids and ours.bos == theirs.bos
    for text in TEXTS:
        assert ours.tokenizer.encode(text).ids == theirs.tokenizer.encode(text).ids
    assert ours.vocabulary.byte_level == theirs.vocabulary.byte_level
    assert ours.vocabulary.n_strip == theirs.vocabulary.n_strip


def test_the_folder_is_made_once_and_again_for_another_file(llama, tmp_path):
    first = locate(str(llama))
    assert first.name == "tiny" and locate(str(llama)) == first
    assert sorted(p.name for p in first.parent.iterdir()) == ["tiny"]
    copy = tmp_path / "tiny.gguf"
    copy.write_bytes(llama.read_bytes())
    assert locate(str(copy)) != first
    link = tmp_path / "link.gguf"
    link.symlink_to(llama)
    assert locate(str(link)) == first


def test_eyes_take_the_unknown_tokens_place_where_there_is_no_other(llava, tmp_path):
    checkpoint, text, vision = llava
    assert read_config(locate(str(text), mmproj=str(vision))).media_tokens == read_config(checkpoint).media_tokens
    data = text.read_bytes()
    older = tmp_path / "older.gguf"
    older.write_bytes(data.replace(b"<image>", b"<emagi>"))
    folder = locate(str(older), mmproj=str(vision))
    assert read_config(folder).media_tokens == (0,)
    description = load_description(folder)
    assert description.images.placeholder == "<image>"
    assert description.tokenizer.encode("a \U00012345 b", add_special_tokens=False).ids.count(0) == 0


def rewritten(source, out, tensors=None, /, **changes):
    """The file with other fields and tensors; None leaves one out."""
    reader, architecture = gguf.GGUFReader(source), read_gguf(source).architecture
    writer = gguf.GGUFWriter(out, changes.pop("architecture", architecture))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value, (kind, *inner) = changes.pop(name, field.contents()), field.types
        if value is not None:
            writer.add_key_value(name, value, kind, sub_type=inner[0] if inner else None)
    for name, value in changes.items():
        if value is not None:
            writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(name, value)
    for tensor in reader.tensors:
        if tensor.name not in changes:
            data, kind = (tensors or {}).get(tensor.name, (tensor.data, tensor.tensor_type))
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


WRONG = {
    "mamba": ({"architecture": "mamba"}, "architecture 'mamba' is not supported; supported: llama, qwen2"),
    "no layers": ({"llama.block_count": None}, "llama.block_count is missing"),
    "no heads": ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0"),
    "many layers": ({"llama.block_count": 9999}, "num_hidden_layers is 9999; it must be"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported; supported: linear, llama3"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
    "few scores": ({"tokenizer.ggml.scores": [0.0, 1.0]}, "tokenizer.ggml.scores has 2 of"),
    "wordpiece": ({"tokenizer.ggml.model": "bert"}, "a tokenizer of type 'bert' is not supported; supported: llama"),
    "unknown words": ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "viking"}, "'viking' is not supported"),
    "parts": ({"split.count": 3}, "is one of 3 parts; join them with llama-gguf-split --merge"),
    "widths": ({"llama.attention.value_length": 8}, "of different widths"),
    "missing": ({"blk.1.ffn_up.weight": None}, "1 tensors are missing, first"),
    "eyes alone": ({"architecture": "clip"}, "holds vision weights only; give the language model"),
}


@pytest.mark.parametrize("name", WRONG)
def test_unsupported_features_of_a_gguf_file_are_named(llama, tmp_path, name):
    changes, wanted = WRONG[name]
    assert wanted in complaint(rewritten(llama, tmp_path / "wrong.gguf", **changes), load=True)


LINEAR = {"rope_type": "linear", "factor": 4.0}
PLAIN = {"rope_type": "default"}
SCALED = [  # as llama.cpp reads them
    ({}, PLAIN),
    ({"type": "linear", "factor": 4.0}, LINEAR),
    ({"factor": 4.0}, LINEAR),
    ({"scale_linear": 4.0}, LINEAR),
    ({"factor": 4.0, "scale_linear": 2.0}, LINEAR),
    ({"type": "linear", "scale_linear": 4.0}, LINEAR),
    ({"type": "linear"}, PLAIN),
    ({"factor": 0.0, "scale_linear": 4.0}, PLAIN),
    ({"scale_linear": 1.0}, PLAIN),
    ({"type": "none", "factor": 4.0}, PLAIN),
    ({"type": "linear", "factor": 4.0, "attn_factor": 1.0}, LINEAR),
]


def scaled(llama, out, scaling):
    fields = {f"rope.{'' if name == 'scale_linear' else 'scaling.'}{name}": v for name, v in scaling.items()}
    return write_text(llama.parent / "checkpoint", out, **fields)


@pytest.mark.parametrize(("scaling", "rope"), SCALED, ids=str)
def test_positions_are_scaled_as_llama_cpp_scales_them(llama, tmp_path, scaling, rope):
    file = read_gguf(scaled(llama, tmp_path / "scaled.gguf", scaling))
    parameters = text_json(file)["rope_parameters"]
    assert {name: value for name, value in parameters.items() if name != "rope_theta"} == rope


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ({"attn_factor": 1.5}, "rope.scaling.attn_factor 1.5 is not supported; supported: 1"),
        ({"scale_linear": -4.0}, "llama.rope.scale_linear is -4.0; it must be a number, at least 0"),
        ({"type": "longrope", "factor": 4.0}, "rope scaling 'longrope' is not supported; supported: linear, llama3"),
    ],
)
def test_another_scaling_of_positions_is_refused(llama, tmp_path, scaling, says):
    assert says in complaint(scaled(llama, tmp_path / "scaled.gguf", scaling))


def test_a_folder_converted_from_gguf_is_made_anew_when_the_code_changes(llama, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = folder_room.unpack(llama)
    assert folder_room.unpack(llama) == first
    package = shutil.copytree(Path(folder_room.__file__).parent, tmp_path / "package")
    (package / "config.py").write_text((package / "config.py").read_text() + "\n")
    monkeypatch.setattr(folder_room, "__file__", str(package / "folder.py"))
    assert folder_room.unpack(llama) != first


@pytest.mark.parametrize("count", [0, 1])
def test_a_file_whose_parts_were_joined_is_read(llama, tmp_path, count):
    """`llama-gguf-split --merge` leaves a count of 0."""
    assert read_gguf(rewritten(llama, tmp_path / "joined.gguf", **{"split.count": count})).tensors


def test_eyes_that_do_not_fit(llama, llava, tmp_path):
    checkpoint, text, vision = llava
    assert "takes no --mmproj, which is for GGUF files" in complaint(checkpoint, mmproj=str(vision))
    assert "is no file of vision weights" in complaint(text, mmproj=str(llama))
    assert "no such file" in complaint(text, mmproj=str(tmp_path / "nothing.gguf"))
    qwen = rewritten(vision, tmp_path / "qwen.gguf", **{"clip.projector_type": "qwen2vl_merger"})
    assert "projector of type 'qwen2vl_merger' is not supported; supported: mlp" in complaint(text, mmproj=str(qwen))


def test_no_damage_goes_unnoticed_or_is_anything_but_one_line(llama, tmp_path):
    data, file, rng = llama.read_bytes(), tmp_path / "damaged.gguf", random.Random(1)
    for cut in (0, 3, 4, 8, 23, 24, 1000, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:cut])
        assert "damaged.gguf" in complaint(file)
    file.write_bytes(b"GGUF" + struct.pack("<I", 4) + data[8:])
    assert "is GGUF of version 4; supported: 2 or 3" in complaint(file)
    read = 0
    for _ in range(400):
        damaged = bytearray(data[: len(data) // 3])
        for _ in range(rng.randint(1, 4)):
            at = rng.choice((rng.randrange(600), rng.randrange(len(damaged))))
            damaged[at : at + rng.choice((1, 4, 8))] = rng.choice((b"\xff" * 8, b"\0", b"\x09\0\0\0", b"\x80"))
        file.write_bytes(bytes(damaged) + data[len(damaged) :])
        try:
            locate(str(file))
            read += 1
        except CheckpointError as e:
            assert "\n" not in e.message
    assert read < 400


def test_kinds_without_a_dequantiser_are_refused(llama, tmp_path):
    kind, name = gguf.GGMLQuantizationType.Q8_1, "blk.0.attn_v.weight"
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, inner = read_gguf(llama).tensors[name].shape
    tensors = {name: (np.zeros((rows, inner // n_values * n_bytes), np.uint8), kind)}
    file = rewritten(llama, tmp_path / "q8_1.gguf", tensors)
    wanted = "v_proj.weight has type Q8_1, which is not supported"
    assert wanted in complaint(file, load=True)
