"""Pictures in tiles by ratio against transformers, whose classes InternVL uses."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from hydrainfer.checkpoint import TileSettings
from hydrainfer.core import CheckpointError, InvalidRequest
from hydrainfer.families import read_config
from hydrainfer.processor import MediaLimits
from hydrainfer.processor.pictures.media import from_image
from hydrainfer.processor.pictures.tiles import TileImages
from tests.families.internvl import SIDE, Processor, make_internvl
from tests.pillow import described

pytestmark = pytest.mark.cpu
SIZES = [
    (1, 1),
    (1, 60),
    (60, 1),
    (7, 5),
    (56, 56),
    (112, 56),
    (301, 211),
    (590, 40),
    (37, 290),
    (168, 168),
    (640, 480),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_internvl(tmp_path_factory.mktemp("internvl"))


@pytest.mark.parametrize("options", [{}, {"min_patches": 3, "max_patches": 6}, {"crop_to_patches": False}])
def test_squares_and_placeholders_are_those_of_transformers(checkpoint, options):
    """The file says that pictures are not cut, and the class says that they are; and the whole picture is the last
    square."""
    saved = json.loads((checkpoint / "preprocessor_config.json").read_text())
    assert saved["crop_to_patches"] is False
    processor = Processor.from_pretrained(checkpoint)
    adapter = described(checkpoint).images.adapter.configured(options)
    mean, std = np.float32(adapter.settings.mean), np.float32(adapter.settings.std)
    for width, height in SIZES:
        noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
        made = processor(text="<IMG_CONTEXT>", images=[Image.fromarray(noise)], **options)
        want = np.stack([np.asarray(square) for square in made["pixel_values"]])  # [squares, 3, height, width]
        pixels = adapter.pixels(from_image(Image.fromarray(noise), MediaLimits()))
        ours = (np.float32(pixels) * np.float32(1 / 255) - mean) / std
        assert ours.shape[0] == len(want) and np.allclose(ours, want.transpose(0, 2, 3, 1), atol=1e-5), (width, height)
        item = adapter.fit(width, height)
        assert item.n_tokens == 4 * len(want) == len(made["input_ids"][0]) - 2
        assert (item.before, item.after) == ("<img>", "</img>")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"crop": True}, "crop_to_patches, min_patches, max_patches"),
        ({"crop_to_patches": 1}, "true or false"),
        ({"max_patches": 13}, "1 to 12"),
        ({"min_patches": 0}, "1 to 12"),
        ({"min_patches": 5, "max_patches": 4}, "in this order"),
        ({"max_patches": True}, "whole numbers"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, said):
    adapter = TileImages(TileSettings(tile=SIDE), 4)
    with pytest.raises(InvalidRequest, match=said):
        adapter.configured(options)
    assert adapter.configured({"max_patches": 2}).parameters != adapter.parameters


@pytest.mark.parametrize(
    ("file", "field", "value", "said"),
    [
        ("preprocessor_config.json", "size", {"height": 56, "width": 28}, "takes (56, 56)"),
        ("preprocessor_config.json", "size", None, "size is null"),
        ("preprocessor_config.json", "min_patches", 13, "more than max_patches"),
        ("preprocessor_config.json", "max_patches", [3], "max_patches is [3]"),
        ("config.json", "downsample_ratio", 0.3, "downsample_ratio 0.3"),
        ("config.json", "downsample_ratio", 0, "downsample_ratio is 0"),
        ("config.json", "image_seq_length", 256, "a tile has 4 tokens"),
        ("config.json", "vision_feature_select_strategy", "full", "use default"),
        ("config.json", "vision_feature_layer", 7, "has 3 layers"),
        ("config.json", "vision_config.patch_size", [14, 7], "must be squares"),
        ("config.json", "vision_config.image_size", {"height": 56}, "image_size is"),
        ("config.json", "vision_config.norm_type", "none", "norm_type 'none'"),
        ("config.json", "vision_config.num_channels", 1, "num_channels 1"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(checkpoint, file, field, value, said, tmp_path):
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((checkpoint / name).read_text())
    content = json.loads((tmp_path / file).read_text())
    *section, name = field.split(".")
    (content[section[0]] if section else content)[name] = value
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as e:
        read_config(tmp_path)
    assert said in e.value.message and "\n" not in e.value.message
