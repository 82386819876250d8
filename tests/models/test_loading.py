"""Reading checkpoints: roles, shards, names, dtypes, progress, and one clear line for each thing that is wrong."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

from hydrainfer.core import CheckpointError, Role
from hydrainfer.families import read_config
from hydrainfer.models import fingerprint, load_model
from tests.checkpoints import make_llava
from tests.checkpoints_next import make_llava_next
from tests.checkpoints_text import make_text

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("sharded"), shards=4, published_names=False)


@pytest.fixture
def broken(published, tmp_path):
    """A copy to damage."""
    return shutil.copytree(published, tmp_path / "broken")


def edit(path, **changes):
    """Change fields of config.json; a dict is merged into a section, None removes."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    for key, value in changes.items():
        if isinstance(value, dict):
            config[key] |= value
        elif value is None:
            config.pop(key)
        else:
            config[key] = value
    file.write_text(json.dumps(config))


def weights(model):
    return {name: slot.into for name, slot in model.slots().items()}


@pytest.mark.parametrize("role", ["E", "P", "D", "EP", "ED", "PD", "EPD"])
def test_a_role_loads_only_what_it_needs(published, role):
    model = load_model(published, Role.parse(role))
    names = model.slots().keys()
    assert any(n.startswith(("vision.", "projector.")) for n in names) == ("E" in role)
    assert any(n.startswith(("text.", "lm_head.")) for n in names) == ("P" in role or "D" in role)
    specs = {s.name for s in model.cache_specs()}
    assert specs == {n for n, on in (("embed", "E" in role or "P" in role), ("kv", role != "E")) if on}


def test_shards_and_spellings_give_the_same_weights(published, sharded):
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, other = (weights(load_model(p, Role.parse("EPD"))) for p in (published, sharded))
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    assert fingerprint(published) == fingerprint(sharded)


