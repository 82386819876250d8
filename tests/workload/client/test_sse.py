import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydrainfer.workload.client import EventSplitter, FailureKind, RequestFailed, parse_chunk

pytestmark = pytest.mark.unit

STREAM = ': ping\n\ndata: {"a": "é"}\n\nevent: x\r\ndata: 1\r\ndata:2\r\n\r\ndata: [DONE]\n\n'.encode()
EVENTS = ['{"a": "é"}'.encode(), b"1\n2", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_cuts_anywhere_give_the_same_events(cuts):
    splitter, events = EventSplitter(), []
    edges = [0, *sorted(cuts), len(STREAM)]
    for a, b in itertools.pairwise(edges):
        events += splitter.feed(STREAM[a:b])
    assert events == EVENTS
    assert not splitter.cut


def test_a_cut_event_is_noticed():
    splitter = EventSplitter()
    assert splitter.feed(b'data: {"a"') == []
    assert splitter.cut


@pytest.mark.parametrize("piece", [b"x" * 100, b"data: " + b"x" * 94 + b"\n"], ids=["one line", "many lines"])
def test_an_event_without_end_is_malformed(monkeypatch, piece):
    monkeypatch.setattr("hydrainfer.workload.client.sse.MAX_EVENT_BYTES", 1000)
    splitter = EventSplitter()
    with pytest.raises(RequestFailed, match="longer than 1000 bytes") as e:
        for _ in range(12):
            splitter.feed(piece)
    assert e.value.failure.kind is FailureKind.MALFORMED
    fine = EventSplitter()
    assert all(fine.feed(b"data: " + b"x" * 500 + b"\n\n") for _ in range(12))


@pytest.mark.parametrize(
    ("event", "n_tokens"),
    [
        (b'{"choices":[{"delta":{"role":"assistant"}}]}', 0),
        (b'{"choices":[{"delta":{"role":"assistant","content":""},"token_ids":null}]}', 0),
        (b'{"choices":[{"delta":{"content":"a b c"}}]}', 1),
        (b'{"choices":[{"delta":{"content":""},"token_ids":[5]}]}', 1),  # half a character: a token without text
        (b'{"choices":[{"delta":{"content":"ab"},"token_ids":[5,6]}]}', 2),
        (b'{"choices":[{"delta":{"reasoning_content":"hm"}}]}', 1),
        (b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}', 0),
        (b'{"choices":null}', 0),
    ],
)
def test_what_counts_as_tokens(event, n_tokens):
    assert parse_chunk(event).n_tokens == n_tokens


@pytest.mark.parametrize("event", [b"", b"{", b"[]", b'{"choices":3}', b'{"choices":[{"delta":{"content":"\xff"}}]}'])
def test_nonsense_is_malformed(event):
    with pytest.raises(RequestFailed) as e:
        parse_chunk(event)
    assert e.value.failure.kind is FailureKind.MALFORMED


@pytest.mark.parametrize("event", [b'{"error":{"message":"died"}}', b'{"error":"died"}'])
def test_error_events(event):
    with pytest.raises(RequestFailed, match=r"^died$") as e:
        parse_chunk(event)
    assert e.value.failure.kind is FailureKind.SERVER
