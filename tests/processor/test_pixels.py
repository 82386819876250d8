import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrainfer.core import Overloaded
from hydrainfer.processor.pixels import PixelStore

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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=60))
def test_counts_stay_whole(operations):
    store, held = PixelStore(250), []
    for put, k in operations:
        if put:
            try:
                held.append(store.put(bytes([k]), picture()))
            except Overloaded:
                assert len(store) == 2
        elif held:
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
