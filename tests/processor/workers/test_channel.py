"""A channel moves everything or says in time why not, whatever the deadline."""

import socket
import struct
import threading
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hydrainfer.processor.workers.channel import Channel, timeval
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.unit


@pytest.fixture
def ends():
    pair = [Channel(s) for s in socket.socketpair()]
    yield pair
    for end in pair:
        end.close()


@pytest.mark.parametrize("limit_s", [1.0, 30.0, 30.5, 3600.0, 1e9])
def test_everything_comes_whatever_the_deadline(ends, limit_s):
    """Just below a whole second is where the fraction rounds up to one."""
    ours, theirs = ends
    for i in range(200):
        data = bytes([i]) * 100
        ours.send(b"header", data, deadline_s=time.monotonic() + limit_s)
        assert theirs.receive(6, time.monotonic() + limit_s) == b"header"
        found = bytearray(100)
        theirs.receive_into(found, time.monotonic() + limit_s)
        assert found == data


@given(st.floats(min_value=0.0, max_value=1e6, exclude_min=True))
@example(29.9999999)
@example(1e-9)
@example(1e6)
def test_the_kernel_takes_every_wait(seconds):
    whole, micro = struct.unpack("ll", timeval(seconds))
    assert 0 <= micro < 1_000_000 and whole * 1_000_000 + micro > 0
    assert -1e-9 < whole + micro / 1e6 - seconds < 2e-6  # less by the rounding of a float only


def test_a_large_array_comes_while_it_is_sent(ends):
    ours, theirs = ends
    data = bytes(range(256)) * 40_000
    sender = threading.Thread(target=ours.send, args=(b"", data))
    sender.start()
    assert theirs.receive(0) == b""
    found = bytearray(len(data))
    theirs.receive_into(found, time.monotonic() + 30.0)
    sender.join()
    assert found == data


def test_a_message_that_does_not_come_in_time_is_a_timeout(ends):
    ours, theirs = ends
    for wait in (
        lambda: theirs.receive(9, time.monotonic() + 0.05),
        lambda: theirs.receive(9, time.monotonic() - 1.0),
        lambda: ours.send(b"", bytes(10_000_000), deadline_s=time.monotonic() + 0.05),
    ):
        begun_s = time.monotonic()
        with pytest.raises(TimeoutError):
            wait()
        assert time.monotonic() - begun_s < PATIENCE_S


def test_a_channel_whose_writer_is_gone_is_at_its_end(ends):
    ours, theirs = ends
    ours.send(b"a header longer than allowed")
    with pytest.raises(EOFError, match="28 bytes"):
        theirs.receive(27)
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive(9, time.monotonic() + 30.0)
    with pytest.raises(EOFError):
        theirs.send(b"x", deadline_s=time.monotonic() + 30.0)
    for call in (lambda: ours.send(b"x"), lambda: ours.receive(9)):  # its own socket is closed
        with pytest.raises(EOFError):
            call()
