"""Blocks through pinned memory with a stream that copies as late as it may: nothing is read or written too early."""

from __future__ import annotations

import pytest
import torch

from hydrainfer.storage import staging

pytestmark = pytest.mark.cpu

BLOCK, N_BLOCKS, AT_ONCE = 8, 40, 3
PIECES = [(0, 2), (30, 9), (7, 1), (11, 4)]
IDS = [i for first, n in PIECES for i in range(first, first + n)]


class LateStream:
    """Does what it was given when somebody waits for it, in order."""

    def __init__(self) -> None:
        self.given: list = []
        self.most = 0

    def run(self, upto: int) -> None:
        while len(self.done) < upto:
            self.given[len(self.done)]()
            self.done.append(True)

    def put(self, work) -> None:
        self.given.append(work)

    def record_event(self):
        upto = len(self.given)
        return type("Event", (), {"synchronize": lambda _: self.run(upto)})()

    def synchronize(self) -> None:
        self.run(len(self.given))

    def reset(self) -> None:
        self.given, self.done = [], []


class Bytes:
    """A store's memory on the device: a copy to or from it happens on the stream."""

    def __init__(self, stream: LateStream, content: torch.Tensor) -> None:
        self.stream, self.content = stream, content

    def __getitem__(self, at: slice):
        return _Part(self, at)


class _Part:
    def __init__(self, of: Bytes, at: slice) -> None:
        self.of, self.at = of, at

    def copy_(self, pinned: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.of.stream.put(lambda: self.of.content[self.at].copy_(pinned))


class Pinned:
    """Host memory that the device copies to."""

    def __init__(self, stream: LateStream, memory: torch.Tensor) -> None:
        self.stream, self.memory = stream, memory

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, at: slice):
        return Pinned(self.stream, self.memory[at])

    def copy_(self, part: _Part, non_blocking: bool) -> None:
        assert non_blocking
        self.stream.put(lambda: self.memory.copy_(part.of.content[part.at]))


@pytest.fixture
def there(monkeypatch):
    """(stream, store) of a device that is always late."""
    stream = LateStream()
    stream.reset()
    content = torch.arange(N_BLOCKS * BLOCK, dtype=torch.uint8).view(N_BLOCKS, BLOCK)
    store = type("Store", (), {"device": torch.device("cuda", 0), "bytes": Bytes(stream, content)})()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return stream, store


def test_sent_blocks_are_those_of_the_device(there, monkeypatch):
    stream, store = there
    memory = lambda _: Pinned(stream, torch.zeros(AT_ONCE, BLOCK, dtype=torch.uint8))  # noqa: E731
    monkeypatch.setattr(staging, "_pinned", memory)
    monkeypatch.setattr(staging, "_view", lambda pinned: pinned.memory.numpy().reshape(-1).data)
    sent, ahead = b"", []
    for (view,) in staging.outgoing(store, PIECES):
        sent += bytes(view)
        ahead.append(len(stream.given) - len(stream.done))
    assert sent == store.bytes.content[IDS].numpy().tobytes()
    assert ahead[:-1] == [1] * (len(ahead) - 1), "the next copy runs while this one is sent"


@pytest.mark.parametrize("fails_at", [None, 0, 3])
def test_received_blocks_lie_where_they_belong(there, monkeypatch, fails_at):
    stream, store = there
    monkeypatch.setattr(staging, "_pinned", lambda _: torch.zeros(AT_ONCE, BLOCK, dtype=torch.uint8))
    source = torch.randint(1, 256, (len(IDS), BLOCK), dtype=torch.uint8)
    left = source.numpy().tobytes()
    received = staging.incoming(store, PIECES)
    for i, (view,) in enumerate(received):
        if i == fails_at:
            received.close()
            assert len(stream.done) == len(stream.given), "nothing may write any more"
            return
        view[:], left = left[: len(view)], left[len(view) :]
    assert not left and torch.equal(store.bytes.content[IDS], source)
