"""The vision lane: pictures of many requests encoded in one pass, written into the embedding cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from hydrainfer.cache import embed_ranges
from hydrainfer.core import EncodeWork, HydraError, InternalError, PixelSource, StepBatch, StepResult
from hydrainfer.models import Model
from hydrainfer.runtime.lane import Lane, LaneTicket, guarded
from hydrainfer.storage import BlockStore


class _Picture(NamedTuple):
    """One picture to encode: whose, where its pixels are, and the rows of the embedding store that it fills, [tokens]
    int64."""

    request_id: str
    ref: str
    rows: np.ndarray


class VisionRunner:
    """Executes `EncodeWork` batches; satisfies `engine.ports.Runner`.

    `embeds` is the EMBED store, `pixels` resolves a span's reference to its uint8 array. A picture whose pixels are
    gone, or are not what the model takes, fails its request alone.
    """

    def __init__(
        self,
        model: Model,
        embeds: BlockStore,
        pixels: PixelSource,
        wake: Callable[[], None],
        threads: Callable[[], int] | None = None,
    ) -> None:
        self._model = model
        self._embeds = embeds
        self._pixels = pixels
        self._lane = Lane("vision", model.device, wake, threads)

    def launch(self, batch: StepBatch) -> LaneTicket:
        """Resolve rows on the caller's thread, then fetch the pixels and execute on the lane's."""
        pictures: list[_Picture] = []

        def pack() -> StepResult:
            pictures.extend(self._picture(work) for work in batch.work)
            return StepResult(batch)

        outcome = guarded(batch, pack)
        if outcome.error is not None:
            return self._lane.complete(outcome)
        return self._lane.submit(batch, lambda: self._execute(batch, pictures))

    def close(self) -> None:
        """Wait for what is running, then end the lane's thread."""
        self._lane.close()

    def _picture(self, work: EncodeWork) -> _Picture:
        request = work.seq.request
        span, spec = request.media[work.index], self._embeds.spec
        blocks = embed_ranges(request, spec)[work.index]
        held = np.array(work.seq.blocks[spec.name][blocks.start : blocks.stop], dtype=np.int64)
        block, offset = np.divmod(np.arange(span.n_tokens), spec.block_tokens)
        return _Picture(work.seq.id, span.pixels, held[block] * spec.block_tokens + offset)

    def _fetch(self, ref: str) -> np.ndarray:
        try:
            pixels = np.asarray(self._pixels(ref))
        except KeyError:
            raise InternalError("the picture's pixels are no longer there", code="pixels_gone") from None
        size = self._model.config.vision.image_size
        if pixels.shape != (size, size, 3) or pixels.dtype != np.uint8:
            raise InternalError(
                f"a picture of shape {pixels.shape} {pixels.dtype} reached a {size}x{size} uint8 encoder"
            )
        return pixels

    def _execute(self, batch: StepBatch, pictures: list[_Picture]) -> StepResult:
        fetched: list[tuple[_Picture, np.ndarray]] = []
        failed: dict[str, HydraError] = {}
        for picture in pictures:
            try:
                fetched.append((picture, self._fetch(picture.ref)))
            except HydraError as e:
                failed[picture.request_id] = e
        if fetched:
            self._encode(fetched)
        return StepResult(batch, failed=failed)

    def _encode(self, pictures: list[tuple[_Picture, np.ndarray]]) -> None:
        store = self._embeds.rows
        assert store is not None
        with torch.inference_mode():
            for (picture, _), embedding in zip(pictures, self._model.encode([pixels for _, pixels in pictures])):
                rows = torch.from_numpy(picture.rows).to(store.device)
                store.index_copy_(0, rows, embedding[: rows.shape[0]].to(store.dtype))
        if store.device.type == "cuda":
            torch.cuda.current_stream(store.device).synchronize()  # the language lane has another stream
