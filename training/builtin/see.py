"""First stage: the vision tower alone learns to see, from dense labels.

python -m training.builtin.see RUN --cache CACHE --minutes 15
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.builtin.loop import Run, processes
from training.builtin.model import Heads, build, normalise
from training.builtin.pictures import GRID, SHARD, Shard, shard
from training.builtin.scene import COLOURS, KINDS, MOST, Scene

BATCH = 32
_WHOLE = {"shapes": 10, "photo": 11, "empty": 12}


class Pictures:
    """Batches of the shards of a cache, each shard in a new order whenever it comes up. Of several processes, each
    reads shards of its own."""

    def __init__(self, cache: Path, seed: int, shards: int, batch: int) -> None:
        self._cache, self._seed, self._shards, self._batch = cache, seed, shards, batch
        self._rank, self._processes = processes()
        self._loaded: dict[int, Shard] = {}
        self.per_shard = SHARD // batch

    def batch(self, step: int) -> tuple[Tensor, Tensor, list[Scene]]:
        """(pixels, marks, scenes) of `step`, the same after a resume."""
        turn, s = self._of(step)
        order = torch.randperm(SHARD, generator=torch.Generator().manual_seed(turn))
        place = step % self.per_shard
        return _rows(s, order[place * self._batch : (place + 1) * self._batch].numpy())

    def digits(self, step: int, n: int) -> tuple[Tensor, Tensor, list[Scene]]:
        """`n` more pictures, all with digits, from the same shard."""
        turn, s = self._of(step)
        there = [i for i, scene in enumerate(s.scenes) if scene.what == "digit"]
        return _rows(s, np.random.default_rng([turn, step]).choice(there, n, replace=False))

    def _of(self, step: int) -> tuple[int, Shard]:
        turn = step // self.per_shard * self._processes + self._rank
        index = turn % self._shards
        if index not in self._loaded:
            self._loaded[index] = shard(self._cache, self._seed, index)
        return turn, self._loaded[index]


def _rows(s: Shard, rows: np.ndarray) -> tuple[Tensor, Tensor, list[Scene]]:
    return torch.from_numpy(s.pixels[rows]), torch.from_numpy(s.marks[rows]).long(), [s.scenes[i] for i in rows]


def alike(scenes: list[Scene], marks: Tensor) -> Tensor:
    """For each patch of a shape, how many things like it there are: of its kind and colour, of its kind, of its colour,
    of any; int64 [n, patches, 4], meaningless where no shape is."""
    table = torch.zeros(len(scenes), len(KINDS) + 1, len(COLOURS) + 1, dtype=torch.long)
    for i, scene in enumerate(scenes):
        for t in scene.things:
            table[i, KINDS.index(t.kind) + 1, COLOURS.index(t.colour) + 1] += 1
    row, kind = torch.arange(len(scenes))[:, None], marks[..., 0].clamp(max=len(KINDS))
    colour = marks[..., 1]
    same_kind, same_colour = table.sum(2)[row, kind], table.sum(1)[row, colour]
    every = table.sum((1, 2))[:, None].expand_as(kind)
    return torch.stack([table[row, kind, colour], same_kind, same_colour, every], -1)


def seeing_loss(heads: Heads, rows: Tensor, marks: Tensor, scenes: list[Scene]) -> tuple[Tensor, dict[str, float]]:
    """`rows` [n, patches, hidden] of the vision tower."""
    kinds, colours, centres = (marks[..., i].flatten() for i in range(3))
    covered = marks[..., 0] > 0
    digit = marks[..., 0] > len(KINDS)
    kind = heads.kind(rows).flatten(0, 1)
    whole, wanted = heads.whole_of(rows), torch.tensor([_WHOLE.get(s.what, s.digit) for s in scenes])
    shape = covered & ~digit
    numbers = heads.many(rows)[shape].unflatten(-1, (4, MOST)).flatten(0, 1)
    at = torch.arange(marks.shape[1])
    own = torch.stack([at % GRID, at // GRID], -1) / GRID + 0.5 / GRID
    way = (marks[..., -3:][covered] - torch.tensor([128, 128, 0])) / torch.tensor([127, 127, 255])
    place = own.expand(len(marks), -1, -1)[covered] + way[:, :2]
    parts = {
        "kind": F.cross_entropy(kind, kinds),
        "colour": F.cross_entropy(heads.colour(rows)[~digit], colours[~digit.flatten()]),
        "centre": F.cross_entropy(heads.centre(rows).flatten(0, 1), centres, torch.tensor([1.0, 3.0])),
        "mask": F.binary_cross_entropy_with_logits(heads.mask(rows), marks[..., 3:-3].float()),
        "way": (heads.way(rows)[covered] - way).abs().mean() if covered.any() else rows.sum() * 0,
        "place": (heads.place(rows)[covered] - place).abs().mean() if covered.any() else rows.sum() * 0,
        "many": F.cross_entropy(numbers, alike(scenes, marks)[shape].flatten() - 1) if shape.any() else rows.sum() * 0,
        "whole": F.cross_entropy(whole, wanted),
    }
    right = kind.argmax(-1) == kinds
    figures = {k: float(v.detach()) for k, v in parts.items()}
    for name, chosen in (("shapes_right", shape), ("digits_right", digit)):
        if chosen.any():
            figures[name] = float(right[chosen.flatten()].float().mean())
    weights = {"kind": 2.0, "mask": 2.0, "way": 2.0, "place": 2.0}
    return torch.stack([weights.get(k, 1.0) * v for k, v in parts.items()]).sum(), figures


def vision_rows(tower: Callable, pixels: Tensor) -> Tensor:
    """[n, patches, hidden], what the projector gets."""
    return tower(normalise(pixels), output_hidden_states=True).hidden_states[-1][:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the vision tower.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--shards", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args()
    torch.manual_seed(a.seed)
    tower = build(8, 5, 0).model.vision_tower
    heads = Heads()
    pictures = Pictures(a.cache, a.seed, a.shards, BATCH)

    def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
        pixels, marks, scenes = pictures.batch(step)
        return seeing_loss(heads, vision_rows(tower, pixels), marks, scenes)

    Run(a.run, {"tower": tower, "heads": heads}, rate=1e-3, budget_s=a.minutes * 60, threads=a.threads, decay=0.25).go(
        loss_of
    )


if __name__ == "__main__":
    main()
