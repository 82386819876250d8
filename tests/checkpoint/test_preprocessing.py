"""Preprocessor configurations: every family's are read by one reader, and refused alike whoever asks."""

from __future__ import annotations

import json
from pkgutil import resolve_name

import pytest

from hydrainfer.core import CheckpointError
from hydrainfer.families import FAMILIES, read_config
from hydrainfer.planner.inputs import prompts_of, shape_of
from hydrainfer.processor import load_description
from tests.checkpoint.test_damage import PREPROCESSING, whole_config

pytestmark = pytest.mark.cpu
CLIPS, GEMMAS, TILED = ("Llava", "LlavaNext"), ("Gemma3",), ("SmolVLM", "Idefics3", "InternVL", "LlavaOnevision")
GLMS = ("Glm4v", "Glm46V", "Glm4vMoe", "GlmOcr")
OTHERS = ("Gemma4", "Mistral3", "LightOnOcr", *GLMS)
QWENS = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5", "Qwen3VLMoe", "Qwen3_5Moe", "Lfm3Vl")
READERS = (read_config, load_description, lambda path: shape_of(str(path)), lambda path: prompts_of(str(path)))
POINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


@pytest.fixture
def write(tmp_path):
    """`write(name, preprocessing)` → a directory that holds the configuration of a family, and this one."""

    def write(name, preprocessing, **config):
        content = whole_config(f"{name}ForConditionalGeneration") | config
        (tmp_path / "config.json").write_text(json.dumps(content))
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessing))
        return tmp_path

    return write


def test_every_family_that_sees_is_here():
    seeing = {name for name, family in FAMILIES.items() if family.pictures}
    assert seeing == {f"{name}ForConditionalGeneration" for name in (*CLIPS, *QWENS, *GEMMAS, *TILED, *OTHERS)}


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_and_pictures_that_a_family_names_can_be_imported(name):
    family = FAMILIES[name]
    assert bool(family.tower) == (family.vision is not None) == bool(family.pictures)
    assert all(callable(resolve_name(made)) for made in (family.tower, family.pictures, family.videos) if made)


@pytest.mark.parametrize("name", [*CLIPS, *QWENS])
def test_null_is_as_transformers_has_it_and_what_is_left_out_has_a_default(write, name):
    """A switch that is null is off. A null where a value is needed is refused, as by transformers."""
    size = {"shortest_edge": 336} if name in CLIPS else {"shortest_edge": 336, "longest_edge": 9999}
    given = PREPROCESSING | {"size": size, "image_grid_pinpoints": POINTS}
    for field in ("do_resize", "do_normalize", "do_rescale", "do_center_crop", "do_pad"):
        answers = []
        for value in (None, False):
            try:
                answers.append(read_config(write(name, given | {field: value})))
            except CheckpointError as e:
                answers.append(e.message)
        assert answers[0] == answers[1], field
    switches = {"resample": "resize", "rescale_factor": "rescale", "image_mean": "normalize", "image_std": "normalize"}
    for field, switch in switches.items():
        with pytest.raises(CheckpointError, match=f"{field} is null"):
            read_config(write(name, given | {field: None}))
        if switch != "resize":
            read_config(write(name, given | {field: None, f"do_{switch}": False}))
    needed = {"size", "crop_size"} if name in CLIPS else {"patch_size", "merge_size", "temporal_patch_size"}
    for field in ["fps", "max_frames", "min_pixels", "max_pixels", "pad_size", "data_format"]:
        if field not in needed:
            without = read_config(write(name, {k: v for k, v in given.items() if k != field}))
            assert read_config(write(name, given | {field: None})) == without, field
    spelled = given["size"] | {"height": None, "width": None, "max_pixels": None}
    assert read_config(write(name, given | {"size": spelled})) == read_config(write(name, given))
    silent = {k: v for k, v in given.items() if k in needed}
    if name in QWENS and not name.startswith("Qwen2"):  # whose videos have other defaults than its pictures
        with pytest.raises(CheckpointError, match="normalises frames otherwise than pictures"):
            read_config(write(name, silent))
        return
    default = read_config(write(name, silent)).vision
    pixels = default.tower.pixels if name == "LlavaNext" else default.pixels
    assert pixels.mean == (0.48145466, 0.4578275, 0.40821073) and pixels.std[0] == 0.26862954
    assert (pixels.scale, pixels.resample) == (1 / 255, 3)


