"""The preparation of a request's pictures and videos for encoding: recalled from memory, prepared by workers, or
prepared in the calling thread."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hydrainfer.core import InvalidRequest, RequestTooLarge
from hydrainfer.processor.messages import ImagePart, VideoPart, VideoReading
from hydrainfer.processor.pictures import (
    Counting,
    ImageAdapter,
    MediaItem,
    MediaLimits,
    PixelStore,
    VideoAdapter,
    silence_pillow,
)
from hydrainfer.processor.workers.pool import MediaWorkers
from hydrainfer.processor.workers.prepare import Encodable, Seal, prepare_image, prepare_video

_MAX_REMEMBERED = 4096


class HeldItem(NamedTuple):
    """An item whose pixels are held in the store. `ref`: the reference to them, which stands for one share. `key`: the
    key of their embedding."""

    item: MediaItem
    key: bytes
    ref: str


MediaPart = ImagePart | VideoPart


class Adapters(NamedTuple):
    """A model's adapters, configured with a request's options. `ids`: the placeholder id of each kind of part."""

    image: ImageAdapter | None
    video: VideoAdapter | None
    ids: Mapping[type, int]

    def among(self, parts: Sequence[MediaPart]) -> Adapters:
        """The adapters for a prompt with these pictures and videos."""
        if not isinstance(self.image, Counting):
            return self
        return self._replace(image=self.image.among(sum(isinstance(part, ImagePart) for part in parts)))

    def token_id(self, part: MediaPart) -> int:
        return self.ids[type(part)]


class JobTicket:
    """The jobs of one request in the workers' queue. Any thread may cancel them."""

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
        """Raise `CancelledError` if the request was cancelled."""
        if self._cancelled:
            raise CancelledError

    def cancel(self) -> None:
        """Take the jobs that have not begun out of the queue. A thread that waits for one gets `CancelledError`."""
        with self._lock:
            self._cancelled = True
            futures = list(self._futures)
        for future in futures:
            future.cancel()


