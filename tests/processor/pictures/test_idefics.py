"""Pictures for Idefics3 and SmolVLM are those of transformers' Pil processors, to the last bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from hydrainfer.checkpoint import IdeficsSettings
from hydrainfer.core import CheckpointError
from hydrainfer.models.picture import Normalising
from hydrainfer.ops.build import build_resampler
from hydrainfer.processor.pictures import MediaLimits, from_image
from hydrainfer.processor.pictures.idefics import IdeficsImages
from tests.equivalence.reference import photo

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]
SIZES = [(1, 1), (1, 40), (40, 1), (2000, 20), (20, 2000), (56, 56), (57, 56), (224, 224), (300, 10)]
OPTIONS = {
    "": {},
    "one tile": {"do_image_splitting": False},
    "not resized first": {"do_resize": False},
    "larger than all": {"size": {"longest_edge": 4200}, "max_image_size": {"longest_edge": 1400}},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_tiles_equal_those_of_transformers(options):
    """With Pillow's resizing and with ours."""
    given = {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}} | OPTIONS[options]
    processor = transformers.Idefics3ImageProcessorPil(**given)
    settings = IdeficsSettings.read(given).by("pillow")
    adapter, normalise = IdeficsImages(settings, 4), Normalising(settings, torch.device("cpu"))
    draw, rng = random.Random(1), np.random.default_rng(0)
    few = options == "larger than all"
    sizes = (
        [(300, 200), (200, 300)] if few else SIZES + [(draw.randint(1, 500), draw.randint(1, 500)) for _ in range(50)]
    )
    pictures = [Image.fromarray(rng.integers(0, 256, (h, w, 3), np.uint8)) for w, h in sizes]
    for picture in [*pictures, photo("chelsea.png").convert("RGB")]:
        made = processor(picture, return_tensors="pt", return_row_col_info=True)
        theirs = made["pixel_values"][0]
        for resampler in ("", build_resampler("resample")):
            limits = MediaLimits(resampler=resampler)
            ours = normalise(torch.from_numpy(adapter.pixels(from_image(picture, limits)))).permute(0, 3, 1, 2)
            where = picture.size, resampler
            assert ours.shape == theirs.shape and (ours - theirs).abs().max() < 1e-6, where  # a level is 8e-3
            assert adapter.fit(*picture.size).n_tokens == 4 * len(ours)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"size": {"height": 3, "width": 3}}, "size must give longest_edge"),
        ({"size": None}, "size is null"),
        ({"size": {"longest_edge": 9}, "max_image_size": 364}, "max_image_size must give longest_edge"),
    ],
)
def test_settings_that_make_no_sense(given, says):
    with pytest.raises(CheckpointError, match=says):
        IdeficsSettings.read(given)
