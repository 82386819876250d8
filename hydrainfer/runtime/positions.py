"""Multimodal rotary positions: (time, row, column) of every token of a prompt (Qwen2-VL, section 2.1)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hydrainfer.core import Request, TokenWork

_KEPT, _KEPT_TOKENS = 1024, 1 << 21  # requests, and tokens of their prompts, each of which takes some 60 bytes


class PromptPositions(NamedTuple):
    """The rotary positions of a request. `table` [3, n_prompt] int64: those of the prompt. After the prompt, a token's
    three positions are its index plus `delta`."""

    table: np.ndarray
    delta: int


def prompt_positions(request: Request) -> PromptPositions:
    """The rotary positions of a prompt, as `get_rope_index` of transformers computes them. Each token of text adds one
    in all three dimensions. A span's tokens have the origin, which is the position after the text before it, plus their
    (time, row, column). The text after the span continues at the origin plus the longer side of its grid."""
    table = np.empty((3, request.n_prompt), dtype=np.int64)
    at = origin = position = 0  # `position` is that of prompt token `at`
    for span in request.media:
        assert span.grid is not None, "a model with multimodal rotary positions needs the grids of its pictures"
        assert not span.gaps, "multimodal rotary positions of text inside a picture are not defined"
        n_text = span.start - at
        table[:, at : span.start] = np.arange(position, position + n_text)
        if not span.joined:
            origin = position + n_text
        t, h, w = span.grid
        at = span.end
        here = table[:, span.start : at].reshape(3, t, h, w)
        here[0] = origin + np.array(span.times or range(t))[:, None, None]
        here[1] = origin + np.arange(h)[:, None]
        here[2] = origin + np.arange(w)
        position = origin + max(h, w)
    table[:, at:] = np.arange(position, position + request.n_prompt - at)
    return PromptPositions(table, int(table.max()) + 1 - request.n_prompt if request.media else 0)


class RotaryPositions:
    """The rotary positions of batches. Those of the latest requests are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[Request, PromptPositions]] = OrderedDict()
        self._n_tokens = 0

    def of(self, items: Sequence[TokenWork], positions: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """The rotary positions, int64 [3, rows], given plain `positions` [rows]. `starts`: the first row of each
        request."""
        found = np.repeat(positions[None], 3, axis=0)
        for r, w in enumerate(items):
            request = w.seq.request
            if not request.media:
                continue
            table, delta = self._of(request)
            first, split = int(starts[r]), min(max(request.n_prompt - w.start, 0), w.count)
            found[:, first : first + split] = table[:, w.start : w.start + split]
            found[:, first + split : first + w.count] += delta
        return found

    def _of(self, request: Request) -> PromptPositions:
        kept = self._kept.get(request.id)
        if kept is None or kept[0] is not request:
            self._n_tokens += request.n_prompt - (kept[0].n_prompt if kept is not None else 0)
            kept = self._kept[request.id] = (request, prompt_positions(request))
            self._kept.move_to_end(request.id)
            while len(self._kept) > 1 and (len(self._kept) > _KEPT or self._n_tokens > _KEPT_TOKENS):
                self._n_tokens -= self._kept.popitem(last=False)[1][0].n_prompt
        self._kept.move_to_end(request.id)
        return kept[1]
