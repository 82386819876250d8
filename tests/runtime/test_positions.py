"""Multimodal rotary positions of prompts and batches; against transformers' own in tests/models."""

import numpy as np
import pytest

from hydrainfer.core import MediaSpan, Request, SamplingParams, Sequence, TokenWork
from hydrainfer.runtime.positions import RotaryPositions, prompt_positions

pytestmark = pytest.mark.unit


def request(n_prompt, *spans, id="r"):
    return Request(
        id=id, prompt_ids=tuple(range(n_prompt)), sampling=SamplingParams(), max_tokens=8, seed=0, media=spans
    )


def span(start, grid, **more):
    return MediaSpan(start, int(np.prod(grid)), b"", "", grid, **more)


def test_text_alone_counts_on():
    table, delta = prompt_positions(request(5))
    assert table.tolist() == [[0, 1, 2, 3, 4]] * 3 and delta == 0


def test_a_picture_has_rows_and_columns_and_text_goes_on_behind_its_longer_side():
    table, delta = prompt_positions(request(10, span(2, (1, 2, 3))))
    assert table.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert delta == 7 - 10


def test_joined_spans_are_one_video():
    one = request(14, span(1, (3, 2, 2), times=(0, 4, 8)))
    parts = [span(1 + 4 * i, (1, 2, 2), times=(4 * i,), joined=i > 0) for i in range(3)]
    table, delta = prompt_positions(request(14, *parts))
    assert np.array_equal(table, prompt_positions(one).table)
    assert table[0].tolist() == [0, 1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9, 3]
    assert delta == 10 - 14, "behind the largest position"


def test_chunks_and_decodes_of_several_requests_are_slices_of_them():
    rotary = RotaryPositions()
    seqs = [
        Sequence(request(10, span(2, (1, 2, 3)), id="a"), (0.0, 0), 0.0, produced=(1, 2)),
        Sequence(request(6, id="b"), (0.0, 1), 0.0),
    ]
    whole = np.concatenate([prompt_positions(seqs[0].request).table, np.array([[7, 8]] * 3)], axis=1)
    for cut in range(13):
        work = [w for w in (TokenWork(seqs[0], 0, cut, False), TokenWork(seqs[0], cut, 12 - cut, True)) if w.count]
        work.append(TokenWork(seqs[1], 1, 4, False))
        counts = [w.count for w in work]
        starts = np.concatenate([[0], np.cumsum(counts)])
        plain = np.concatenate([np.arange(w.start, w.start + w.count) for w in work])
        found = rotary.of(work, plain, starts)
        assert np.array_equal(found[:, :12], whole) and found[:, 12:].tolist() == [[1, 2, 3, 4]] * 3
