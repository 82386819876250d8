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
    """One picture to encode and the rows of the embedding store that it fills, [tokens] int64."""

    pixels: np.ndarray
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
        """Resolve pixels and rows on the caller's thread, then execute on the lane's."""
        pictures: list[_Picture] = []
        failed: dict[str, HydraError] = {}

        def pack() -> StepResult:
            for work in batch.work:
                try:
                    pictures.append(self._picture(work))
                except HydraError as e:
                    failed[work.seq.id] = e
            return StepResult(batch, failed=failed)

        outcome = guarded(batch, pack)
        if outcome.error is not None or not pictures:
            return self._lane.complete(outcome)
        return self._lane.submit(batch, lambda: self._execute(batch, pictures, failed))

    def close(self) -> None:
        """Wait for what is running, then end the lane's thread."""
        self._lane.close()

    def _picture(self, work: EncodeWork) -> _Picture:
        request = work.seq.request
        span, spec = request.media[work.index], self._embeds.spec
        try:
            pixels = np.asarray(self._pixels(span.pixels))
        except KeyError:
            raise InternalError("the picture's pixels are no longer there", code="pixels_gone") from None
        size = self._model.config.vision.image_size
        if pixels.shape != (size, size, 3) or pixels.dtype != np.uint8:
            raise InternalError(
                f"a picture of shape {pixels.shape} {pixels.dtype} reached a {size}x{size} uint8 encoder"
            )
        blocks = embed_ranges(request, spec)[work.index]
        held = np.array(work.seq.blocks[spec.name][blocks.start : blocks.stop], dtype=np.int64)
        block, offset = np.divmod(np.arange(span.n_tokens), spec.block_tokens)
        return _Picture(pixels, held[block] * spec.block_tokens + offset)

    def _execute(self, batch: StepBatch, pictures: list[_Picture], failed: dict[str, HydraError]) -> StepResult:
        store = self._embeds.rows
        assert store is not None
        with torch.inference_mode():
            for picture, embedding in zip(pictures, self._model.encode([p.pixels for p in pictures])):
                rows = torch.from_numpy(picture.rows).to(store.device)
                store.index_copy_(0, rows, embedding[: rows.shape[0]].to(store.dtype))
        if store.device.type == "cuda":
            torch.cuda.current_stream(store.device).synchronize()  # the language lane has another stream
        return StepResult(batch, failed=failed)
