"""A predicted answer beside the true one."""

import random

import pytest

from hydrainfer.core import Prediction

pytestmark = pytest.mark.unit


def followed(predicted, answer, size=1):
    prediction = Prediction(tuple(predicted.encode()))
    for at in range(0, len(answer), size):
        prediction.follow(answer[at : at + size].encode())
    return prediction.n_right, bytes(prediction.next(4)).decode()


@pytest.mark.parametrize(
    ("predicted", "answer", "n_right", "following"),
    [
        ("abcdefghij", "", 0, "abcd"),
        ("abcdefghij", "abc", 3, "defg"),
        ("abcdefghij", "abcX", 3, ""),  # lost
        ("abcdefghij", "abcXe", 3, "fghi"),  # one token for another
        ("abcdefghij", "abcXYZd", 3, "efgh"),  # three tokens more
        ("abcdefghij", "abcfg", 3, "hij"),  # two tokens less
        ("abcdefghij", "abcdefghijK", 10, ""),  # it goes on
        ("abcdefghij", "Sure: abc", 2, "defg"),  # something before it
        ("one two three", "one three", 7, ""),
        ("abcd efgh abcd ijkl", "abcd efgh abcd ijk", 18, "l"),
        ("abcd efgh abcd ijkl", "ijkl abc", 4, "d ij"),  # ahead, and back
        ("zzz", "abcdefghij", 0, ""),
        ("", "abc", 0, ""),
    ],
)
def test_where_the_answer_is_in_its_prediction(predicted, answer, n_right, following):
    for size in (1, 2, 100):
        assert followed(predicted, answer, size) == (n_right, following)


def test_an_edited_text_is_followed_and_a_wrong_one_costs_nothing_but_the_search():
    rng = random.Random(3)
    text = tuple(rng.randrange(0xD000, 0xE000) for _ in range(20_000))  # also the code points of surrogates
    edited = [token if rng.random() < 0.98 else 1 for token in text]
    prediction = Prediction(text)
    prediction.follow(edited)
    assert prediction.n_right >= 0.95 * len(text)
    letter = Prediction((7,) * 100_000)
    letter.follow([7, 7, 8] * 500)
    assert letter.n_right == 501  # the first, and each that follows another one
    assert len(letter) == 100_000
