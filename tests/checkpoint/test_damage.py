"""Whatever stands in a configuration instead of what should: it is read, or refused in one line."""

from __future__ import annotations

import json
from itertools import product

import pytest

from hydrainfer.core import CheckpointError
from hydrainfer.families import FAMILIES, read_config
from hydrainfer.planner.inputs import shape_of
from tests.damage import damages

pytestmark = pytest.mark.cpu
PREPROCESSING = {
    "crop_size": {"height": 336, "width": 336},
    "do_rescale": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_pixels": 99999,
    "merge_size": 2,
    "min_pixels": 3136,
    "patch_size": 14,
    "resample": 3,
    "rescale_factor": 0.004,
    "size": {"shortest_edge": 336},
    "temporal_patch_size": 2,
}


SIZES = {
    **{name: {"height": n, "width": n} for name, n in (("Gemma3", 224), ("InternVL", 448), ("LlavaOnevision", 384))},
    **{key: {"longest_edge": 999} for key in ("SmolVLM", "Idefics3", "Mistral3", "LightOnOcr")},
}
"""The size of pictures that a family's classes take, where it is not that of `PREPROCESSING`."""


def preprocessing(architecture):
    size = SIZES.get(architecture.partition("For")[0], PREPROCESSING["size"])
    more = {"crop_size": size} if "height" in size else {}
    if architecture == "SmolVLMForConditionalGeneration":
        more = {"video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 384}}}
    return PREPROCESSING | {"size": size} | more


def whole_config(architecture):
    """config.json with every field that transformers knows; where its defaults do not fit together, with some that
    do."""
    import transformers

    content = getattr(transformers, architecture).config_class().to_dict() | {"architectures": [architecture]}
    if architecture.startswith("Qwen") and "vision_config" in content:
        width = "hidden_size" if architecture.startswith("Qwen2VL") else "out_hidden_size"
        content["vision_config"] |= {width: content["text_config"]["hidden_size"], "patch_size": 14}
    if architecture.startswith("Glm") and "vision_config" in content:
        text = content["text_config"]
        content["vision_config"]["out_hidden_size"] = text["hidden_size"]
        text["rope_parameters"] |= {"mrope_section": [8, 12, 12]}
        if architecture != "GlmOcrForConditionalGeneration":
            text["rope_parameters"]["partial_rotary_factor"], text["head_dim"] = 0.5, 128
    if architecture == "Lfm3VlForConditionalGeneration":
        content["vision_config"]["patch_size"] = 14
    if architecture == "Gemma3ForConditionalGeneration":
        content["mm_tokens_per_image"] = 49  # of 14 x 14 patches
    if architecture in ("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration"):
        content["vision_config"] |= {"image_size": 364, "patch_size": 14}
    if architecture == "Gemma4ForConditionalGeneration":
        content["vision_config"] = transformers.Gemma4VisionConfig(patch_size=14).to_dict()
    if architecture == "Lfm2MoeForCausalLM":
        content["layer_types"] = ["conv", "full_attention"] * 16
    if architecture == "GraniteMoeHybridForCausalLM":
        content |= {"layer_types": ["full_attention"] * 32, "num_local_experts": 0}
    return json.loads(json.dumps(content, default=str))


@pytest.mark.parametrize("n", [20, pytest.param(10_000, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize(
    ("file", "architecture"),
    [
        *product(("config.json", "preprocessor_config.json"), FAMILIES),
        *(("video_preprocessor_config.json", name) for name, family in FAMILIES.items() if family.videos),
    ],
)
def test_damage_is_refused_in_one_line_or_does_not_matter(tmp_path, architecture, file, n):
    files = {"config.json": whole_config(architecture), "preprocessor_config.json": preprocessing(architecture)}
    if file not in files:
        files[file] = preprocessing(architecture)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    read_config(tmp_path)
    readers = (read_config, shape)
    for words, content in damages(files[file], n, seed=len(architecture)):
        (tmp_path / file).write_text(json.dumps(content))
        for read in readers:
            try:
                read(tmp_path)
            except CheckpointError as e:
                assert "\n" not in e.message and len(e.message) < len(str(tmp_path)) + 1000, words
            except Exception as e:
                pytest.fail(f"{words}: {type(e).__name__}: {e}")


def test_a_number_of_experts_under_another_name_is_refused_too(tmp_path):
    """transformers keeps `num_local_experts` as `n_routed_experts`, unchecked."""
    content = whole_config("MiMoV2FlashForCausalLM") | {"num_local_experts": None}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="of None experts"):
        read_config(tmp_path)


def test_null_where_there_need_be_no_list_of_layers_is_as_if_left_out(tmp_path):
    content = whole_config("Qwen3_5MoeForCausalLM")
    (tmp_path / "config.json").write_text(json.dumps(content))
    usual = read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(content | {"decoder_sparse_step": None, "mlp_only_layers": None}))
    assert read_config(tmp_path) == usual


def shape(path):
    return shape_of(str(path))