class Preprocessor:
    """The preparation of a request's media. Thread-safe; blocks the calling thread. The same bytes with the same
    options, limits, backend, weights, dtype and salt are decoded again only if their pixels have left the store.
    Without `workers` the calling thread decodes one picture at a time, which may take 700 MB. Silences Pillow's
    warnings in this process."""

    def __init__(
        self,
        pixels: PixelStore,
        limits: MediaLimits,
        videos: VideoReading,
        seal: Seal,
        workers: MediaWorkers | None,
    ) -> None:
        self.limits = limits
        self.videos = videos
        self.workers = workers
        self._pixels = pixels
        self._seal = seal
        self._fixed = msgspec.json.encode((limits, videos, seal.weights, seal.dtype))  # what all digests depend on
        self._remembered: OrderedDict[bytes, tuple[HeldItem, ...]] = OrderedDict()
        self._lock = threading.Lock()
        silence_pillow()

    def prepare(
        self, parts: Sequence[MediaPart], adapters: Adapters, ticket: JobTicket | None = None, salt: str = ""
    ) -> list[tuple[HeldItem, ...]]:
        """The items of each part, in order. The caller owns a share of every `ref`. A video waits for the videos before
        it, since all of them together may have only as many frames as one video. `salt`: earlier results are used only
        if they were prepared with the same salt. Raises `InvalidRequest`, `MediaError`, `RequestTooLarge`,
        `DeadlineExceeded`, `Overloaded`, `Unavailable` or `CancelledError`; after an error nothing is held."""
        ticket, adapters = ticket or JobTicket(), adapters.among(parts)
        n_ahead = 1 if self.workers is None else 2 * self.workers.n
        started: deque[Callable[[], tuple[HeldItem, ...]]] = deque()
        found: list[tuple[HeldItem, ...]] = []
        refs: list[str] = []  # all shares taken from the store
        n_frames = 0

        def finish() -> None:
            nonlocal n_frames
            found.append(started.popleft()())
            if isinstance(parts[len(found) - 1], VideoPart):
                n_frames += sum(len(self._pixels.get(h.ref)) for h in found[-1])

        try:
            for part in parts:
                while started and (isinstance(part, VideoPart) or len(started) >= n_ahead):
                    finish()
                ticket.check()
                started.append(self._start(part, adapters, n_frames, ticket, refs, salt))
            while started:
                finish()
        except BaseException:
            ticket.cancel()
            for ref in refs:
                self._pixels.release(ref)
            raise
        return found

    def items(
        self, parts: Sequence[MediaPart], adapters: Adapters, ticket: JobTicket | None = None, salt: str = ""
    ) -> list[list[MediaItem]]:
        """The items of each part, to compute the prompt. No pixels are held afterwards."""
        found = self.prepare(parts, adapters, ticket, salt)
        for held in found:
            for h in held:
                self._pixels.release(h.ref)
        return [[h.item for h in held] for held in found]

    def close(self) -> None:
        """End the workers. A thread that waits for them gets `Unavailable`. Safe to repeat."""
        if self.workers is not None:
            self.workers.close()

    def _start(
        self, part: MediaPart, adapters: Adapters, n_frames: int, ticket: JobTicket, refs: list[str], salt: str
    ) -> Callable[[], tuple[HeldItem, ...]]:
        """Begin to prepare one part. The returned function waits for the result. Every share taken is added to `refs`.
        `n_frames`: frames of the videos before this part."""
        if isinstance(part.source, Path):
            part = part.read(self.limits if isinstance(part, ImagePart) else self.videos)  # type: ignore[arg-type]
        source = part.source
        prepare, args, options = self._job(part, adapters, n_frames)
        if not isinstance(source, str | bytes):  # opened by a Python caller
            return lambda: self._keep(prepare(part, *args), None, refs)
        digest = self._digest(source, options, salt)
        held = self._recall(digest)
        if held is not None:
            refs += [h.ref for h in held]
            return lambda: held
        if self.workers is None:
            return lambda: self._keep(prepare(part, *args), digest, refs)
        future = self.workers.submit(prepare, part, *args)
        ticket.add(future)
        return lambda: self._keep(future.result(), digest, refs)

    def _job(
        self, part: MediaPart, adapters: Adapters, n_frames: int
    ) -> tuple[Callable[..., tuple[Encodable, ...]], tuple[Any, ...], bytes]:
        """The function that prepares the part, its further arguments, and bytes that differ wherever a request's
        options lead to another result."""
        if isinstance(part, ImagePart):
            assert adapters.image is not None
            return prepare_image, (adapters.image, self.limits, self._seal), adapters.image.parameters
        assert adapters.video is not None
        left = self.videos.limits.max_frames - n_frames
        if left <= 0:
            most = self.videos.limits.max_frames
            raise InvalidRequest(f"the request's videos have more than {most} frames together", param="messages")
        options = b"video|%d|%a|" % (left, part.fps) + adapters.video.options
        return prepare_video, (adapters.video, self.videos, self._seal, left), options

    def _keep(self, made: tuple[Encodable, ...], digest: bytes | None, refs: list[str]) -> tuple[HeldItem, ...]:
        held = []
        sizes = {ref: self._pixels.get(ref).nbytes for ref in refs}
        for item, key, pixels in made:
            sizes[key.hex()] = pixels.nbytes
            if len(sizes) > 1 and sum(sizes.values()) > self._pixels.budget_bytes:  # a retry would not help
                raise _too_large()
            refs.append(self._pixels.put(key, pixels))
            held.append(HeldItem(item, key, refs[-1]))
        if digest is not None:
            with self._lock:
                self._remembered[digest] = tuple(held)
                if len(self._remembered) > _MAX_REMEMBERED:
                    self._remembered.popitem(last=False)
        return tuple(held)

    def _recall(self, digest: bytes) -> tuple[HeldItem, ...] | None:
        """The earlier result for these bytes, if all its arrays are still stored. Takes one more share of each."""
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

    def _digest(self, source: str | bytes, options: bytes, salt: str) -> bytes:
        """A digest of everything that decides the result for a source, and of the salt."""
        digest = hashlib.sha256()
        kind = type(source).__name__
        data = source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
        for part in (kind.encode(), self._fixed, options, salt.encode("utf-8", "surrogatepass"), data):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()


def _too_large() -> RequestTooLarge:
    return RequestTooLarge("the request's pictures and videos are too large together; send fewer", param="messages")
