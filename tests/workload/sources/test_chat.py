import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from hydrainfer.core import ConfigError
from hydrainfer.workload.sources import (
    BodyOptions,
    ChatRequest,
    DrawnPicture,
    FilePicture,
    distinct_chats,
    draw_picture,
)

pytestmark = pytest.mark.unit


def decode(url):
    head, _, data = url.partition(",")
    return head, Image.open(io.BytesIO(base64.b64decode(data)))


def test_pictures_follow_their_seed():
    first, again, other = draw_picture(4, 64, 48), draw_picture(4, 64, 48), draw_picture(5, 64, 48)
    assert first.shape == (48, 64, 3) and first.dtype == np.uint8
    assert (first == again).all() and (first != other).mean() > 0.5
    assert first.std() > 20  # neither flat nor black


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (336, 336)])
def test_any_size_can_be_drawn(size):
    head, picture = decode(DrawnPicture(0, *size).data_url())
    assert head == "data:image/png;base64" and picture.size == size
    assert (np.asarray(picture) == draw_picture(0, *size)).all()


def test_jpeg():
    head, picture = decode(DrawnPicture(0, 32, 32, "jpeg").data_url())
    assert head == "data:image/jpeg;base64" and picture.format == "JPEG"


def test_files_are_sent_as_they_are(tmp_path):
    path = tmp_path / "a.webp"
    path.write_bytes(b"not looked at")
    assert FilePicture(str(path)).data_url() == "data:image/webp;base64," + base64.b64encode(b"not looked at").decode()


@pytest.mark.parametrize(("name", "said"), [("absent.png", "No such file"), ("a.tiff", "must be one of")])
def test_unusable_files_are_refused(tmp_path, name, said):
    with pytest.raises(ConfigError, match=said):
        FilePicture(str(tmp_path / name)).data_url()


def test_body():
    chat = ChatRequest(text="What?", pictures=(DrawnPicture(0, 8, 8), DrawnPicture(1, 8, 8)), max_tokens=5)
    body = json.loads(BodyOptions(extra={"temperature": 0.5}).body(chat, "m"))
    content = body.pop("messages")[0]["content"]
    assert [part["type"] for part in content] == ["image_url", "image_url", "text"]
    assert body == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_token_ids": True,
    }


def test_extensions_can_be_left_out():
    options = BodyOptions(ignore_eos=False, return_token_ids=False, include_usage=False)
    body = json.loads(options.body(ChatRequest(text="What?"), "m"))
    assert body.keys() == {"model", "messages", "max_tokens", "temperature", "stream"}


def test_distinct_chats_share_no_picture_within_or_between_seeds():
    pictures = [p for seed in range(3) for c in distinct_chats(10, seed=seed, n_pictures=2) for p in c.pictures]
    assert len(set(pictures)) == len(pictures) == 60
    assert distinct_chats(4, seed=1) == distinct_chats(4, seed=1)
