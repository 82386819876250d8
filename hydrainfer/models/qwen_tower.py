"""The vision transformers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures of any sizes, many in one pass.

    frames -> patches -> blocks, each segment of rows by itself -> every merge x merge rows become one

The four rows of a merge square lie beside each other from the start, so merging is a view. No row sees another frame
pair (temporal patch), so some frame pairs of a video are a picture like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.checkpoint import ModelConfig, QwenVisionConfig
from hydrainfer.models.activations import activation
from hydrainfer.models.picture import PatchedPicture
from hydrainfer.models.slots import Slot, empty
from hydrainfer.ops import OpSet, Segments, to_device

_EPS = 1e-6
_PASS_ROWS = 16_384
"""Patches of one pass, unless a single picture has more: bounds the memory that a batch takes."""
_KEPT_LAYOUTS = 8
_CPU_PASS_BYTES = 32 << 20
"""The most that a pass's widest activation takes on a CPU. glibc gives larger pieces back at once and every layer gets
fresh pages, which cost a sixth of the time; and a matrix product of this many rows gains nothing by more."""


class _PatchLayout(NamedTuple):
    """Where the patches of a pass lie. `cos`, `sin` [rows, head_dim / 2]; `places` [rows, 2]: row and column; `sizes`
    [rows, 2]: patches high and wide; `order`: tokens by windows, with `back` its inverse, None without windows."""

    cos: Tensor
    sin: Tensor
    places: Tensor
    sizes: Tensor
    frames: Segments
    windows: Segments
    order: Tensor | None
    back: Tensor | None


@dataclass(slots=True)
class _Block:
    """One layer's weights; a norm is a weight and perhaps a bias."""

    norm_1: tuple[Tensor, ...]
    norm_2: tuple[Tensor, ...]
    qkv: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]

    def slots(self, prefix: str, gated: bool) -> dict[str, Slot]:
        found = _named(f"{prefix}.norm1", self.norm_1) | _named(f"{prefix}.norm2", self.norm_2)
        found |= _named(f"{prefix}.attn.qkv", self.qkv) | _named(f"{prefix}.attn.proj", self.out)
        if not gated:
            return found | _named(f"{prefix}.mlp.fc1", self.up) | _named(f"{prefix}.mlp.fc2", self.down)
        gate, up = zip(*(t.chunk(2) for t in self.up))
        found |= _named(f"{prefix}.mlp.gate_proj", gate) | _named(f"{prefix}.mlp.up_proj", up)
        return found | _named(f"{prefix}.mlp.down_proj", self.down)


@dataclass(slots=True)
class _Merger:
    """`late`: the norm comes after merging."""

    norm: tuple[Tensor, ...]
    fc_1: tuple[Tensor, Tensor]
    fc_2: tuple[Tensor, Tensor]
    late: bool = False

    def slots(self, prefix: str) -> dict[str, Slot]:
        return (
            _named(f"{prefix}.norm", self.norm)
            | _named(f"{prefix}.fc1", self.fc_1)
            | _named(f"{prefix}.fc2", self.fc_2)
        )


def _named(name: str, tensors: tuple[Tensor, ...]) -> dict[str, Slot]:
    return {f"{name}.{leaf}": Slot(t) for leaf, t in zip(("weight", "bias"), tensors)}


