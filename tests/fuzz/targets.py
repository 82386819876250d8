"""What is fed, and what must hold after every input."""

from __future__ import annotations

import random
import socket
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import msgspec

from hydrainfer.checkpoint import ClipSettings
from hydrainfer.cluster.messages import decode_to_hub, decode_to_instance
from hydrainfer.core import HydraError, InternalError
from hydrainfer.processor import ClipImages, ImagePart, MediaLimits, MediaWorkers, Seal, load_description, prepare_image
from tests.checkpoints import make_llava
from tests.fuzz import inputs
from tests.fuzz.predicted import Predicted
from tests.server.conftest import ServerUnderTest
from tests.waiting import PATIENCE_S

_LIMITS = MediaLimits(max_pixels=1_000_000)


class Target:
    """`feed` takes one input and raises `AssertionError` if what follows must not be, `close` if something is left.
    `seen`: what came of the inputs, counted."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def feed(self, rng: random.Random) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End it, and check that nothing is left."""


class Http(Target):
    """A server on a socket, before a scripted engine. Bodies by a client, and bytes that are hardly HTTP."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        model = load_description(make_llava(folder / "llava", image_size=56, context=512))
        self._server = ServerUnderTest(model, timeout_s=5.0)
        at = httpx.URL(self._server.url)
        self._address = (at.host, at.port)

    def feed(self, rng: random.Random) -> None:
        if rng.random() < 0.1:
            self._raw(inputs.head(rng))
            return
        path, data = inputs.body(rng)
        answer = self._server.http.post(path, content=data)
        self.seen[f"{answer.status_code}"] += 1
        assert answer.status_code in (200, 400, 404, 413, 415, 422, 504), (answer.status_code, path, answer.text)
        assert InternalError.type not in answer.text, (path, answer.text)
        assert answer.status_code == 200 or "error" in answer.json(), answer.text

    def _raw(self, data: bytes) -> None:
        with socket.create_connection(self._address, timeout=PATIENCE_S) as connection:
            connection.settimeout(0.2)  # a head may promise more than comes
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                said = connection.recv(12)
            except TimeoutError:
                said = b"waits"
            except (ConnectionResetError, BrokenPipeError):
                said = b"closed"
        self.seen[f"raw {said.decode('latin-1')}"] += 1
        assert not said.startswith(b"HTTP/1.1 500"), data

    def close(self) -> None:
        try:
            assert self._server.http.get("/health").status_code == 200
            self._server.check_idle()
        finally:
            self._server.close()


class Media(Target):
    """Two media workers, which must live through everything that is within their limits."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._workers = MediaWorkers(2, _LIMITS)
        adapter = ClipImages(ClipSettings.read({"size": {"shortest_edge": 28}, "crop_size": 28}), 4)
        self._args = (adapter, _LIMITS, Seal(b"w", "float32"))
        self._asked: list[tuple[bytes, Future[Any]]] = []
        self._pids: set[int] = set()

    def feed(self, rng: random.Random) -> None:
        data = inputs.picture(rng)
        self._asked.append((data, self._workers.submit(prepare_image, ImagePart(data, "messages"), *self._args)))
        if len(self._asked) == 32:
            self._judge()

    def _judge(self) -> None:
        asked, self._asked = self._asked, []
        for data, future in asked:
            try:
                future.result(timeout=60)
                self.seen["decoded"] += 1
            except HydraError as e:
                self.seen[f"{e.status}"] += 1
                assert e.status in (400, 413, 422), (e, data)
                assert "died" not in e.message, (e, data)
        pids = set(self._workers.pids)
        assert not self._pids - pids, f"a worker has died of one of {[data for data, _ in asked]}"
        self._pids |= pids

    def close(self) -> None:
        try:
            self._judge()
        finally:
            self._workers.close()
        assert self._workers.n_jobs == 0


class Frames(Target):
    """The decoders of the cluster's messages: a message or `DecodeError`, nothing else."""

    def __init__(self, folder: Path) -> None:
        super().__init__()

    def feed(self, rng: random.Random) -> None:
        data = inputs.frame(rng)
        for decode in (decode_to_hub, decode_to_instance):
            try:
                decode(data)
                self.seen["message"] += 1
            except msgspec.DecodeError:
                self.seen["refused"] += 1
            except HydraError:
                self.seen["refused by its type"] += 1


TARGETS: dict[str, type[Http] | type[Media] | type[Frames] | type[Predicted]] = {
    "http": Http,
    "media": Media,
    "frames": Frames,
    "predicted": Predicted,
}


def rng_of(target: str, number: int) -> random.Random:
    """The source of input `number` of a target."""
    return random.Random(f"{target}:{number}")
