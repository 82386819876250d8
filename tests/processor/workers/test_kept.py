"""What is kept of pictures and videos is used again only where an empty memory would give the same."""

from __future__ import annotations

import base64
import io
import random

import pytest
from PIL import Image

from hydrainfer.core import SamplingParams
from hydrainfer.processor import (
    ChatOptions,
    MediaLimits,
    PixelStore,
    Processor,
    RequestTerms,
    VideoLimits,
    VideoReading,
    load_description,
    parse_messages,
)
from tests.checkpoints import make_picture
from tests.checkpoints_qwen import FAMILIES, make_qwen
from tests.processor.pictures.test_qwen import text, user, video_url
from tests.processor.video.videos import make_video

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
OPTIONS = {
    "fps": (0.5, 1, 2, 4),
    "num_frames": (2, 4, 6, 9),
    "max_frames": (2, 4, 8),
    "min_pixels": (4 * 784, 10 * 784),
    "max_pixels": (16 * 784, 30 * 784),
    "size": ({"shortest_edge": 784, "longest_edge": 9 * 784}, {"shortest_edge": 784, "longest_edge": 25 * 784}),
}


def picture_url(seed: int, side: int) -> dict:
    out = io.BytesIO()
    Image.fromarray(make_picture(seed, side)).save(out, "PNG")
    encoded = base64.b64encode(out.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def drawn_options(rng: random.Random) -> dict:
    """Valid options of a request, most of them left out."""
    options = {name: rng.choice(values) for name, values in OPTIONS.items() if rng.random() < 0.35}
    if "num_frames" in options:
        options.pop("fps", None)
    if "size" in options:
        options.pop("min_pixels", None), options.pop("max_pixels", None)
    return options


def processor_of(model, max_frames=16, keep_bytes=1 << 27) -> Processor:
    return Processor(
        model,
        PixelStore(1 << 28, keep_bytes=keep_bytes),
        weights=b"w",
        dtype="float32",
        limits=MediaLimits(max_videos=2),
        videos=VideoReading(VideoLimits(max_frames=max_frames)),
    )


def prepared(processor, messages, options, salt="") -> tuple:
    """Everything that a model sees of a chat: ids, spans, and pixels. Nothing is held afterwards."""
    done = processor.chat("r", messages, GREEDY, RequestTerms(salt=salt), ChatOptions(media=options))
    request = done.requests[0]
    pixels = [processor.pixels.get(ref).tobytes() for ref in done.pixels]
    for ref in done.pixels:
        processor.pixels.release(ref)
    return request.prompt_ids, request.media, request.keys, pixels


@pytest.mark.parametrize("family", FAMILIES)
def test_options_at_random_give_what_an_empty_memory_gives(family, tmp_path):
    model = load_description(make_qwen(family, tmp_path))
    rng, kept = random.Random(family), processor_of(model)
    film, other = video_url(make_video(n=50, size=(112, 84))), video_url(make_video(n=30, size=(84, 112)))
    picture = picture_url(1, 160)
    chats = [(film,), (other, film), (picture, film), (picture,)]
    if model.images.video is None:
        chats = [(picture,), (picture, picture)]
    answers = set()
    for _ in range(24):
        messages, salt = parse_messages(user(*rng.choice(chats), text("What?"))), rng.choice(("", "a", "b"))
        options = drawn_options(rng)
        answer = prepared(kept, messages, options, salt)
        assert answer == prepared(processor_of(model, keep_bytes=0), messages, options, salt), options
        answers.add(answer[0])
    assert len(answers) > 3
