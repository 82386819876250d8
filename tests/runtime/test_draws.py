"""Draws: their distribution, filters on both devices, and independence of rounding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrainfer.core.random import draw_key
from hydrainfer.runtime import draws as draws_module
from hydrainfer.runtime.draws import alike, draw_row, draw_rows, log_waits, mixed
from hydrainfer.runtime.sampling import Draw
from tests.runtime.test_sampler import filtered, some_logits

pytestmark = pytest.mark.cpu
VOCAB = 151_936  # Qwen's
KINDS = [
    (1.0, 0, 1.0, 0.0),
    (0.3, 0, 1.0, 0.0),
    (1.5, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.05),
    (0.7, 20, 0.8, 0.0),
    (1.2, 50, 1.0, 0.02),
    (1.3, 3000, 0.99, 0.0),
]


def key(i: int) -> int:
    return draw_key(i, 0, 7)


def peaked(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Logits as of a model: a few candidates far above a wide rest, in which many are equal."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=draw) * 2
    logits[:, :40] += torch.rand(rows, 40, generator=draw) * 12
    return logits.bfloat16().float()


def together(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    """As on CUDA, where rows of one kind are drawn at once."""
    chosen = torch.empty(len(logits), dtype=torch.int64)
    for some in alike(draws):
        draw_rows(logits, some, chosen)
    return chosen.tolist()


@pytest.mark.parametrize("vocab", [7, 20_000])
def test_frequencies_are_the_softmax(vocab):
    """Chi-square over many draws. The large vocabulary has its likely tokens at the end."""
    n = 8000 if vocab == 7 else 2000
    logits = torch.full((vocab,), -9.0)
    logits[-7:] = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 2.0, -3.0])
    likely, draws = logits.double().softmax(-1)[-7:], [Draw(i, 1.0, 0, 1.0, 0.0, key(i)) for i in range(n)]
    want = n * np.append(likely.numpy(), 1.0 - float(likely.sum()) + 1e-9)
    tokens = [draw_row(logits, d) for d in draws]
    counts = np.bincount(tokens, minlength=vocab)[-7:]
    counts = np.append(counts, n - counts.sum())
    assert float(((counts - want) ** 2 / want).sum()) < 30, (counts, want)  # one in ten thousand exceeds it
    assert together(logits.expand(500, -1), draws[:500]) == tokens[:500]


def test_noise_of_tokens_and_keys_is_independent():
    """Mean and variance of Gumbel noise, and no correlation between neighbours: of tokens, of positions, of seeds."""
    ids = torch.arange(512, dtype=torch.int32)
    for keys in ([draw_key(5, 0, i) for i in range(512)], [draw_key(i, 0, 3) for i in range(512)]):
        halves = torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int32).reshape(-1, 2))
        noise = -log_waits(mixed(ids, halves[:, :1], halves[:, 1:])).double()
        assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
        assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
        for a, b in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1])):
            assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 0.01


def test_bits_are_those_of_their_definition():
    """Whatever part of a vector register computes them: the same on every device."""
    ids, (first, second) = np.arange(1003, dtype=np.uint64), (0x9ABCDEF1, 0x12345678)

    def folded(x: np.ndarray, n: int) -> np.ndarray:  # an arithmetic shift of 32 bits
        return (x ^ (x.astype(np.uint32).view(np.int32) >> n).view(np.uint32)).astype(np.uint64)

    x = folded(ids ^ first, 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (folded(x, 15) + second) * 0x846CA68B & 0xFFFFFFFF
    want = folded(x, 16)
    halves = torch.from_numpy(np.array([first, second], dtype=np.uint32).view(np.int32))
    bits = mixed(torch.arange(1003, dtype=torch.int32), *halves)
    assert bits.tolist() == want.tolist() and int(bits.min()) >= 0


@pytest.mark.parametrize("vocab", [50, 5000])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.9999])
def test_top_p_over_a_large_vocabulary(vocab, top_p):
    logits = some_logits(1, vocab, seed=3)[0]
    want = filtered(logits.numpy(), 1.0, 0, top_p, 0.0)
    draws = [Draw(i, 1.0, 0, top_p, 0.0, key(i)) for i in range(300)]
    tokens = [draw_row(logits, d) for d in draws]
    assert all(want[t] > 0 for t in tokens)
    assert together(logits.expand(300, -1), draws) == tokens


@pytest.mark.parametrize("top_k", [2, 2000])
def test_ties_at_the_kth_value_stay(top_k):
    logits = torch.full((3000,), -9.0)
    logits[:6] = torch.tensor([1.0, 5.0, 3.0, 3.0, 3.0, 0.0])
    logits[6 : top_k + 5] = 2.0
    draws = [Draw(i, 1.0, top_k, 1.0, 0.1, key(i)) for i in range(200)]
    assert {draw_row(logits, d) for d in draws} == set(together(logits.expand(200, -1), draws)) == {1, 2, 3, 4}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_together_are_each_row_by_itself(data):
    """How CUDA draws, run on a CPU: the same tokens."""
    vocab = data.draw(st.sampled_from([5, 50, 3000]))
    one = st.tuples(
        st.sampled_from([0.3, 1.0, 1.5]),
        st.sampled_from([0, 0, 2, 12, 2000]),
        st.sampled_from([1.0, 1.0, 0.001, 0.7, 0.99]),
        st.sampled_from([0.0, 0.0, 0.02, 0.1]),
        st.integers(0, 2**64 - 1),
    )
    draws = [Draw(i, *params) for i, params in enumerate(data.draw(st.lists(one, min_size=1, max_size=8)))]
    logits = some_logits(len(draws), vocab, seed=data.draw(st.integers(0, 99)))
    logits[:, : data.draw(st.sampled_from([0, 1, 4, 300]))] = 1.0  # ties
    if data.draw(st.booleans()):
        logits = logits.bfloat16().float()
    assert together(logits, draws) == [draw_row(logits[d.row], d) for d in draws]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_draws_do_not_depend_on_rounding(kind):
    """What another batch size does to logits changes a token only where two candidates tie."""
    logits = peaked(32, VOCAB, seed=1)
    noise = torch.rand(logits.shape, generator=torch.Generator().manual_seed(2)).sub_(0.5).mul_(2e-6)
    draws = [Draw(i, *kind, key(i)) for i in range(32)]
    alone = [draw_row(logits[d.row], d) for d in draws]
    assert [draw_row(logits[d.row] + noise[d.row], d) for d in draws] == alone
    assert together(logits[:4], draws[:4]) == alone[:4]


def test_most_tokens_of_a_large_vocabulary_need_no_logarithm(monkeypatch):
    """And the token is the one that all of them would give."""
    logits, n = peaked(40, 20_000, seed=3), []
    monkeypatch.setattr(draws_module, "log_waits", lambda bits: n.append(len(bits)) or log_waits(bits))
    draws = [Draw(i, 1.2, 0, 1.0, 0.0, key(i)) for i in range(40)]
    tokens = [draw_row(logits[d.row], d) for d in draws]
    assert sum(n) < 40 * 2000
    monkeypatch.setattr(draws_module, "_BEST", math.inf)
    assert [draw_row(logits[d.row], d) for d in draws] == tokens


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_logits_that_are_no_numbers_end_nothing(kind):
    for bad in (math.nan, -math.inf, math.inf):
        for vocab in (9, 5000):
            logits = torch.full((1, vocab), bad)
            assert 0 <= draw_row(logits[0], Draw(0, *kind, 5)) < vocab
