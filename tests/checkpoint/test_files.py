"""Every number of a checkpoint's files that is out of range is named, before anything is computed from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from hydrainfer.checkpoint import find_json, preprocessing, read_json, weight_files
from hydrainfer.core import CheckpointError
from hydrainfer.families import FAMILIES, architecture_of

pytestmark = pytest.mark.unit

CLIP = {
    "hidden_size": 64,
    "image_size": 56,
    "intermediate_size": 128,
    "layer_norm_eps": 1e-5,
    "num_attention_heads": 2,
    "num_channels": 3,
    "num_hidden_layers": 3,
    "patch_size": 14,
}
TEXT = {
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 160,
    "max_position_embeddings": 4096,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 1024},
    "vocab_size": 2048,
}
MROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}
QWEN = {
    "depth": 4,
    "in_channels": 3,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "tokens_per_second": 2,
}
SEEN = {"image_token_id": 9, "video_token_id": 8, "vision_start_token_id": 7, "vision_end_token_id": 6}
PICTURES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "resample": 3, "rescale_factor": 0.004}
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": (
        "config.json",
        {"text_config": TEXT, "vision_config": CLIP, "image_token_index": 9, "vision_feature_layer": -2},
    ),
    "llava_next": (
        "config.json",
        {"text_config": TEXT, "vision_config": CLIP, "image_grid_pinpoints": [[56, 112]], "image_token_index": 9},
    ),
    "qwen2_vl": (
        "config.json",
        {**TEXT, **SEEN, "rope_scaling": MROPE, "vision_config": {**QWEN, "embed_dim": 32, "mlp_ratio": 4}},
    ),
    "qwen2_5_vl": (
        "config.json",
        {
            **TEXT,
            **SEEN,
            "vision_config": {**QWEN, "window_size": 112, "fullatt_block_indexes": [1], "out_hidden_size": 64},
        },
    ),
    "qwen3_vl": (
        "config.json",
        {
            "text_config": TEXT,
            "vision_config": {**QWEN, "num_position_embeddings": 64, "deepstack_visual_indexes": [1]},
        },
    ),
    "text only": ("config.json", {**TEXT, "eos_token_id": 2, "sliding_window": 4096}),
    "clip pictures": (
        "preprocessor_config.json",
        {**PICTURES, "crop_size": {"height": 56, "width": 56}, "size": {"shortest_edge": 56}},
    ),
    "qwen pictures": (
        "preprocessor_config.json",
        {**PICTURES, "max_pixels": 9999, "merge_size": 2, "min_pixels": 99, "patch_size": 14, "temporal_patch_size": 2},
    ),
    "videos": ("video_preprocessor_config.json", {"fps": 2, "max_frames": 768, "min_frames": 4, "num_frames": 8}),
    "both": ("processor_config.json", {"image_processor": PICTURES, "video_processor": {"size": {"longest_edge": 99}}}),
    "generation": (
        "generation_config.json",
        {"eos_token_id": 2, "min_p": 0.1, "repetition_penalty": 1.1, "temperature": 0.5, "top_k": 5, "top_p": 0.9},
    ),
}
DAMAGE = (-(2**40), 2**70, "7", "", True, [], {}, [[]], float("nan"), float("inf"))
SIGNED = {"image_mean", "sliding_window", "min_p", "repetition_penalty", "temperature", "top_k", "top_p"}
FRACTIONS = {
    *("factor", "fps", "image_mean", "image_std", "layer_norm_eps", "min_p", "mlp_ratio", "repetition_penalty"),
    *("rescale_factor", "rms_norm_eps", "rope_theta", "temperature", "tokens_per_second", "top_p"),
}
LISTS = {"eos_token_id", "fullatt_block_indexes", "deepstack_visual_indexes", "image_grid_pinpoints"}  # may be empty
MAY_BE_ZERO = {"eos_token_id", "layer_norm_eps", "resample", "rms_norm_eps", *SEEN, "image_token_index", *SIGNED}
MAY_BE_ZERO |= {"vision_feature_layer", "fullatt_block_indexes", "deepstack_visual_indexes", "mrope_section"}


def places(content: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The way to each number, or list of numbers."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from places(value, (*at, name))
        elif not isinstance(value, str):
            yield (*at, name)


def damaged(content: dict[str, Any], at: tuple[str, ...], value: object) -> dict[str, Any]:
    copy = json.loads(json.dumps(content))
    part = copy
    for name in at[:-1]:
        part = part[name]
    inner = part[at[-1]]
    part[at[-1]] = value
    if isinstance(inner, list) and not isinstance(value, list | dict | str):
        part[at[-1]] = [value, *inner[1:]]  # one of its numbers
    return copy


@pytest.mark.parametrize("name", FILES)
def test_each_number_out_of_range_is_named_with_its_file(tmp_path, name):
    file, content = FILES[name]
    path = tmp_path / file
    path.write_text(json.dumps(content))
    assert read_json(path) == content
    for at in places(content):
        field = at[-1]
        values = [v for v in DAMAGE if not (v == [] and field in LISTS)]
        values += [0] if field not in MAY_BE_ZERO else []
        values += [-1] if field not in SIGNED | {"vision_feature_layer"} else []
        values += [0.5] if field not in FRACTIONS else []
        for value in values:
            path.write_text(json.dumps(damaged(content, at, value)))
            with pytest.raises(CheckpointError) as caught:
                read_json(path)
            message = caught.value.message
            assert message.startswith(f"{path}: {'.'.join(at)} is ") and "it must be " in message, (at, value)
            assert "\n" not in message and len(message) < len(str(path)) + 200, (at, value)


@pytest.mark.parametrize("section", ["text_config", "vision_config", "rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", [3, "x", [1]])
def test_a_section_that_is_no_object(tmp_path, section, value):
    (tmp_path / "config.json").write_text(json.dumps({section: value}))
    with pytest.raises(CheckpointError, match=rf"config\.json: {section} is .*; it must be an object"):
        read_json(tmp_path / "config.json")


def test_unknown_fields_and_null_where_it_means_the_default(tmp_path):
    content = {"num_key_value_heads": None, "head_dim": None, "hidden_act": 7, "max_length": -1, "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read_json(tmp_path / "config.json") == content
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": None}))
    with pytest.raises(CheckpointError, match="hidden_size is null"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("at", [(), ("text_config",), ("vision_config",)])
@pytest.mark.parametrize("value", [True, False])
def test_transformers_switch_of_who_sees_whom_is_refused(tmp_path, at, value):
    content = {name: {"is_causal": value} for name in at} or {"is_causal": value}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"is_causal is (true|false); it must be left out"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\xff", "[" * 100_000, '{"a":' * 100_000])
def test_a_json_file_that_is_no_object_is_damaged(tmp_path, text):
    (tmp_path / "config.json").write_text(text, "latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        read_json(tmp_path / "config.json")


def test_a_path_that_is_no_file_is_refused(tmp_path):
    assert find_json(tmp_path / "config.json") is None
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        find_json(tmp_path / "config.json")


def test_each_place_of_preprocessing(tmp_path):
    assert preprocessing(tmp_path) is None
    both = {
        "image_processor": {"do_pad": None, "pad_size": None, "size": {"height": 3, "width": None}},
        "video_processor": {"fps": 2},
    }
    (tmp_path / "preprocessor_config.json").write_text('{"resample": 3}')
    assert preprocessing(tmp_path) == preprocessing(tmp_path, "video") == {"resample": 3}
    (tmp_path / "video_preprocessor_config.json").write_text('{"fps": 4}')
    assert (preprocessing(tmp_path), preprocessing(tmp_path, "video")) == ({"resample": 3}, {"fps": 4})
    (tmp_path / "processor_config.json").write_text(json.dumps(both))
    assert (preprocessing(tmp_path), preprocessing(tmp_path, "video")) == (
        {"do_pad": False, "size": {"height": 3}},
        {"fps": 2},
    )


@pytest.mark.parametrize("architectures", [None, [], ...], ids=["null", "empty", "missing"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_type_decides_where_no_architecture_is_named(tmp_path, name, architectures):
    content = {"model_type": FAMILIES[name].model_type} | (
        {} if architectures is ... else {"architectures": architectures}
    )
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert architecture_of(tmp_path) == name


def test_the_first_supported_architecture_counts(tmp_path):
    content = {"model_type": "llava", "architectures": ["LlavaForNothing", "LlavaForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert architecture_of(tmp_path) == "LlavaForConditionalGeneration"


def test_weights_under_a_name_of_their_own_are_refused(tmp_path):
    content = {"model_type": "llava", "transformers_weights": "other.safetensors"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="transformers_weights 'other"):
        architecture_of(tmp_path)


def test_one_whole_file_of_weights_comes_before_an_index(tmp_path):
    """Merged and saved again, a checkpoint may still have the index of its former shards."""
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="1 of 1 weight files are missing"):
        weight_files(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert [file.name for file in weight_files(tmp_path)] == ["model-00001-of-00002.safetensors"]
    (tmp_path / "model.safetensors").touch()
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]