def test_fingerprint_changes_with_any_weight_and_with_the_configuration(published, tmp_path):
    from safetensors.torch import load_file, save_file

    assert len(fingerprint(published)) == 16
    for name in ("language_model.model.norm.weight", "multi_modal_projector.linear_1.weight"):
        path = shutil.copytree(published, tmp_path / name)
        assert fingerprint(path) == fingerprint(published)
        tensors = load_file(path / "model.safetensors")
        tensors[name] = tensors[name] * 2
        save_file(tensors, path / "model.safetensors")
        assert fingerprint(path) != fingerprint(published)
    config = read_config(published)
    other = replace(config, text=replace(config.text, norm_eps=config.text.norm_eps * 2))
    assert fingerprint(published, other) != fingerprint(published, config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_are_cast_on_load(published, dtype):
    want = weights(load_model(published, Role.parse("EPD")))
    got = weights(load_model(published, Role.parse("EPD"), dtype=dtype))
    for name, tensor in got.items():
        assert tensor.dtype == getattr(torch, dtype) and torch.equal(tensor, want[name].to(tensor.dtype)), name


def test_vision_layers_past_the_used_one_are_skipped(published):
    config = read_config(published)
    assert config.vision.layers == 3 and config.vision.features == (2,)
    assert not any("layers.2." in n for n in load_model(published, Role.parse("E")).slots())


def test_progress_ends_at_the_total(published):
    seen = []
    model = load_model(published, Role.parse("EPD"), on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (model.weight_bytes, model.weight_bytes)
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)


def test_defaults_fill_a_sparse_config(broken):
    """llava-1.5-7b-hf's text_config lists only what differs from Llama's defaults."""
    config = json.loads((broken / "config.json").read_text())
    config["text_config"] = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    (broken / "config.json").write_text(json.dumps(config))
    text = read_config(broken).text
    assert (text.hidden, text.layers, text.heads, text.kv_heads, text.head_dim) == (4096, 32, 32, 32, 128)
    assert text.rope.theta == 10000.0


def test_the_old_spelling_of_rope_scaling(broken):
    edit(broken, text_config={"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}})
    rope = read_config(broken).text.rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 10000.0)


def complaint(path, role="EPD", **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(path, Role.parse(role), **options)
    assert "\n" not in caught.value.message and len(caught.value.message) < 800
    return caught.value.message


def test_no_directory(tmp_path):
    assert "no such directory" in complaint(tmp_path / "nothing")


def test_a_file_instead_of_a_directory(published):
    assert "is not a directory" in complaint(published / "config.json")


def test_no_config(tmp_path):
    assert "config.json is missing" in complaint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_broken_config(broken, text):
    (broken / "config.json").write_text(text, "latin-1")
    assert "config.json" in complaint(broken)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["Qwen9ForCausalLM"]}, ["Qwen9ForCausalLM", "nearest: Qwen"]),
        ({"architectures": None, "model_type": "bert"}, ["bert", "nearest: "]),
        ({"vision_feature_layer": 9}, ["vision_feature_layer 9", "3 layers"]),
        ({"vision_feature_select_strategy": "average"}, ["average"]),
        ({"projector_hidden_act": "mish"}, ["mish", "supported"]),
        ({"text_config": {"hidden_act": "gelu"}}, ["gelu", "supported: silu"]),
        ({"text_config": {"model_type": "gemma"}}, ["gemma", "nearest: ", "gemma3_text, "]),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, ["siglip", "supported: clip"]),
        (
            {"text_config": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}},
            ["dynamic", "supported: default, linear, llama3"],
        ),
        ({"text_config": {"hidden_size": 128}}, ["has shape", "config.json wants"]),
        ({"text_config": {"num_hidden_layers": 3}}, ["missing", "layers.2"]),
        ({"text_config": {"num_hidden_layers": -1}}, ["config.json: text_config.num_hidden_layers is -1"]),
        ({"text_config": {"hidden_size": 2**40}}, ["config.json: text_config.hidden_size is 1099511627776"]),
        ({"text_config": {"hidden_size": 2**20, "intermediate_size": 2**22}}, ["has shape", "config.json wants"]),
        (
            {"text_config": {"num_attention_heads": 2**20, "head_dim": None}},
            ["config.json is not valid", "attention heads"],
        ),
        ({"vision_config": {"num_attention_heads": 3}}, ["config.json is not valid", "heads (3)"]),
        ({"vision_config": {"patch_size": 0}}, ["config.json: vision_config.patch_size is 0"]),
        ({"vision_config": {"image_size": None}}, ["config.json: vision_config.image_size is null"]),
        ({"architectures": 5}, ["config.json: architectures is 5"]),
        ({"text_config": {"num_hidden_layers": "two"}}, ["config.json: text_config.num_hidden_layers is", "two"]),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_an_unsupported_or_wrong_config(broken, changes, words):
    edit(broken, **changes)
    message = complaint(broken)
    assert all(w in message for w in words), message


def test_an_unknown_dtype(published):
    assert "float8" in complaint(published, dtype="float8")


@pytest.mark.parametrize("keep", [0, 4, 2000, -1000])
def test_truncated_weights(broken, keep):
    file = broken / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    assert "truncated" in complaint(broken)


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 8]}}',
        b"[" * 100_000,
        b"[]",
    ],
)
def test_garbage_weights(broken, header):
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    (broken / "model.safetensors").write_bytes(data)
    assert "model.safetensors" in complaint(broken)


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../../../etc/passwd",
        "../other/model.safetensors",
        "a/../../model.safetensors",
        "/model.safetensors",
        *("config.json", "", ".safetensors/", "a\0.safetensors", "x" * 5000 + ".safetensors", 5, None, [], {}),
    ],
)
def test_an_index_names_files_of_its_directory_only(sharded, tmp_path, name, monkeypatch):
    path = shutil.copytree(sharded, tmp_path / "copy")
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    tensor = next(iter(content["weight_map"]))
    content["weight_map"][tensor] = name
    index.write_text(json.dumps(content))
    monkeypatch.setattr("hydrainfer.models.stored.read_header", lambda file: pytest.fail(f"{file} was opened"))
    message = complaint(path)
    assert index.name in message and f"weight_map.{tensor} is" in message


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", 3])
def test_an_index_without_files(sharded, tmp_path, weight_map):
    path = shutil.copytree(sharded, tmp_path / "copy")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "index.json: weight_map must be" in complaint(path)


