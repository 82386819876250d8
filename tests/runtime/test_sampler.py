"""The sampler against a straightforward reference, its distributions, and its independence of the batch."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrainfer.core import Grammar, LiveSequence, Request, SamplingParams, TokenWork
from hydrainfer.core.random import draw_key
from hydrainfer.runtime.sampler import sample
from hydrainfer.runtime.sampling import plan_sampling

pytestmark = pytest.mark.cpu
VOCAB = 50


def sampled(logits, plan):
    return sample(logits, plan).read()


def work(prompt=(3, 4, 5), produced=(), eos=(2,), seed=7, choice=0, max_tokens=20, **params) -> TokenWork:
    sampling = SamplingParams(max_tokens=None, **params)
    request = Request(
        id="r",
        prompt_ids=tuple(prompt),
        sampling=sampling,
        max_tokens=max_tokens,
        seed=seed,
        choice=choice,
        eos_ids=eos,
    )
    seq = LiveSequence(request, (0.0, 0), 0.0)
    seq.tokens += produced
    return TokenWork(seq, len(seq.tokens) - 1, 1, True)


def some_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def filtered(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The distribution as vLLM defines it, one obvious step after the other, float64 [vocab]."""
    x = logits.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    p[p < min_p * p.max() * (1 - 1e-9)] = 0
    if 0 < top_k < len(p):
        p[p < np.sort(p)[-top_k]] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    return p / p.sum()


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.2, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.001},
    {"temperature": 1.0, "top_k": -1, "top_p": 1.0},
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_frequencies_follow_the_filtered_distribution(params):
    """Chi-square over 4000 positions; the numbers are counter-based, so the outcome is fixed."""
    n = 4000
    logits = some_logits(1).expand(n, -1).clone()
    items = [work(produced=[9] * i, **params) for i in range(64)]
    counts = np.zeros(VOCAB)
    for first in range(0, n, 64):
        batch = [msgspec.structs.replace(w, start=w.start + 64 * first) for w in items]
        for token in sampled(logits[:64].clone(), plan_sampling(batch))[0]:
            counts[token] += 1
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    want = filtered(logits[0].numpy(), full["temperature"], max(full["top_k"], 0), full["top_p"], full["min_p"])
    assert not counts[want == 0].any(), "a filtered token was drawn"
    expected = want * counts.sum()
    common = expected > 5
    chi = float(((counts[common] - expected[common]) ** 2 / expected[common]).sum())
    degrees = max(int(common.sum()) - 1, 1)
    assert chi < degrees + 5 * math.sqrt(2 * degrees) + 5, (chi, degrees)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_row_does_not_depend_on_the_batch_around_it(data):
    choices = [*SETTINGS, {"temperature": 0.0}, {"temperature": 0.0, "frequency_penalty": 1.0, "logprobs": 3}]
    params = data.draw(st.lists(st.sampled_from(choices), min_size=1, max_size=6))
    logits = some_logits(len(params), seed=data.draw(st.integers(0, 99)))
    items = [work(seed=i, produced=[i, i], **p) for i, p in enumerate(params)]
    together, _ = sampled(logits.clone(), plan_sampling(items))
    alone = [sampled(logits[i : i + 1].clone(), plan_sampling([w]))[0][0] for i, w in enumerate(items)]
    assert together == alone


def test_a_draw_is_of_seed_choice_and_position():
    plan = plan_sampling([work(produced=[8, 9], seed=5, choice=2, temperature=1.0)])
    assert plan.draws[0].key == draw_key(5, 2, 5)
    tokens = {sampled(some_logits(1), plan_sampling([work(seed=s, temperature=2.0)]))[0][0] for s in range(30)}
    assert len(tokens) > 5


def test_greedy_needs_nothing():
    likeliest = {"temperature": 0.7, "top_k": 1, "top_p": 0.8, "min_p": 0.1}
    plan = plan_sampling([work(temperature=0.0, stop_token_ids=(5,)), work(**likeliest)])
    assert not plan.alters_logits and not plan.draws and not plan.logprobs
    logits = some_logits(2)
    assert sampled(logits, plan)[0] == logits.argmax(-1).tolist()


def test_penalties_follow_their_definitions():
    prompt, produced = (3, 4, 5), [6, 6, 7, 3]
    params = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.25}
    logits = some_logits(1)
    want = logits[0].clone()
    for token in {*prompt, *produced}:
        want[token] = want[token] / 1.3 if want[token] > 0 else want[token] * 1.3
    for token in set(produced):
        want[token] -= 0.4 + 0.25 * produced.count(token)
    sampled(logits, plan_sampling([work(prompt, produced, temperature=0.0, **params)]))
    torch.testing.assert_close(logits[0], want)


