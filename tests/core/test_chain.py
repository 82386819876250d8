"""Keys of prefixes: equal only where everything is equal that the KV depends on."""

import time

import pytest

from hydrainfer.core import MediaSpan, chain_keys, chain_of, chain_root, split_chain

pytestmark = pytest.mark.unit
ROOT = chain_root(b"weights", b"float32", b"")


def picture(start=5, n=6, key=b"k" * 32, **more):
    return MediaSpan(start, n, key, "px", **more)


def test_a_chain_goes_on_as_if_it_had_been_made_at_once():
    ids, media = list(range(100)), [picture(5), picture(30, 20, b"l" * 32, gaps=((7, 2), (19, 9)))]
    whole = split_chain(chain_of(ROOT, ids, 4, media))
    assert len(whole) == 26 and whole[0] == ROOT and len(set(whole)) == 26
    for n in (0, 1, 7, 13, 14, 24):
        assert chain_keys(whole[n], ids, 4, media, n) == whole[n + 1 :]
        assert chain_of(ROOT, ids[: 4 * n + 3], 4, media) == b"".join(whole[: n + 1])


@pytest.mark.parametrize(
    "other",
    [
        {"ids": [0] * 11 + [1] + [0] * 20},
        {"media": [picture(key=b"another picture, preprocessing, weights or dtype")]},
        {"media": [picture(start=6)]},
        {"media": [picture(n=7)]},
        {"media": [picture(grid=(1, 2, 3))]},
        {"media": [picture(times=(0, 2))]},
        {"media": [picture(joined=True)]},
        {"media": [picture(gaps=((3, 1),))]},
        {"media": []},
        {"root": chain_root(b"weights", b"float32", b"mine")},
        {"root": chain_root(b"weights", b"bfloat16", b"")},
        {"root": chain_root(b"weighty", b"float32", b"")},
    ],
)
def test_nothing_is_shared_from_the_first_difference_on(other):
    base = {"root": ROOT, "ids": [0] * 32, "media": [picture()]}
    one, two = (split_chain(chain_of(d["root"], d["ids"], 4, d["media"])) for d in (base, base | other))
    first = next(i for i, (a, b) in enumerate(zip(one, two)) if a != b)
    assert first == (0 if "root" in other else 3 if "ids" in other else 2)
    assert not set(one[first:]) & set(two[first:])


def test_roots_of_other_parts_differ():
    assert len({chain_root(b"ab", b""), chain_root(b"a", b"b"), chain_root(b"", b"ab"), chain_root(b"ab")}) == 4


def test_keys_of_4096_tokens_take_less_than_the_prompt_is_worth():
    ids, media = tuple(range(1000, 5096)), [picture(16, 2880)]

    def measured():
        start_s = time.perf_counter()
        chain_of(ROOT, ids, 16, media)
        return time.perf_counter() - start_s

    assert min(measured() for _ in range(50)) < 1e-3  # 0.27 ms measured; slower where the machine is busy


def test_each_text_inside_a_picture_is_part_of_the_keys():
    """In blocks of 4: placeholders 5 to 8, texts 9 to 16, a placeholder 17. What a block holds decides its key."""
    shown = picture(5, 5, gaps=((4, 8),))
    plain = split_chain(chain_of(ROOT, [0] * 32, 4, [shown]))
    for at in range(9, 17):
        ids = [0] * 32
        ids[at] = 1
        other = split_chain(chain_of(ROOT, ids, 4, [shown]))
        assert [a == b for a, b in zip(plain, other)] == [i <= at // 4 for i in range(9)]
    another = split_chain(chain_of(ROOT, [0] * 32, 4, [picture(5, 5, b"l" * 32, gaps=((4, 8),))]))
    assert [a == b for a, b in zip(plain, another)] == [True] * 2 + [False] * 7
