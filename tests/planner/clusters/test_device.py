"""Caches of the simulator by a table of whole prompts."""

import numpy as np
import pytest

from hydrainfer.planner.clusters import Lengths, Times, TimesPoint, log_normal
from hydrainfer.planner.clusters.device import TableCaches

pytestmark = pytest.mark.unit


def times(*points):
    return Times(points=tuple(TimesPoint(tokens, kv_bytes, 1.0) for tokens, kv_bytes in points))


def test_caches_have_the_bytes_of_the_table_over_the_prompts():
    lengths = log_normal(9.9, 1.0, 128, 131_072)
    table = times((1024, 2e8), (8192, 3.2e8), (131_072, 2.4e9))
    caches = TableCaches.of(table, lengths)
    ours = np.array([caches.kv_bytes(n) for n in lengths.tokens])
    assert lengths.mean(ours) == pytest.approx(lengths.mean(table.kv_bytes(lengths.tokens)))
    assert caches.token_bytes > 0.0 and caches.state_bytes > 0.0


@pytest.mark.parametrize("sample", [[4000.0], [1000.0, 100_000.0]], ids=["one length", "bytes above a line through 0"])
def test_without_a_state_all_bytes_are_those_of_tokens(sample):
    lengths = Lengths.of(sample)
    table = times((1000, 1e6), (100_000, 2e8))
    caches = TableCaches.of(table, lengths)
    assert caches.state_bytes == 0.0
    assert caches.token_bytes * lengths.mean_tokens == pytest.approx(lengths.mean(table.kv_bytes(lengths.tokens)))
