"""Pictures of any sizes, of several requests, in one vision batch: each request's rows are those it gets alone."""

from __future__ import annotations

import threading

import pytest
import torch
from PIL import Image

from hydrainfer.cache import CacheSet
from hydrainfer.core import EncodeWork, Lane, LiveSequence, MediaSpan, Request, Role, SamplingParams, StepBatch
from hydrainfer.models import load_model
from hydrainfer.processor import load_description
from hydrainfer.processor.pictures import Picture
from hydrainfer.runtime import LaneThread, VisionRunner
from hydrainfer.storage import BlockStore
from tests.checkpoints import make_picture
from tests.checkpoints_next import make_llava_next

pytestmark = pytest.mark.cpu
REQUESTS = [[(100, 60), (37, 290)], [(590, 41)], [(5, 7), (84, 84), (300, 299)]]


class Encoder:
    """Model, image cache and runner of one E instance."""

    def __init__(self, path) -> None:
        self.adapter = load_description(path).images.adapter
        self.model = load_model(path, Role.parse("E"))
        (spec,) = self.model.cache_specs(embed_block_tokens=8)
        self.caches, self.store = CacheSet({spec: 64}), BlockStore(spec, 64)
        self.pixels: dict = {}
        self._wake = threading.Event()
        lane = LaneThread("vision", self.model.device, self._wake.set)
        self.runner = VisionRunner(self.model, self.store, self.pixels.__getitem__, lane)

    def sequence(self, name: str, sizes) -> LiveSequence:
        media, start = [], 0
        for i, (width, height) in enumerate(sizes):
            key = f"{name}/{i}"
            image = Image.fromarray(make_picture(width + height, max(width, height)))
            image = image.crop((0, 0, width, height))
            item = self.adapter.fit(width, height)
            self.pixels[key] = self.adapter.pixels(Picture(image, "RGB"))
            media.append(MediaSpan(start, item.n_tokens, key.encode(), key, item.grid))
            start += item.n_tokens
        request = Request(
            id=name, prompt_ids=(0,) * start, sampling=SamplingParams(), max_tokens=1, seed=0, media=tuple(media)
        )
        seq = LiveSequence(request, (0.0, 0), 0.0)
        lease = self.caches.reserve(name, {"embed": range(sum(self.store.spec.blocks_for(m.n_tokens) for m in media))})
        assert lease is not None
        seq.hold.blocks = lease.blocks
        return seq

    def encode(self, seqs: list[LiveSequence]) -> None:
        work = [EncodeWork(s, i) for s in seqs for i in range(len(s.request.media))]
        ticket = self.runner.launch(StepBatch(1, Lane.VISION, work, len(work)))
        while (result := ticket.poll(0.0)) is None:
            assert self._wake.wait(60)
            self._wake.clear()
        assert result.error is None and not result.failed

    def rows(self, seq: LiveSequence) -> torch.Tensor:
        """What its blocks hold, [blocks, tokens of a block, width]."""
        return self.store.rows.unflatten(0, (-1, self.store.spec.block_tokens))[seq.hold.blocks["embed"]].clone()


def test_requests_encoded_together_get_what_each_gets_alone(tmp_path):
    encoder = Encoder(make_llava_next(tmp_path))
    seqs = [encoder.sequence(f"r{i}", sizes) for i, sizes in enumerate(REQUESTS)]
    assert len({encoder.pixels[m.pixels].shape for s in seqs for m in s.request.media}) > 2
    encoder.encode(seqs)
    together = [encoder.rows(s) for s in seqs]
    encoder.store.rows.zero_()
    for seq, want in zip(seqs, together):
        before = encoder.store.rows.clone()
        encoder.encode([seq])
        got = encoder.rows(seq)
        assert got.abs().sum() > 0 and not torch.equal(encoder.store.rows, before)
        for span, first in zip(seq.request.media, starts(seq, encoder.store.spec)):
            rows = slice(first, first + span.n_tokens)
            torch.testing.assert_close(got.flatten(0, 1)[rows], want.flatten(0, 1)[rows], atol=1e-5, rtol=1e-5)
    encoder.runner.close()


def starts(seq: LiveSequence, spec) -> list[int]:
    """The first row of each picture among the rows of its request's blocks."""
    found, n = [], 0
    for span in seq.request.media:
        found.append(n)
        n += spec.blocks_for(span.n_tokens) * spec.block_tokens
    return found
