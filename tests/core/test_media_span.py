"""The places of a picture's placeholders in a prompt, with other tokens between them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydrainfer.core import MediaSpan

pytestmark = pytest.mark.unit


@st.composite
def spans(draw):
    """A span, and of each of its tokens the row, None where it is no placeholder."""
    runs = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), max_size=6))  # rows, and others behind them
    gaps, rows, row, n_others = [], [], 0, 0
    for n_rows, n in runs:
        rows += [*range(row, row + n_rows), *[None] * n]
        row, n_others = row + n_rows, n_others + n
        gaps.append((row, n_others))
    n_last = draw(st.integers(1, 4))
    rows += range(row, row + n_last)
    return MediaSpan(draw(st.integers(0, 9)), row + n_last, b"k", "p", gaps=tuple(gaps)), rows


@given(spans())
def test_rows_are_counted_from_any_position(made):
    span, rows = made
    assert span.end == span.start + len(rows)
    for position in range(span.end + 3):
        before = rows[: max(0, position - span.start)]
        assert span.rows_before(position) == sum(row is not None for row in before)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(span), type=MediaSpan) == span


def test_a_picture_without_text_inside_takes_no_bytes_for_it():
    plain, broken = MediaSpan(3, 9, b"k", "p"), MediaSpan(3, 9, b"k", "p", gaps=((3, 1), (6, 2)))
    size, larger = (len(msgspec.msgpack.encode(span)) for span in (plain, broken))
    assert b"gaps" not in msgspec.msgpack.encode(plain) and larger - size < 20
