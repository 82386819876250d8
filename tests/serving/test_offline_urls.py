"""The offline API fetches what URLs name, with the same options as the server."""

import functools
import http.server
import threading

import pytest

from hydrainfer import LLM, SamplingParams, builtin
from hydrainfer.core import InvalidRequest

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def website():
    handler = functools.partial(Quiet, directory=str(builtin.PICTURE.parent))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/{builtin.PICTURE.name}"
    server.shutdown()
    server.server_close()


def chat(part):
    return [{"role": "user", "content": [part, {"type": "text", "text": "What is in this picture?"}]}]


def test_a_url_is_as_good_as_a_path(website):
    with LLM(media_hosts="any", media_roots=str(builtin.PICTURE.parent)) as llm:
        parts = [{"type": "image_url", "image_url": {"url": u}} for u in (website, builtin.PICTURE.as_uri())]
        chats = [chat(p) for p in ({"type": "image", "image": str(builtin.PICTURE)}, *parts)]
        texts = [answer.outputs[0].text for answer in llm.chat(chats, GREEDY, use_tqdm=False)]
        assert texts[0] and texts == [texts[0]] * 3
        assert llm.chat(chats[1], GREEDY, use_tqdm=False)[0].outputs[0].text == texts[0]  # in another event loop


def test_private_addresses_are_refused_here_too(website):
    with LLM() as llm, pytest.raises(InvalidRequest, match="does not connect to"):
        llm.chat(chat({"type": "image_url", "image_url": {"url": website}}), GREEDY, use_tqdm=False)
