"""The layout of a pass's patches, given the sizes of its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from hydrainfer.ops import Segments, starts_of

Grid = tuple[int, int, int]


class PatchLayout(NamedTuple):
    """The layout of a pass, as the layers take it. `cos`, `sin` [rows, head_dim / 2]; `places` [rows, 2] float32: a
    patch's row and column; `sizes` [rows, 2] float32: its picture's height and width in patches; `order`: the tokens
    sorted by window, and `back`, the inverse; both None without windows. `merged`: the patches of the squares that are
    merged only after the layers, see `Cut`; None if there are none."""

    grids: Sequence[Grid]
    cos: Tensor
    sin: Tensor
    places: Tensor
    sizes: Tensor
    frames: Segments
    windows: Segments
    order: Tensor | None
    back: Tensor | None
    merged: Tensor | None


class Room(NamedTuple):
    """The size that a pass is padded to. The padding rows form a frame of their own, and windows of their own; the
    remaining frames and windows are empty."""

    rows: int
    frames: int
    windows: int


class Cut(NamedTuple):
    """How a tower cuts pictures: `merge`, the side of a token in patches, and `window`, the side of a window in tokens
    (0: no windows). `later`: the side, in these tokens, of squares that are merged after the layers, without what is
    left over at right and lower edges; 1 if there are none."""

    merge: int
    window: int
    later: int = 1

    @property
    def window_rows(self) -> int:
        return (self.window * self.merge) ** 2


class Arranged(NamedTuple):
    """A `PatchLayout` before it is on the device. `arrays`: places, sizes and, if they are not None there, order, back
    and merged, as in `PatchLayout`; frames and windows as `Segments.starts`. `frames`, `windows`: the number of rows of
    each."""

    grids: tuple[Grid, ...]
    arrays: dict[str, np.ndarray]
    frames: list[int]
    windows: list[int]


def tokens_of(grid: Grid, cut: Cut) -> int:
    """The rows of a picture's embedding."""
    t, h, w = grid
    return t * (h // cut.later) * (w // cut.later)


def rows_of(grids: Sequence[Grid], cut: Cut) -> int:
    """The number of patches of pictures with these sizes: (frame pairs, height in tokens, width in tokens)."""
    return sum(t * h * w for t, h, w in grids) * cut.merge**2


def room_for(rows: int, cut: Cut) -> Room:
    """The room of `rows` patches: enough frames for pictures of 256 patches and a few small ones, enough windows if
    every other one is whole. There are no more, because kernels also take time for empty ones."""
    frames = 4 + rows // 256
    return Room(rows, frames, frames + 2 * rows // cut.window_rows if cut.window else 0)


def fits(grids: Sequence[Grid], cut: Cut, room: Room) -> bool:
    free = room.rows - rows_of(grids, cut)
    frames = sum(t for t, _, _ in grids) + (free > 0)
    windows = 0
    if cut.window:
        windows = sum(t * -(-h // cut.window) * -(-w // cut.window) for t, h, w in grids) - (-free // cut.window_rows)
    return free >= 0 and frames <= room.frames and windows <= room.windows


def arrange(grids: Sequence[Grid], cut: Cut, room: Room | None = None) -> Arranged:
    """Arrange a pass over pictures of these sizes. `room`: the size to pad the pass to, which it `fits`; None: no
    padding."""
    m, each = cut.merge, cut.merge**2
    free = room.rows - rows_of(grids, cut) if room else 0
    places: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    frames, windows, order = [], [], []
    first = 0
    for t, h, w in grids:
        rows = np.broadcast_to(np.arange(h * m).reshape(h, 1, m, 1), (h, w, m, m))
        columns = np.broadcast_to(np.arange(w * m).reshape(1, w, 1, m), (h, w, m, m))
        places.append(np.tile(np.stack([rows.ravel(), columns.ravel()], axis=1), (t, 1)))
        sizes.append(np.full((t * h * w * each, 2), (h * m, w * m)))
        frames += [h * w * each] * t
        if cut.window:
            window = _windows((t, h, w), cut.window)
            order.append(window.argsort(kind="stable") + first)
            windows += (np.bincount(window) * each).tolist()
        first += t * h * w
    places.append(np.zeros((free, 2)))
    sizes.append(np.ones((free, 2)))
    if room:
        frames = _padded([*frames, free], room.frames)
        if cut.window:
            order.append(np.arange(first, first + free // each))
            whole, part = divmod(free, cut.window_rows)
            windows = _padded([*windows, *[cut.window_rows] * whole, part], room.windows)
    arrays = {"frames": starts_of(frames), "windows": starts_of(windows)}
    arrays |= {"places": np.concatenate(places, dtype=np.float32), "sizes": np.concatenate(sizes, dtype=np.float32)}
    if cut.window:
        by_window = np.concatenate(order)
        arrays |= {"order": by_window, "back": by_window.argsort()}
    if cut.later > 1:
        arrays["merged"] = _merged(grids, cut.later, (first + free) // cut.later**2 if room else 0)
    return Arranged(tuple(grids), arrays, frames, windows)


def _padded(lengths: list[int], n: int) -> list[int]:
    """The lengths above 0, padded with zeros to `n`."""
    some = [length for length in lengths if length]
    return some + [0] * (n - len(some))


def _merged(grids: Sequence[Grid], side: int, n_squares: int) -> np.ndarray:
    """The patches of whole squares of `side` patches, square after square, padded with zeros to `n_squares`."""
    squares, first = [np.zeros((0, side, side), dtype=np.int64)], 0
    for t, h, w in grids:
        rows = np.arange(first, first + t * h * w).reshape(t, h, w)[:, : h // side * side, : w // side * side]
        parts = rows.reshape(t, h // side, side, w // side, side).swapaxes(2, 3)
        squares.append(parts.reshape(-1, side, side))
        first += t * h * w
    found = np.concatenate(squares).ravel()
    return np.pad(found, (0, max(0, n_squares * side**2 - len(found))))


def _windows(grid: Grid, side: int) -> np.ndarray:
    """The window index of every token, [t * h * w]. Windows are squares of `side` tokens, smaller at right and lower
    edges."""
    t, h, w = grid
    across, down = -(-w // side), -(-h // side)
    frame = (np.arange(h) // side)[:, None] * across + np.arange(w) // side
    return (frame + (np.arange(t) * (across * down))[:, None, None]).ravel()
