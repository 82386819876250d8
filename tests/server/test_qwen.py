"""What a model with pictures of any size, and with videos, takes over HTTP."""

from __future__ import annotations

import pytest

from hydrainfer.processor import load_description
from tests.checkpoints_qwen import make_qwen
from tests.processor.pictures.test_qwen import movie, video_url
from tests.server.conftest import ServerUnderTest, image_part, picture

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = ServerUnderTest(load_description(make_qwen("qwen2_vl", tmp_path_factory.mktemp("qwen"))))
    yield server
    server.close()


def prompt_tokens(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens"]


def said(answer, status):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def test_options_change_what_a_picture_takes(server):
    part = [image_part(picture(size=(112, 140)))]
    usual = prompt_tokens(server.chat(part))
    assert prompt_tokens(server.chat(part, mm_processor_kwargs={"max_pixels": 8 * 28 * 28})) == usual - 20 + 6
    assert prompt_tokens(server.chat(part, mm_processor_kwargs={})) == usual
    for options, says in [
        ({"max_pixel": 9}, "'max_pixel' is not known; this model takes min_pixels, max_pixels, size"),
        ({"max_pixels": 9}, "must be between 784 and"),
        ({"size": {"height": 3}}, "shortest_edge and longest_edge"),
    ]:
        for stream in (False, True):
            error = said(server.chat(part, mm_processor_kwargs=options, stream=stream), 400)
            assert says in error["message"] and error["param"] == "mm_processor_kwargs"
    assert said(server.chat(part, mm_processor_kwargs=[1]), 400)["param"] == "mm_processor_kwargs"


def test_videos(server):
    four = prompt_tokens(server.chat([video_url(movie())], mm_processor_kwargs={"num_frames": 4}))
    two = prompt_tokens(server.chat([video_url(movie())], mm_processor_kwargs={"num_frames": 2}))
    assert four > two
    for data, status, says in [
        (b"nonsense", 422, "not a video file"),
        (b"", 422, "empty"),
        (movie()[:-300], 422, "video"),
    ]:
        assert says in said(server.chat([video_url(data)]), status)["message"]
    broken = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,!!"}}
    assert said(server.chat([broken]), 400)["code"] == "invalid_base64"
    assert "at most 2" in said(server.chat([video_url(movie())] * 3), 400)["message"]
    assert said(server.chat("see <|video_pad|>"), 400)["code"] == "placeholder_in_text"
