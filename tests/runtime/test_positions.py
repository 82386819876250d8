"""Multimodal rotary positions of prompts and batches; against transformers' own in tests/models."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydrainfer.core import (
    LiveSequence,
    MediaSpan,
    Request,
    SamplingParams,
    TokenWork,
    answer_ahead,
    answer_keys,
    chain_of,
    chain_root,
    split_chain,
)
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


def test_text_inside_a_picture_has_no_such_positions():
    with pytest.raises(AssertionError, match="text inside a picture"):
        prompt_positions(request(10, span(2, (1, 2, 3), gaps=((3, 1),))))


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
        LiveSequence(request(10, span(2, (1, 2, 3)), id="a"), (0.0, 0), 0.0, produced=(1, 2)),
        LiveSequence(request(6, id="b"), (0.0, 1), 0.0),
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


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.tuples(*[st.integers(1, 4)] * 3), st.integers(0, 5), st.booleans()), max_size=4
    ),
    st.integers(0, 12),
)
def test_an_answers_keys_are_a_prompts_where_its_positions_are(spans, n_last):
    """What an answer adds is found by the next prompt only if the same text would have the same positions there."""
    media, at = [], 0
    for i, (n_text, grid, apart, joined) in enumerate(spans):
        times = tuple(k * apart for k in range(grid[0])) if apart else ()
        media.append(span(at + n_text, grid, times=times, joined=joined and i > 0))
        at = media[-1].end
    keys = chain_of(chain_root(), range(at + n_last), 4, media)
    first = msgspec.structs.replace(request(at + n_last, *media), keys=keys)
    tokens = tuple(range(first.n_prompt + 9))
    following = msgspec.structs.replace(first, prompt_ids=tokens)
    behind = np.arange(9) + first.n_prompt + prompt_positions(first).delta
    same = np.array_equal(prompt_positions(following).table[:, first.n_prompt :], [behind] * 3)
    known = split_chain(keys)[1:]
    more = answer_keys(first, tokens, known, 4)
    assert len(known) + len(more) == len(tokens) // 4
    assert (more == split_chain(chain_of(chain_root(), tokens, 4, media))[1 + len(known) :]) == same
    step_by_step = list(known)
    for n in range(first.n_prompt, len(tokens) + 1):
        step_by_step += answer_keys(first, tokens[:n], step_by_step, 4)
    assert step_by_step == known + more
    assert (answer_ahead(first) == 0) == same


def test_ended_requests_with_long_prompts_do_not_fill_the_memory():
    kept, n = RotaryPositions(), 1 << 15
    for i in range(100):
        media = (MediaSpan(4, 64, b"k", "p", grid=(1, 8, 8)),)
        r = Request(id=f"r{i}", prompt_ids=(1,) * n, sampling=SamplingParams(), max_tokens=2, seed=0, media=media)
        work = TokenWork(LiveSequence(r, (0.0, i), 0.0), n - 1, 1, True)
        assert kept.of([work], np.array([n - 1]), np.array([0, 1])).tolist() == [[n - 1 - 64 + 8]] * 3
    assert sum(r.n_prompt for r, _ in kept._kept.values()) <= 1 << 21
