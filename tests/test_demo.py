"""The demo ends with the server's own words if the server reports an error."""

import httpx
import pytest

from hydrainfer.builtin import PICTURE
from hydrainfer.core import InvalidRequest
from hydrainfer.demo import ask

pytestmark = pytest.mark.unit


ERROR = b'{"error": {"message": "no instance"}}'
STREAM = b'data: {"choices": [{"delta": {"content": "A "}}]}\n\ndata: ' + ERROR + b"\n\n"


@pytest.mark.parametrize(("status", "body"), [(200, STREAM), (503, ERROR)], ids=["stream", "status"])
def test_an_error_is_told(monkeypatch, status, body):
    client = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(status, content=body)))
    monkeypatch.setattr(httpx, "stream", client.stream)
    pieces = ask("http://x", "m", PICTURE, "What is this?", 8)
    assert status != 200 or next(pieces) == "A "
    with pytest.raises(InvalidRequest, match="no instance"):
        next(pieces)