@pytest.mark.parametrize("layout", ["shards", "one file"])
def test_files_may_be_links_that_lead_elsewhere(published, sharded, tmp_path, layout):
    """As in the Hugging Face cache: snapshots hold links to blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, file in enumerate((sharded if layout == "shards" else published).iterdir()):
        shutil.copy(file, blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    one, other = (weights(load_model(p, Role.parse("EPD"))) for p in (published, snapshot))
    assert all(torch.equal(one[n], other[n]) for n in one)
    assert fingerprint(snapshot) == fingerprint(published)


def test_no_weights_and_foreign_weights(broken):
    (broken / "model.safetensors").unlink()
    assert "no weight file" in complaint(broken)
    (broken / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin, which is not supported" in complaint(broken)


def test_a_missing_shard(sharded, tmp_path):
    path = shutil.copytree(sharded, tmp_path / "copy")
    next(path.glob("model-00002*")).unlink()
    assert "missing: model-00002" in complaint(path)


def test_a_missing_tensor(broken):
    from safetensors.torch import load_file, save_file

    tensors = load_file(broken / "model.safetensors")
    del tensors["language_model.model.norm.weight"]
    save_file(tensors, broken / "model.safetensors")
    assert "text.norm.weight" in complaint(broken)
    load_model(broken, Role.parse("E"))  # which does not need it


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """`texts(kind)` → a text-only checkpoint, made once."""
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = make_text(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return get


def test_a_text_only_model_has_no_tower_and_no_image_cache(texts):
    path = texts("qwen2")
    assert read_config(path).vision is None
    for role in ("EPD", "P", "PD", "E"):
        model = load_model(path, Role.parse(role))
        assert model.vision is None and (model.language is None) == (role == "E")
        assert [s.name for s in model.cache_specs()] == ([] if role == "E" else ["kv"])


def rewrite(path, changes):
    """Change fields of config.json; None removes."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def _ropes(**more):
    return {f"{kind}_attention": {"rope_type": "default", "rope_theta": 1e4, **more} for kind in ("full", "sliding")}


