"""Pictures of LLaVA-OneVision: in tiles if the prompt has no other, else each as one square."""

from __future__ import annotations

import json

import numpy as np
import pytest
import transformers
from PIL import Image

from hydrainfer.checkpoint import ClipSettings
from hydrainfer.core import CheckpointError, SamplingParams
from hydrainfer.families import read_config
from hydrainfer.processor import PixelStore, Processor, parse_messages
from hydrainfer.processor.pictures.anyres import AnyresImages, AnyresSettings
from hydrainfer.processor.pictures.media import Picture
from tests.families import llava_onevision as family
from tests.families.chats import text, user
from tests.pillow import described

pytestmark = pytest.mark.cpu
GIVEN = {
    "size": {"height": 42, "width": 42},
    "image_grid_pinpoints": family.PINPOINTS,
    "image_mean": [0.5, 0.4, 0.6],
    "do_center_crop": False,
}
POINTS = tuple(map(tuple, family.PINPOINTS))
SIZES = [(1, 1), (500, 3), (3, 500), (42, 42), (85, 83), (126, 43), (301, 211), (37, 290)]


def adapter(side=42, points=POINTS, most=4):
    return AnyresImages(
        AnyresSettings(
            tile=side, patch=14, pinpoints=points, clip=ClipSettings.read(GIVEN).by("pillow"), most=most, alone=True
        )
    )


def noise(width, height):
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return family.make_onevision(tmp_path_factory.mktemp("onevision"))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_pixels_and_placeholders_depend_on_the_number_of_pictures(checkpoint, n):
    options = {name: value for name, value in GIVEN.items() if name != "do_center_crop"}
    pictures = transformers.LlavaOnevisionImageProcessorPil(do_rescale=False, do_normalize=False, **options)
    reference = family.Processor.from_pretrained(checkpoint)
    ours = adapter().among(n)
    for size in SIZES:
        image = noise(*size)
        theirs = pictures([[image] * n], return_tensors="np")["pixel_values"][0]
        made = ours.pixels(Picture(image, "RGB"))
        assert made.dtype == np.uint8 and np.array_equal(made, np.asarray(theirs).transpose(0, 2, 3, 1)), size
        ids = reference(text=["<image>" * n], images=[[image] * n])["input_ids"][0]
        assert n * ours.fit(*size).n_tokens == len(ids), size
    assert (len(made) > 1) == (n == 1)


def test_numbers_of_rows_of_the_published_tower(checkpoint):
    sides = range(384, 2305, 384)
    points = tuple((h, w) for h in sides for w in sides)
    processor, rng = family.Processor.from_pretrained(checkpoint), np.random.default_rng(1)
    processor.num_image_tokens, processor.vision_aspect_ratio = 27 * 27, "anyres_max_9"
    processor.image_processor.image_grid_pinpoints = [list(p) for p in points]
    sizes = np.exp(rng.uniform(0, np.log(4000), (500, 2))).astype(int) + 1
    sizes = [(int(w), int(h)) for w, h in sizes] + [(1024, 768), (640, 480), (1, 200), (2304, 2304), (1920, 1080)]
    ours = adapter(384, points, 9)
    want = [processor._get_number_of_features(h, w, 384, 384) for w, h in sizes]
    assert [ours.fit(w, h).n_tokens for w, h in sizes] == want
    assert len({ours.fit(w, h).grid for w, h in sizes}) > 100


def test_the_same_picture_has_another_key_beside_another_one(checkpoint):
    store = PixelStore(1 << 26)
    processor = Processor(described(checkpoint), store, weights=b"", dtype="float32")

    def spans(*images):
        chat = [user(*({"type": "image", "image": i} for i in images), text("?"))]
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        return processor.chat("1", parse_messages(chat, local=True), sampling).requests[0].media

    one, other = noise(300, 200), noise(90, 90)
    (alone,), (first, second), (again,) = spans(one), spans(one, other), spans(one)
    assert alone == again and alone.key != first.key != second.key
    assert (first.n_tokens, second.n_tokens) == (10, 10) and alone.n_tokens > 10
    assert alone.n_tokens <= read_config(checkpoint).vision.tokens


def test_no_picture_has_more_rows_than_the_configuration_says(checkpoint):
    most, fit = read_config(checkpoint).vision.tokens, adapter().fit
    rows = {fit(width, height).n_tokens for width in range(1, 400, 3) for height in range(1, 400, 3)}
    assert max(rows) == most


@pytest.mark.parametrize(
    ("file", "field", "value", "said"),
    [
        ("config.json", "vision_aspect_ratio", "square", "vision_aspect_ratio 'square' is not supported"),
        ("config.json", "vision_aspect_ratio", "anyres_max_0", "is not supported"),
        ("config.json", "vision_aspect_ratio", 9, "vision_aspect_ratio is 9"),
        ("config.json", "vision_feature_select_strategy", "default", "SigLIP does not have; use full"),
        ("config.json", "vision_config.model_type", "clip_vision_model", "supported: siglip_vision_model"),
        ("config.json", "image_grid_pinpoints", [[42, 50]], "multiples of the vision tower's 42 pixels"),
        ("preprocessor_config.json", "size", {"height": 384, "width": 384}, "takes (42, 42)"),
        ("preprocessor_config.json", "image_grid_pinpoints", [[42, 84]], "those of config.json"),
        ("preprocessor_config.json", "image_grid_pinpoints", None, "image_grid_pinpoints is null"),
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