class QwenVision:
    """A `VisionTower`: uint8 [frames, height, width, 3], already resized → rows [tokens, out * (1 + levels)]. One frame
    alone stands for `temporal` equal ones."""

    def __init__(self, config: ModelConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        c: QwenVisionConfig = config.vision
        self.config = c
        self._ops = ops
        self._activation = activation(c.activation, ops)
        self.device, self.dtype = device, dtype

        def make(*shape: int) -> Tensor:
            return empty(shape, dtype, device)

        def norm(width: int) -> tuple[Tensor, ...]:
            return (make(width),) if c.gated else (make(width), make(width))

        def linear(inner: int, outer: int) -> tuple[Tensor, Tensor]:
            return make(outer, inner), make(outer)

        self.patch = make(c.hidden, 3 * c.temporal * c.patch**2)
        self.patch_bias = make(c.hidden) if c.patch_bias else None
        self.table = make(c.grid**2, c.hidden) if c.grid else None
        self.blocks = [
            _Block(
                norm(c.hidden),
                norm(c.hidden),
                qkv=linear(c.hidden, 3 * c.hidden),
                out=linear(c.hidden, c.hidden),
                up=linear(c.hidden, c.intermediate * (1 + c.gated)),
                down=linear(c.intermediate, c.hidden),
            )
            for _ in range(c.layers)
        ]
        wide = c.hidden * c.merge**2
        self.merger = _Merger(norm(c.hidden), linear(wide, wide), linear(wide, c.out))
        self.deep = [_Merger(norm(wide), linear(wide, wide), linear(wide, c.out), late=True) for _ in c.levels]
        quarter = torch.arange(0, c.hidden // c.heads // 2, 2, dtype=torch.int64).float() / (c.hidden // c.heads // 2)
        self._inverse = 1.0 / (c.theta**quarter)
        self._mean = torch.tensor(c.pixels.mean, device=device)
        self._std = torch.tensor(c.pixels.std, device=device)
        self._layouts: dict[tuple, _PatchLayout] = {}

    def slots(self) -> dict[str, Slot]:
        c = self.config
        found = {"vision.patch_embed.proj.weight": Slot(self.patch, (c.hidden, 3, c.temporal, c.patch, c.patch))}
        if self.patch_bias is not None:
            found["vision.patch_embed.proj.bias"] = Slot(self.patch_bias)
        if self.table is not None:
            found["vision.pos_embed.weight"] = Slot(self.table)
        for i, block in enumerate(self.blocks):
            found |= block.slots(f"vision.blocks.{i}", c.gated)
        found |= self.merger.slots("vision.merger")
        for i, merger in enumerate(self.deep):
            found |= merger.slots(f"vision.deepstack_merger_list.{i}")
        return found

    def rows(self, picture: PatchedPicture) -> int | None:
        """The number of rows of its embedding; None if it is no picture that this tower takes."""
        if picture.grid is None:
            return None
        (t, h, w), side = picture.grid, self.config.patch * self.config.merge
        frames = (1, self.config.temporal) if t == 1 else (t * self.config.temporal,)
        fits = t > 0 and picture.pixels.shape[1:] == (h * side, w * side, 3) and picture.pixels.shape[0] in frames
        return t * h * w if fits and h and w else None

    def encode(self, pictures: list[PatchedPicture]) -> list[Tensor]:
        """[rows, out * (1 + levels)] each."""
        found: list[Tensor] = []
        for some in self._passes(pictures):
            found += self._forward(some).split([_tokens(p) for p in some])
        return found

    def _passes(self, pictures: list[PatchedPicture]) -> Iterator[list[PatchedPicture]]:
        some: list[PatchedPicture] = []
        c, most = self.config, _PASS_ROWS
        if self.device.type == "cpu":
            widest = max(3 * c.hidden, c.intermediate * (1 + c.gated))
            most = min(most, _CPU_PASS_BYTES // (widest * self.dtype.itemsize))
        n, each = 0, c.merge**2
        for picture in pictures:
            more = _tokens(picture) * each
            if some and n + more > most:
                yield some
                some, n = [], 0
            some.append(picture)
            n += more
        if some:
            yield some

    def _forward(self, pictures: list[PatchedPicture]) -> Tensor:
        """[tokens of all pictures, out * (1 + levels)]."""
        c, layout = self.config, self._kept_layout(pictures)
        x = self._ops.linear(torch.cat([self._patches(p) for p in pictures]), self.patch, self.patch_bias)
        if self.table is not None:
            x += self._positions(self.table, layout).to(x.dtype)
        if layout.order is not None:
            x = x.unflatten(0, (-1, c.merge**2))[layout.order].flatten(0, 1)
        deep = {}
        for i, block in enumerate(self.blocks):
            whole = not c.window or i in c.full_layers
            self._run(block, x, layout, layout.frames if whole else layout.windows)
            if i in c.levels:
                deep[i] = self._merge(self.deep[c.levels.index(i)], x)
        merged = self._merge(self.merger, x)
        if layout.back is not None:
            merged = merged[layout.back]
        return torch.cat([merged, *(deep[i] for i in sorted(deep))], dim=1) if deep else merged

    def _patches(self, picture: PatchedPicture) -> Tensor:
        """Normalised patches [rows, 3 * temporal * patch ** 2], merge squares one after the other."""
        c = self.config
        assert picture.grid is not None
        t, h, w = picture.grid
        pixels = to_device(picture.pixels.copy(), self.device)  # [frames, height, width, 3]; it is read-only
        scaled = (pixels.float().mul_(c.pixels.scale) - self._mean).div_(self._std).to(self.dtype)
        scaled = scaled.expand(t * c.temporal, -1, -1, -1) if t == 1 else scaled
        parts = scaled.view(t, c.temporal, h, c.merge, c.patch, w, c.merge, c.patch, 3)
        return parts.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).flatten(0, 4).flatten(1)

    def _kept_layout(self, pictures: list[PatchedPicture]) -> _PatchLayout:
        """`_layout`, of the last few combinations of sizes kept: its parts are made on the host."""
        key = tuple(picture.grid for picture in pictures)
        layout = self._layouts.pop(key, None)
        if layout is None:
            layout = self._layout(pictures)
        self._layouts[key] = layout  # the newest is the last
        if len(self._layouts) > _KEPT_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return layout

    def _layout(self, pictures: list[PatchedPicture]) -> _PatchLayout:
        c, m = self.config, self.config.merge
        places, sizes, frames, windows, order = [], [], [], [], []
        first = 0
        for picture in pictures:
            assert picture.grid is not None
            t, h, w = picture.grid
            rows = torch.arange(h * m).view(h, 1, m, 1).expand(h, w, m, m)
            columns = torch.arange(w * m).view(1, w, 1, m).expand(h, w, m, m)
            places.append(torch.stack([rows.flatten(), columns.flatten()], dim=1).repeat(t, 1))
            sizes.append(torch.tensor([[h * m, w * m]]).expand(t * h * w * m * m, 2))
            frames += [h * w * m * m] * t
            if c.window:
                window = _windows(t, h, w, c.window)
                order.append(window.argsort(stable=True) + first)
                windows += [n * m * m for n in window.bincount().tolist()]
            first += t * h * w
        place = torch.cat(places)  # [rows, 2]: row and column of each patch
        turns = (place.float()[..., None] * self._inverse).flatten(1)  # [rows, head_dim / 2]
        by_window = torch.cat(order) if c.window else None
        if by_window is not None:
            turns = turns.unflatten(0, (-1, m * m))[by_window].flatten(0, 1)
        turns = turns.to(self.device)
        return _PatchLayout(
            turns.cos(),
            turns.sin(),
            place.to(self.device),
            torch.cat(sizes).to(self.device),
            Segments(frames, self.device),
            Segments(windows, self.device),
            None if by_window is None else by_window.to(self.device),
            None if by_window is None else by_window.argsort().to(self.device),
        )

    def _positions(self, table: Tensor, layout: _PatchLayout) -> Tensor:
        """The learned square stretched over each picture, corners on corners: bilinear, [rows, hidden] float32."""
        side = self.config.grid
        at = layout.places.float() * (side - 1) / (layout.sizes - 1).clamp(min=1)  # [rows, 2]
        low = at.floor()
        part, low = at - low, low.long()
        high = (low + 1).clamp(max=side - 1)
        found = torch.zeros((at.shape[0], table.shape[1]), device=table.device)
        for rows, row_weight in ((low[:, 0], 1 - part[:, 0]), (high[:, 0], part[:, 0])):
            for columns, weight in ((low[:, 1], 1 - part[:, 1]), (high[:, 1], part[:, 1])):
                found += table[rows * side + columns].float() * (row_weight * weight)[:, None]
        return found

    def _norm(self, x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        if len(weights) == 1:
            return self._ops.rms_norm(x, weights[0], _EPS)
        return F.layer_norm(x, (x.shape[-1],), weights[0], weights[1], _EPS)

    def _run(self, block: _Block, x: Tensor, layout: _PatchLayout, segments: Segments) -> None:
        """One block over [rows, hidden], in place."""
        ops, heads = self._ops, self.config.heads
        dim = self.config.hidden // heads
        qkv = ops.linear(self._norm(x, block.norm_1), *block.qkv).view(-1, 3 * heads, dim)
        ops.rope(qkv[:, : 2 * heads], layout.cos, layout.sin)
        q, k, v = qkv.split(heads, dim=1)
        mixed = ops.attention_segments(q, k, v, segments, dim**-0.5)
        ops.linear_add(x, mixed.flatten(1), *block.out)
        inner = ops.linear(self._norm(x, block.norm_2), *block.up)
        inner = ops.silu_and_mul(inner) if self.config.gated else self._activation(inner)
        ops.linear_add(x, inner, *block.down)

    def _merge(self, merger: _Merger, x: Tensor) -> Tensor:
        """[rows, hidden] → [tokens, out]."""
        n = self.config.merge**2
        if merger.late:
            x = self._norm(x.unflatten(0, (-1, n)).flatten(1), merger.norm)
        else:
            x = self._norm(x, merger.norm).unflatten(0, (-1, n)).flatten(1)
        return self._ops.linear(F.gelu(self._ops.linear(x, *merger.fc_1)), *merger.fc_2)


def _tokens(picture: PatchedPicture) -> int:
    assert picture.grid is not None
    t, h, w = picture.grid
    return t * h * w


def _windows(t: int, h: int, w: int, side: int) -> Tensor:
    """The window of every token, [t * h * w]: squares of `side` tokens, smaller at the right and lower edges."""
    across, down = -(-w // side), -(-h // side)
    frame = (torch.arange(h) // side)[:, None] * across + torch.arange(w) // side
    return (frame + (torch.arange(t) * (across * down))[:, None, None]).flatten()
