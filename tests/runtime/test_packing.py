"""Rows of a batch that take the embeddings of pictures, where pictures have text inside."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydrainfer.core import LiveSequence, TokenWork
from hydrainfer.runtime.packing import pack_tokens, picture_row
from hydrainfer.runtime.tables import BlockTables
from tests.scheduler.fakes import EMBED, KV, make_request, placeholders

pytestmark = pytest.mark.cpu
GAPS = {1: ((4, 1), (8, 2)), 2: ((1, 9), (2, 10), (9, 11)), 3: ((5, 4),)}


def sequence(name, n_text, pictures, first):
    """A sequence whose blocks of pictures are in no order, from number `first` on."""
    request = make_request(name, n_text, pictures, picture_tokens=10, gaps=GAPS)
    seq = LiveSequence(request, (0.0, 0), 0.0)
    blocks = [first + b for b in range(3 * len(pictures))]
    seq.hold.blocks = {"embed": [*blocks[::2], *blocks[1::2]], "kv": [*range(100)]}
    seq.pending_media = []
    return seq


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 80), st.integers(1, 40)),
        min_size=1,
        max_size=4,
    )
)
def test_each_placeholder_takes_its_row_wherever_chunks_are_cut(cases):
    work = []
    for i, (n_text, pictures, start, count) in enumerate(cases):
        seq = sequence(f"r{i}", n_text, pictures, first=20 * i)
        start = min(start, seq.request.n_prompt - 1)
        work.append(TokenWork(seq, start, min(count, seq.request.n_prompt - start), False))
    packed = pack_tokens(work, [BlockTables(KV)], EMBED)
    in_order = [w for w in work if w.count == 1] + [w for w in work if w.count > 1]
    expected, row_of_batch = {}, 0
    for w in in_order:
        starts = {m.start: 3 * i for i, m in enumerate(w.seq.request.media)}  # their first blocks
        shown = placeholders(w.seq.request)
        for position in range(w.start, w.start + w.count):
            if position in shown:
                span, row = shown[position]
                block = w.seq.hold.blocks["embed"][starts[span.start] + row // 4]
                expected[row_of_batch] = 4 * block + row % 4
                assert picture_row(w.seq, EMBED, position) == expected[row_of_batch]
            else:
                assert picture_row(w.seq, EMBED, position) is None
                assert packed.ids[row_of_batch] == w.seq.tokens[position] > 0
            row_of_batch += 1
    if expected:
        assert dict(zip(packed.embed_at.tolist(), packed.embed_rows.tolist(), strict=True)) == expected
    else:
        assert packed.embed_at is None
