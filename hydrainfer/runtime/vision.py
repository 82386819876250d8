"""The vision lane: pictures of many requests encoded in one pass, written into the embedding cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from hydrainfer.core import EncodeWork, HydraError, InternalError, Lane, MediaSpan, PixelSource, StepBatch, StepResult
from hydrainfer.models import Model, PatchedPicture
from hydrainfer.ops import to_device
from hydrainfer.runtime.graphs import Capture, PassGraphs, capture_on, passes_of
from hydrainfer.runtime.lane import LaneThread, LaneTicket, guarded
from hydrainfer.storage import BlockStore


class _PictureRows(NamedTuple):
    """One span to encode: its request, the span with the reference to its pixels, and the rows of the embedding store
    that it fills, [tokens] int64."""

    request_id: str
    span: MediaSpan
    rows: np.ndarray


class VisionRunner:
    """Executes `EncodeWork` batches; satisfies `engine.ports.Runner`.

    `embeds` is the EMBED store, `pixels` resolves a span's reference to its uint8 array. A picture whose pixels are
    gone, or are not what the model takes, fails its request alone. `capture`: if given, passes of few or small pictures
    are replayed from graphs.
    """

    def __init__(
        self,
        model: Model,
        embeds: BlockStore,
        pixels: PixelSource,
        lane: LaneThread,
        capture: Capture | None = None,
    ) -> None:
        passes = passes_of(model)
        self._graphs = None if capture is None or passes is None else PassGraphs(passes, capture)
        self._model = model
        self._embeds = embeds
        self._pixels = pixels
        self._lane = lane

    def launch(self, batch: StepBatch) -> LaneTicket:
        """Resolve rows on the caller's thread, then fetch the pixels and execute on the lane's."""
        places: list[_PictureRows] = []

        def pack() -> StepResult:
            places.extend(self._place(work) for work in batch.work)
            return StepResult(batch)

        outcome = guarded(batch, pack)
        if outcome.error is not None:
            return self._lane.complete(outcome)
        return self._lane.submit(batch, lambda: self._execute(batch, places))

    def capture(self) -> None:
        """Capture all graphs, as `LanguageRunner.capture` does."""
        graphs = self._graphs
        if graphs and not capture_on(self._lane, Lane.VISION, self._model.device, graphs.capture_all):
            self._graphs = None

    @property
    def has_graphs(self) -> bool:
        return self._graphs is not None

    def close(self) -> None:
        """Wait for what is running, then end the lane's thread and free the graphs."""
        self._lane.close()
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None

    def _place(self, work: EncodeWork) -> _PictureRows:
        request = work.seq.request
        span, spec = request.media[work.index], self._embeds.spec
        held = np.array(spec.held(work.seq, spec.pictures(request)[work.index]), dtype=np.int64)
        block, offset = np.divmod(np.arange(span.n_tokens), spec.block_tokens)
        return _PictureRows(work.seq.id, span, held[block] * spec.block_tokens + offset)

    def _fetch(self, span: MediaSpan) -> PatchedPicture:
        try:
            picture = PatchedPicture(np.asarray(self._pixels(span.pixels)), span.grid)
        except KeyError:
            raise InternalError("the picture's pixels are no longer there", code="pixels_gone") from None
        assert self._model.vision is not None, f"role {self._model.role} loads no vision tower"
        pixels = picture.pixels
        if pixels.dtype != np.uint8 or self._model.vision.rows(picture) != span.n_tokens:
            raise InternalError(
                f"pixels of shape {pixels.shape} {pixels.dtype} and grid {span.grid} reached an encoder that makes no "
                f"{span.n_tokens} rows of them"
            )
        return picture

    def _execute(self, batch: StepBatch, places: list[_PictureRows]) -> StepResult:
        fetched: list[tuple[_PictureRows, PatchedPicture]] = []
        failed: dict[str, HydraError] = {}
        for place in places:
            try:
                fetched.append((place, self._fetch(place.span)))
            except HydraError as e:
                failed[place.request_id] = e
        if fetched:
            self._encode(fetched)
        return StepResult(batch, failed=failed)

    def _encode(self, pictures: list[tuple[_PictureRows, PatchedPicture]]) -> None:
        store = self._embeds.rows
        assert store is not None
        with torch.inference_mode():
            found = self._model.encode([picture for _, picture in pictures])
            rows = to_device(np.concatenate([place.rows for place, _ in pictures]), store.device)
            first = 0
            for embedding in found:
                store.index_copy_(0, rows[first : first + len(embedding)], embedding.to(store.dtype))
                first += len(embedding)
