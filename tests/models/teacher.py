"""A model called without runners: teacher-forced logits of one prompt, with pictures in it."""

from __future__ import annotations

import torch

from hydrainfer.core import Stage
from hydrainfer.models import LayerCache, Model, PatchedPicture
from hydrainfer.models.decoder import LastRows
from hydrainfer.ops import AttentionBatch, ScanBatch, ScanRows
from hydrainfer.processor.pictures import MediaLimits, from_image
from hydrainfer.storage import BlockStore
from tests.pillow import described

_BLOCK = 4


def pictures_of(path, images) -> list[PatchedPicture]:
    """The pixels that the checkpoint's adapter makes of PIL images, with Pillow."""
    adapter = described(path).images.adapter
    made = [from_image(image, MediaLimits()) for image in images]
    return [PatchedPicture(adapter.pixels(p), adapter.fit(*p.image.size).grid) for p in made]


def _attention(spec, n: int, spans, device) -> AttentionBatch:
    return AttentionBatch(
        counts=[n],
        contexts=[0],
        n_decodes=0,
        block_tokens=_BLOCK,
        tables=torch.arange(-(-n // _BLOCK), dtype=torch.int32, device=device)[None],
        lengths=torch.tensor([n], dtype=torch.int32, device=device),
        slots=torch.arange(n, device=device),
        starts=torch.tensor([0, n], dtype=torch.int32, device=device),
        window=spec.window,
        spans=[(0, first, stop) for first, stop in spans],
    )


def _scan(n: int, device) -> ScanBatch:
    """All rows in two pieces."""
    none = torch.empty(0, dtype=torch.int64, device=device)
    return ScanBatch(0, none, none, [ScanRows(slice(0, n // 2), -1, 1), ScanRows(slice(n // 2, n), 1, 0)])


def teacher_forced(
    model: Model, ids: list[int], pictures: list[PatchedPicture] = (), spans=(), last: LastRows | None = None
) -> torch.Tensor:
    """Logits of every position of `ids`, or only of those in `last`, in one forward, float32 [positions, vocab].
    Placeholders take the pictures' rows in order; those of `spans` (first, stop) see each other."""
    n, device = len(ids), model.device
    n_blocks = -(-n // _BLOCK)
    specs = [s for s in model.cache_specs(kv_block_tokens=_BLOCK) if Stage.DECODE in s.stages]
    caches: dict[int, LayerCache] = {}
    tokens = torch.tensor(ids, device=device)
    at = torch.isin(tokens, torch.tensor(model.config.media_tokens, dtype=torch.int64, device=device))
    with torch.inference_mode():
        x = model.embed(torch.where(at, 0, tokens))
        if pictures:
            rows = torch.cat(model.encode(list(pictures)))
            assert len(rows) == int(at.sum()), "placeholders and rows differ"
            x[at] = rows
        for spec in specs:
            batch = _attention(spec, n, spans, device) if spec.paged else _scan(n, device)
            if spec.paged:
                model.ops.prepare(batch)
            views = zip(spec.layers, BlockStore(spec, n_blocks, device).layers)
            caches |= {layer: LayerCache(parts, batch) for layer, parts in views}
        layers = [caches[model.config.text.cache_of(i)] for i in range(model.config.text.layers)]
        hidden = model.forward(x, torch.arange(n, device=device), layers, last, ids=tokens)
        return model.logits(hidden)