@pytest.mark.parametrize(
    "params",
    [{"repetition_penalty": 1.3}, {"presence_penalty": 0.4, "frequency_penalty": 0.3}, {"repetition_penalty": 0.7}],
    ids=str,
)
def test_penalties_of_a_token_that_only_the_device_knows(params):
    """To the last bit as if the host knew it: one of the prompt, of the answer (once, or more often), or a new one."""
    lasts, prompt, produced = [3, 6, 7, 20, 5], (3, 4, 5), [6, 6, 7]
    known = [work(prompt, [*produced, last], temperature=0.0, **params) for last in lasts]
    known.insert(2, work(prompt, [9], temperature=0.0))
    unknown, follows = [], []
    for w, last in zip(known, [*lasts[:2], None, *lasts[2:]]):
        seq = LiveSequence(
            w.seq.request, (0.0, 0), 0.0, tuple(w.seq.tokens[len(prompt) :][: None if last is None else -1])
        )
        unknown.append(TokenWork(seq, w.start, 1, True))
        follows.append(-1 if last is None else lasts[::-1].index(last))
    before, logits = torch.tensor(lasts[::-1]), some_logits(len(known))
    found, want = logits.clone(), logits.clone()
    assert sample(found, plan_sampling(unknown, follows), before).read() == sampled(want, plan_sampling(known))
    assert torch.equal(found, want) and not torch.equal(found, logits)
    sample(logits, plan_sampling(unknown, follows)).read()  # the batch before failed: nobody wants what comes out


def test_penalties_come_after_the_bias():
    """As vLLM: the bias lifts the logit above zero, and the repetition penalty then divides it."""
    logits = some_logits(1)
    logits.fill_(-50.0)
    logits[0, 7], logits[0, 8] = -1.0, 6.0
    item = work(produced=[7], temperature=0.0, logit_bias=((7, 11.0),), repetition_penalty=2.0)
    assert sampled(logits, plan_sampling([item]))[0] == [8]  # (11 - 1) / 2 < 6


def test_penalty_rows_beside_plain_rows():
    logits = some_logits(2)
    plain = logits[1].clone()
    sampled(logits, plan_sampling([work(frequency_penalty=2.0, produced=[1], temperature=0.0), work(temperature=0.0)]))
    assert torch.equal(logits[1], plain)


@pytest.mark.parametrize(("n_produced", "ends"), [(0, False), (2, False), (3, True)])
def test_min_tokens_masks_what_would_end_the_choice(n_produced, ends):
    """With min_tokens=3 none of the first three tokens may end the choice, the fourth may (as vLLM)."""
    logits = some_logits(1)
    logits[0, 2], logits[0, 9] = 90.0, 80.0
    item = work(produced=[1] * n_produced, temperature=0.0, min_tokens=3, stop_token_ids=(9,))
    assert (sampled(logits, plan_sampling([item]))[0][0] in (2, 9)) is ends


def test_min_tokens_with_ignore_eos_masks_stop_ids_only():
    logits = some_logits(1)
    logits[0, 2], logits[0, 9] = 80.0, 90.0
    item = work(temperature=0.0, min_tokens=3, stop_token_ids=(9,), ignore_eos=True)
    assert sampled(logits, plan_sampling([item]))[0] == [2]


def test_with_a_grammar_ignore_eos_masks_eos_but_not_what_is_a_stop_token_too():
    logits = some_logits(2)
    logits[:, 2], logits[:, 9] = 90.0, 80.0
    grammar = Grammar("regex", "a+")
    items = [
        work(temperature=0.0, ignore_eos=True, grammar=grammar),
        work(temperature=0.0, ignore_eos=True, grammar=grammar, stop_token_ids=(2,)),
    ]
    assert sampled(logits, plan_sampling(items))[0] == [9, 2]


def test_logit_bias_and_ids_outside_the_vocabulary():
    item = work(
        temperature=0.0, logit_bias=((11, 100.0), (VOCAB + 5, 100.0)), stop_token_ids=(VOCAB + 1,), min_tokens=2
    )
    assert sampled(some_logits(1), plan_sampling([item]))[0] == [11]


def test_logprobs_are_of_the_raw_distribution():
    logits = some_logits(3)
    raw = torch.log_softmax(logits, -1)
    items = [
        work(temperature=0.0),
        work(temperature=1.0, logprobs=2, logit_bias=((30, 100.0),)),
        work(temperature=0.0, logprobs=0),
    ]
    tokens, logprobs = sampled(logits, plan_sampling(items))
    assert logprobs.keys() == {1, 2} and tokens[1] == 30
    got = logprobs[1]
    assert got.logprob == pytest.approx(float(raw[1, 30]), abs=1e-5)
    assert got.rank == int((raw[1] > raw[1, 30]).sum()) + 1
    best = raw[1].topk(2)
    assert [t for t, _ in got.top] == best.indices.tolist()
    assert [p for _, p in got.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert logprobs[2].top == () and logprobs[2].rank == 1
