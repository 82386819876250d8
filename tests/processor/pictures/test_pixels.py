import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrainfer.core import Overloaded
from hydrainfer.processor.pictures.pixels import PixelStore

pytestmark = pytest.mark.unit


def picture(n_bytes=100):
    return np.zeros(n_bytes, np.uint8)


def test_equal_pictures_are_kept_once_and_freed_by_the_last_holder():
    store = PixelStore(150)
    first, second = store.put(b"k", picture()), store.put(b"k", picture())
    assert first == second and len(store) == 1 and store.n_bytes == 100
    store.release(first)
    assert store.get(second).shape == (100,)
    store.release(second)
    with pytest.raises(KeyError):
        store.get(first)
    store.check(idle=True)


def test_beyond_the_budget_is_429_and_changes_nothing():
    store = PixelStore(150)
    ref = store.put(b"a", picture())
    with pytest.raises(Overloaded, match="retry later") as e:
        store.put(b"b", picture())
    assert e.value.retry_after_s and len(store) == 1
    store.release(ref)
    store.put(b"b", picture())


def test_pixels_that_no_request_holds_stay_while_there_is_room():
    store = PixelStore(250, keep_bytes=100)
    for k in b"ab":
        store.release(store.put(bytes([k]), picture()))
    store.check(idle=True)
    a, b = b"a".hex(), b"b".hex()
    assert (len(store), store.n_bytes, store.n_kept_bytes) == (0, 0, 100)
    with pytest.raises(KeyError):
        store.get(b)
    assert not store.hold(a) and store.hold(b) and store.hold(b)
    assert store.get(b).shape == (100,) and (store.n_bytes, store.n_kept_bytes) == (100, 0)
    store.release(b)
    store.release(b)
    big = store.put(b"c", picture(200))  # needs the room
    assert store.n_kept_bytes == 0 and not store.hold(b)
    store.release(big)
    assert store.n_kept_bytes == 0, "one that is larger than all that may be kept"


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([0, 100, 250]), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=60))
def test_counts_stay_whole(keep, operations):
    store, held = PixelStore(250, keep), []
    for what, k in operations:
        if what == 0:
            try:
                held.append(store.put(bytes([k]), picture()))
            except Overloaded:
                assert len(store) == 2
        elif what == 1 and store.hold(bytes([k]).hex()):
            held.append(bytes([k]).hex())
        elif what == 2 and held:
            store.release(held.pop(k % len(held)))
        store.check()
    for ref in held:
        store.release(ref)
    store.check(idle=True)


def test_threads():
    store = PixelStore(1 << 20)

    def work(seed):
        for i in range(300):
            store.release(store.put(bytes([(i * seed) % 7]), picture()))

    threads = [threading.Thread(target=work, args=(s,)) for s in (1, 2, 3, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    store.check(idle=True)
