"""Our squares, tiles and numbers of placeholders are those of the Hugging Face processor, bit by bit."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import skimage
import transformers
from PIL import Image, ImageOps

from hydrainfer.checkpoint import ClipSettings
from hydrainfer.core import CheckpointError, InvalidRequest
from hydrainfer.processor import load_description
from hydrainfer.processor.pictures.anyres import AnyresImages, AnyresSettings
from hydrainfer.processor.pictures.media import MediaLimits, Picture, decode_image
from tests.checkpoints_next import PINPOINTS, SIDE, make_llava_next

pytestmark = pytest.mark.cpu
DATA = Path(skimage.__file__).parent / "data"
PHOTOS = ["astronaut.png", "camera.png", "rocket.jpg", "logo.png", "text.png", "no_time_for_that_tiny.gif"]
PUBLISHED = {
    "size": {"shortest_edge": 336},
    "crop_size": {"height": 336, "width": 336},
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "resample": 3,
}
SMALL = {"size": {"shortest_edge": SIDE}, "crop_size": SIDE, "image_grid_pinpoints": PINPOINTS, "resample": 2}
MANY = {
    "size": {"height": 28, "width": 28},
    "crop_size": {"height": 28, "width": 28},
    "do_center_crop": False,
    "image_grid_pinpoints": [[28 * r, 28 * c] for r in range(1, 7) for c in range(1, 7) if r * c <= 6],
}


def ours(preprocessor):
    size = preprocessor["size"]
    side = size.get("shortest_edge") or size["height"]
    points = tuple(map(tuple, preprocessor["image_grid_pinpoints"]))
    clip = ClipSettings.read(preprocessor).by("pillow")
    return AnyresImages(AnyresSettings(tile=side, patch=14, pinpoints=points, clip=clip))


def check(preprocessor, picture, image):
    reference = transformers.LlavaNextImageProcessorPil(do_rescale=False, do_normalize=False, **preprocessor)
    theirs = reference(image, return_tensors="np")
    made = ours(preprocessor).pixels(picture)
    assert made.dtype == np.uint8 and made.flags.c_contiguous
    assert np.array_equal(made, np.asarray(theirs["pixel_values"][0]).transpose(0, 2, 3, 1))


@pytest.mark.parametrize("name", PHOTOS)
@pytest.mark.parametrize("config", [PUBLISHED, SMALL, MANY], ids=["published", "small", "many"])
def test_pixels_of_photographs(config, name):
    data = (DATA / name).read_bytes()
    check(config, decode_image(data, MediaLimits()), Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("orientation", [3, 5, 6, 8])
def test_pixels_of_turned_photographs(orientation):
    image, buffer = Image.open(DATA / "rocket.jpg"), io.BytesIO()
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(buffer, "JPEG", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(buffer))
    check(SMALL, decode_image(buffer.getvalue(), MediaLimits()), upright)


@pytest.mark.parametrize("size", [(1, 1), (3, 500), (500, 3), (2000, 10), (11, 2200), (42, 42), (85, 83), (43, 126)])
def test_pixels_of_odd_sizes(size):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))
    for config in (SMALL, MANY):
        check(config, Picture(image, "RGB"), image)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_llava_next(tmp_path_factory.mktemp("next"))


@pytest.mark.parametrize("config", [PUBLISHED, SMALL], ids=["published", "small"])
def test_the_number_of_placeholders(checkpoint, config):
    processor = transformers.LlavaNextProcessor.from_pretrained(checkpoint, backend="pil")
    processor.image_processor = transformers.LlavaNextImageProcessorPil(**config)
    adapter, rng = ours(config), np.random.default_rng(1)
    sizes = np.exp(rng.uniform(0, np.log(5000), (2000, 2))).astype(int) + 1
    sizes = [(int(h), int(w)) for h, w in sizes] + [(1, 200), (200, 1), (336, 336), (672, 336), (1008, 337)]
    theirs = processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"]
    assert [adapter.fit(w, h).n_tokens for h, w in sizes] == theirs
    largest = adapter.settings.tile // 14
    assert all(0 <= adapter.fit(w, h).grid[1] <= 3 * largest for h, w in sizes)


def test_a_checkpoint_is_read(checkpoint):
    model = load_description(checkpoint)
    assert model.images.placeholder == "<image>"
    item = model.images.adapter.fit(84, 84)
    assert (item.n_tokens, item.grid) == (9 + 6 * 7, (2, 6, 6))
    with pytest.raises(InvalidRequest, match="takes none, not 'max_pixels'"):
        model.images.adapter.configured({"max_pixels": 1})
    assert model.images.adapter.configured({}) is model.images.adapter


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"crop_size": 28}, r"\(28, 28\).*takes \(42, 42\)"),
        ({"size": {"shortest_edge": 336}}, r"takes \(42, 42\)"),
        ({"image_grid_pinpoints": [[42, 84]]}, "those of config.json"),
        ({"image_grid_pinpoints": [[42]]}, r"image_grid_pinpoints is \[\[42\]\].*pairs"),
        ({"image_grid_pinpoints": "big"}, 'image_grid_pinpoints is "big".*pairs'),
    ],
)
def test_tiles_that_the_tower_cannot_take_are_refused_at_load(checkpoint, tmp_path, changes, says):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / "processor_config.json").unlink()  # whose section would come first
    file = copy / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError, match=says) as caught:
        load_description(copy)
    assert "\n" not in caught.value.message
