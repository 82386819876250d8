"""Placeholders repeated in a prompt, with texts between them."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrainfer.processor import InnerText, MediaItem
from hydrainfer.processor.text import expand

pytestmark = pytest.mark.cpu


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from(["<pad>", "\n<pad>", "row 2", " <pad> <pad>"])),
        max_size=5,
    ),
    st.integers(1, 4),
    st.integers(1, 2),
)
@settings(max_examples=60, deadline=None)
def test_texts_stand_behind_their_rows(model, texts, n_last, n_pictures):
    placeholder, places, n_rows = model.images.token_id, {}, 0
    want, gaps = [], []
    for n, words in texts:
        n_rows += n
        places.setdefault(words, []).append(n_rows)
        want += [placeholder] * n + model.tokenizer.encode(words, add_special_tokens=False).ids
        gaps.append((n_rows, len(want) - n_rows))
    want += [placeholder] * n_last
    inner = tuple(InnerText(words, tuple(after)) for words, after in places.items())
    item = MediaItem(n_rows + n_last, inner=inner)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(item), type=MediaItem) == item
    expanded = expand([7, *[placeholder, 8] * n_pictures], [[item]] * n_pictures, model, [placeholder] * n_pictures)
    assert list(expanded.ids) == [7, *[*want, 8] * n_pictures]
    assert expanded.starts == tuple(1 + i * (len(want) + 1) for i in range(n_pictures))
    assert expanded.gaps == (tuple(gaps),) * n_pictures


@pytest.mark.parametrize("inner", [[("<pad>", (0,))], [("<pad>", (4,))], [("a", (2,)), ("b", (2,))]])
def test_a_text_that_is_not_between_two_placeholders_is_a_mistake_of_the_family(model, inner):
    item = MediaItem(4, inner=tuple(InnerText(*one) for one in inner))
    with pytest.raises(AssertionError, match="of 4 placeholders"):
        expand([model.images.token_id], [[item]], model, [model.images.token_id])
