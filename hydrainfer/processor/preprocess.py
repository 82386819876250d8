"""The pictures of a request, from what the client sent to what is encoded: remembered, by workers, or right here."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import NamedTuple

from hydrainfer.processor.adapter import ImageAdapter, MediaItem
from hydrainfer.processor.media import MediaLimits
from hydrainfer.processor.messages import ImagePart
from hydrainfer.processor.pixels import PixelStore
from hydrainfer.processor.prepare import Encodable, Seal, prepare_image
from hydrainfer.processor.workers import MediaWorkers

_MAX_REMEMBERED = 4096


class Held(NamedTuple):
    """`ref`: one share of its pixels in the store. `key` names its embedding."""

    item: MediaItem
    key: bytes
    ref: str


class Ticket:
    """What one request has in the workers' queue. Any thread may cancel it."""

    def __init__(self) -> None:
        self._futures: list[Future[tuple[Encodable, ...]]] = []
        self._cancelled = False
        self._lock = threading.Lock()

    def add(self, future: Future[tuple[Encodable, ...]]) -> None:
        with self._lock:
            self._futures.append(future)
            cancelled = self._cancelled
        if cancelled:
            future.cancel()

    def check(self) -> None:
        """Raises `CancelledError` if the request is no longer wanted."""
        if self._cancelled:
            raise CancelledError

    def cancel(self) -> None:
        """Take out of the queue what has not begun; whoever waits for it gets `CancelledError`."""
        with self._lock:
            self._cancelled = True
            futures = list(self._futures)
        for future in futures:
            future.cancel()


class Preprocessor:
    """Thread-safe; blocks the thread that asks. The same bytes with the same adapter, weights and dtype are decoded
    again only when their pixels have left the store. Without `workers` it decodes in the asking thread, one picture at
    a time: one may take 700 MB."""

    def __init__(self, pixels: PixelStore, limits: MediaLimits, seal: Seal, workers: MediaWorkers | None) -> None:
        self.limits = limits
        self.workers = workers
        self._pixels = pixels
        self._seal = seal
        self._remembered: OrderedDict[bytes, tuple[Held, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(
        self, parts: Sequence[ImagePart], adapter: ImageAdapter, ticket: Ticket | None = None
    ) -> list[tuple[Held, ...]]:
        """In order; the caller holds every `ref`. Raises `InvalidRequest`, `MediaError`, `RequestTooLarge`,
        `DeadlineExceeded`, `Overloaded`, `Unavailable` or `CancelledError`; then nothing is held."""
        ticket = ticket or Ticket()
        n_ahead = 1 if self.workers is None else 2 * self.workers.n
        started: deque[Callable[[], tuple[Held, ...]]] = deque()
        found: list[tuple[Held, ...]] = []
        refs: list[str] = []  # all that has been taken from the store
        try:
            for part in parts:
                ticket.check()
                started.append(self._start(part, adapter, ticket, refs))
                if len(started) >= n_ahead:
                    found.append(started.popleft()())
            found += [finish() for finish in started]
        except BaseException:
            ticket.cancel()
            for ref in refs:
                self._pixels.release(ref)
            raise
        return found

    def items(self, parts: Sequence[ImagePart], adapter: ImageAdapter) -> list[list[MediaItem]]:
        """What the prompt must know of them; nothing is held."""
        found = self.prepare(parts, adapter)
        for held in found:
            for h in held:
                self._pixels.release(h.ref)
        return [[h.item for h in held] for held in found]

    def close(self) -> None:
        """End the workers; who waits for them gets `Unavailable`. Safe to repeat."""
        if self.workers is not None:
            self.workers.close()

    def _start(
        self, part: ImagePart, adapter: ImageAdapter, ticket: Ticket, refs: list[str]
    ) -> Callable[[], tuple[Held, ...]]:
        """Begin with one part; the result is waited for. Every share taken is added to `refs`."""
        if isinstance(part.source, Path):
            part = part.read(self.limits)
        source = part.source
        if not isinstance(source, str | bytes):  # a picture that a Python caller has opened
            return lambda: self._keep(self._here(part, adapter), None, refs)
        digest = self._digest(source, adapter)
        held = self._recall(digest)
        if held is not None:
            refs += [h.ref for h in held]
            return lambda: held
        if self.workers is None:
            return lambda: self._keep(self._here(part, adapter), digest, refs)
        future = self.workers.submit(prepare_image, part, adapter, self.limits, self._seal)
        ticket.add(future)
        return lambda: self._keep(future.result(), digest, refs)

    def _here(self, part: ImagePart, adapter: ImageAdapter) -> tuple[Encodable, ...]:
        return prepare_image(part, adapter, self.limits, self._seal)

    def _keep(self, made: tuple[Encodable, ...], digest: bytes | None, refs: list[str]) -> tuple[Held, ...]:
        held = []
        for item, key, pixels in made:
            refs.append(self._pixels.put(key, pixels))
            held.append(Held(item, key, refs[-1]))
        if digest is not None:
            with self._lock:
                self._remembered[digest] = tuple(held)
                if len(self._remembered) > _MAX_REMEMBERED:
                    self._remembered.popitem(last=False)
        return tuple(held)

    def _recall(self, digest: bytes) -> tuple[Held, ...] | None:
        """What these bytes became, with one more share of each array, if all are still there."""
        with self._lock:
            held = self._remembered.get(digest)
            if held is None:
                return None
            self._remembered.move_to_end(digest)
        taken = [h.ref for h in held if self._pixels.hold(h.ref)]
        if len(taken) == len(held):
            return held
        for ref in taken:
            self._pixels.release(ref)
        with self._lock:
            self._remembered.pop(digest, None)
        return None

    def _digest(self, source: str | bytes, adapter: ImageAdapter) -> bytes:
        """Of everything that decides what a source becomes."""
        digest = hashlib.sha256()
        kind = type(source).__name__
        data = source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
        for part in (kind.encode(), adapter.parameters, self._seal.weights, self._seal.dtype.encode(), data):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()