SLIDING = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1, "layer_types": None}


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("mistral", {"sliding_window": 0}, ["sliding_window 0", "null, or at least 1"]),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            ["dynamic", "supported: default, linear, llama3, yarn"],
        ),
        ("mimo", {"quantization_config": {"quant_method": "mxfp4"}}, ["quantised by mxfp4, which is not supported"]),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, ["quantised by awq, which is not supported"]),
        ("gpt_oss", {"num_experts_per_tok": 9}, ["num_experts_per_tok 9 of 8"]),
        ("mimo", {"n_group": 5}, ["12 experts in 5 groups"]),
        ("mimo", {"num_experts_per_tok": 7}, ["num_experts_per_tok 7 of 6"]),
        ("mimo", {"rope_parameters": _ropes()}, ["rope_parameters of full_attention lacks partial_rotary_factor"]),
        ("gemma3", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5 is not supported; supported: 1.0"]),
        ("lfm3", {"rope_parameters": _ropes(partial_rotary_factor=0.5)}, ["partial_rotary_factor 0.5 is not"]),
        ("lfm3", {"rope_parameters": {"rope_theta": 1e4}}, ["rope_parameters says nothing of full_attention"]),
        ("lfm3", {"conv_L_cache": -1}, ["config.json: conv_L_cache is -1"]),
        ("llama", {"hidden_act": "gelu"}, ["gelu", "supported: silu"]),
        ("llama", {"architectures": ["Qwen3ForCausalLM"]}, ["Qwen3ForCausalLM", "'llama'", "use qwen3"]),
        ("llama", {"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "nearest: "]),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_a_text_only_config_that_is_not_supported(texts, tmp_path, kind, changes, words):
    path = shutil.copytree(texts(kind), tmp_path / "broken")
    rewrite(path, changes)
    message = complaint(path)
    assert all(w in message for w in words), message


@pytest.mark.parametrize(
    ("kind", "changes", "windows"),
    [
        ("mistral", {"sliding_window": 4096}, (0, 0)),
        ("mistral", {"sliding_window": 1024, "max_position_embeddings": 1024}, (0, 0)),
        ("mistral", {"sliding_window": 1024}, (1024, 1024)),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64}, (0, 0)),
        ("qwen2", SLIDING, (0, 64)),
        ("qwen3", SLIDING | {"max_window_layers": 2}, (0, 0)),
        ("gemma3", {"sliding_window": 4096, "max_position_embeddings": 99}, (99, 99, 99, 0, 99)),
        ("gemma2", {"sliding_window": 64}, (64, 0, 64, 0)),
        ("gemma2", {"sliding_window": 4096}, (0, 0, 0, 0)),
    ],
)
def test_windows_by_layer(texts, tmp_path, kind, changes, windows):
    """A window that leaves nothing out is none, unless it is what tells layers apart."""
    path = shutil.copytree(texts(kind), tmp_path / "copy")
    rewrite(path, changes)
    model = load_model(path, Role.parse("PD"))
    assert model.config.text.windows == windows
    layers = {spec.window: spec.layers for spec in model.cache_specs()}
    assert layers == {w: tuple(i for i, other in enumerate(windows) if other == w) for w in windows}


def test_the_newline_of_llava_next_is_part_of_the_fingerprint(tmp_path):
    from safetensors.torch import load_file, save_file

    published, present = make_llava_next(tmp_path / "a"), make_llava_next(tmp_path / "b", published_names=False)
    before = fingerprint(published)
    assert before == fingerprint(present)
    tensors = load_file(published / "model.safetensors")
    tensors["image_newline"] = tensors["image_newline"] * 2
    save_file(tensors, published / "model.safetensors")
    assert fingerprint(published) != before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision_feature_select_strategy": "full"}, ["'full'", "LLaVA-NeXT"]),
        ({"image_grid_pinpoints": [[42, 80]]}, ["image_grid_pinpoints", "multiples", "42"]),
        ({"image_grid_pinpoints": [42, 84]}, ["image_grid_pinpoints", "pairs"]),
    ],
)
def test_a_llava_next_config_that_is_not_supported(tmp_path, changes, words):
    path = make_llava_next(tmp_path)
    edit(path, **changes)
    message = complaint(path)
    assert all(w in message for w in words), message


def test_the_published_configuration_of_llava_next(tmp_path):
    """As llava-v1.6-mistral-7b-hf lists it: what differs from the defaults."""
    text = {
        "model_type": "mistral",
        "max_position_embeddings": 32768,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "vocab_size": 32064,
    }
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    }
    config = {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "model_type": "llava_next",
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        "image_token_index": 32000,
        "projector_hidden_act": "gelu",
        "text_config": text,
        "torch_dtype": "float16",
        "use_image_newline_parameter": True,
        "vision_config": vision,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = read_config(tmp_path)
    assert (read.media_tokens, read.dtype) == ((32000,), "float16")
    assert (read.text.rope.theta, read.text.context, read.text.head_dim) == (1e6, 32768, 128)
    assert (read.text.heads, read.text.kv_heads, read.text.layers) == (32, 8, 32)
    assert read.vision.tokens == 576 + 48 * 49 and read.vision.tower.features == (23,)
