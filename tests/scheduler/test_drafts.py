"""Drafts are verified: several tokens per step where they are right, the same tokens in any case."""

import random

import pytest

from hydrainfer.core import EventKind, Grammar, Lane, LiveSequence, Role, SamplingParams
from hydrainfer.engine import Engine
from hydrainfer.scheduler import Budgets, Scheduler
from hydrainfer.scheduler.drafts import verified
from tests.engine.rig import TimedRunner
from tests.scheduler.fakes import FakeDevice, Guessing, expected_tokens, make_caches, make_request

pytestmark = pytest.mark.unit


def outputs_of(requests, right, budget=64):
    """What an engine answers, and how many batches it took."""
    now, outputs, events, caches = [0.0], [], [], make_caches()
    scheduler = Scheduler(Role.parse("EPD"), caches, Budgets(tokens=budget))
    device = Guessing(FakeDevice(), right, random.Random(3))
    runners = {lane: TimedRunner(device, lambda: now[0], 1.0) for lane in Lane}
    engine = Engine(scheduler, runners, outputs.extend, events.append)
    for request in requests:
        engine.submit(request, 0.0)
    wake = engine.step(0.0)
    while wake is not None:
        now[0] = wake
        wake = engine.step(wake)
        scheduler.check()
    caches.check(idle=True)
    told = [event.request_id for event in events if event.kind is EventKind.TOKEN]
    for request in requests:
        mine, n = [o for o in outputs if o.request_id == request.id], 0
        for output in mine:
            assert output.start == n
            n += len(output.token_ids)
        assert n == told.count(request.id)
    return outputs, scheduler.n_batches


def tokens_of(outputs, request):
    return [token for o in outputs if o.request_id == request.id for token in o.token_ids]


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_answers_are_the_same_in_fewer_steps(right):
    requests = [make_request(f"r{i}", n_text=3 + i, max_tokens=9 + i, salt=b"one" * (i % 2)) for i in range(4)]
    outputs, n_batches = outputs_of(requests, right)
    for request in requests:
        assert tokens_of(outputs, request) == expected_tokens(request)
    assert (n_batches < 11) is (right > 0.0)


def test_no_draft_counts_behind_the_end_of_a_grammar():
    sampling = SamplingParams(max_tokens=30, min_tokens=20, ignore_eos=True, grammar=Grammar("choice", '["red"]'))
    request = make_request("r", max_tokens=30, sampling=sampling, eos_ids=(2,))
    seq = LiveSequence(request, (0.0, 0), 0.0)
    assert verified(seq, (7, 8, 2, 2), [7, 8, 2, 2, 2]) == (7, 8, 2)


def test_an_answer_ends_within_its_drafts():
    request = make_request("r", max_tokens=30)
    tokens = expected_tokens(request)
    stop = next(t for i, t in enumerate(tokens) if i > 6 and t not in tokens[:i])
    sampling = SamplingParams(max_tokens=30, stop_token_ids=(stop,))
    outputs, _ = outputs_of([make_request("r", max_tokens=30, sampling=sampling)], 1.0)
    assert tokens_of(outputs, request) == tokens[: tokens.index(stop) + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token) == ("stop", stop)


def test_drafts_take_nothing_from_decodes():
    """No part of a budget that decodes fill, and no block."""
    requests = [make_request(f"r{i}", max_tokens=8) for i in range(4)]
    outputs, n_batches = outputs_of(requests, 1.0, budget=4)
    assert all(tokens_of(outputs, r) == expected_tokens(r) for r in requests)
    assert n_batches >= 5 + 7