WRONG = {
    "mean": ({"image_mean": "grey"}, 'image_mean is "grey"; it must be a list of 3'),
    "deviation": ({"image_std": [0, 1, 1]}, "image_std is [0, 1, 1]; it must be a list of 3"),
    "switch": ({"do_normalize": "no"}, 'do_normalize is "no"; it must be true or false, or null'),
    "filter": ({"resample": 9}, "resample is 9; it must be a whole number from 0 to 5"),
    "scale": ({"rescale_factor": 0}, "rescale_factor is 0; it must be"),
    "size": ({"size": "big"}, 'size is "big"; it must be'),
    "edge": ({"size": {"shortest_edge": -1}}, "size.shortest_edge is -1; it must be"),
}
OF_CLIP = {
    "half a size": ({"size": {"height": 336}}, "size must give shortest_edge, or height and width"),
    "no size": ({"size": {}}, "size must give shortest_edge, or height and width"),
    "half a crop": ({"crop_size": {"width": None, "height": 336}}, "crop_size must give height and width"),
    "other crop": ({"crop_size": 28}, "(28, 28)"),
}
OF_LLAVA = {
    "no size for a switch": ({"size": None}, "preprocessor_config.json: size is null; give it a value"),
    "no crop for a switch": ({"crop_size": None}, "preprocessor_config.json: crop_size is null; give it a value"),
    "a longest edge": ({"size": {"shortest_edge": 336, "longest_edge": 400}}, "size.longest_edge is not supported"),
    "any size": ({"do_center_crop": False}, "makes pictures of varying pixels"),
}
OF_QWEN = {
    "one size": ({"size": 336}, "size must give shortest_edge and longest_edge"),
    "other patches": ({"patch_size": 7}, "has patch, merge and temporal patch sizes (7, 2, 2), the vision tower"),
}
OF_GEMMA = {
    "any size": ({"size": {"shortest_edge": 224}}, "makes pictures of varying pixels"),
    "other size": ({"size": {"height": 224, "width": 28}}, "makes pictures of (224, 28) pixels"),
    "crops": ({"do_pan_and_scan": True}, "do_pan_and_scan true is not supported; supported: false"),
}
CASES = [
    *((name, case) for name in (*CLIPS, *QWENS, *GEMMAS, *TILED, *GLMS) for case in WRONG.values()),
    *(("Gemma3", case) for case in OF_GEMMA.values()),
    *((name, case) for name in CLIPS for case in OF_CLIP.values()),
    *(("Llava", case) for case in OF_LLAVA.values()),
    *((name, case) for name in QWENS for case in OF_QWEN.values()),
]


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda v: v if isinstance(v, str) else next(iter(v[0])))
def test_a_wrong_value_gives_the_same_error_to_every_reader(write, name, case):
    changes, says = case
    path, messages = write(name, PREPROCESSING | changes), set()
    for read in READERS:
        with pytest.raises(CheckpointError) as caught:
            read(path)
        messages.add(caught.value.message)
    (message,) = messages
    assert says in message and "preprocessor_config.json" in message and "\n" not in message


@pytest.mark.parametrize(("strategy", "n"), [("default", 576), ("full", 577)])
def test_tokens_per_picture(write, strategy, n):
    path = write("Llava", PREPROCESSING, vision_feature_select_strategy=strategy)
    assert prompts_of(str(path)).picture(100, 30) == read_config(path).vision.tokens == n


@pytest.mark.parametrize("name", [*CLIPS, *QWENS, *GEMMAS, *TILED, *GLMS])
def test_without_a_file_pictures_are_made_as_the_tower_takes_them(write, name):
    path = write(name, PREPROCESSING)
    (path / "preprocessor_config.json").unlink()
    assert shape_of(str(path)).vision.picture_tokens > 0
