"""Drafts from the text, and how many of them a step is worth."""

import random

import msgspec
import pytest

from hydrainfer.core import Lane, LiveSequence, Role, StepBatch, TokenWork
from hydrainfer.scheduler import DRAFTERS, Budgets, Drafting, Scheduler, Worth
from hydrainfer.scheduler.drafting import Guess, PredictionDrafter, TextDrafter
from hydrainfer.scheduler.drafts import Drafts
from hydrainfer.scheduler.room import SequenceRoom
from hydrainfer.scheduler.worth import Luck
from tests.scheduler.fakes import FakeDevice, expected_tokens, make_caches, make_request

pytestmark = pytest.mark.unit


def text(tokens):
    return LiveSequence(make_request("r", n_text=2, max_tokens=100000), (0.0, 0), 0.0, tuple(tokens))


def found_by_search(tokens, n):
    for size in (3, 2):
        ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[-size:]]
        if ends:
            follow = tokens[ends[-1] : ends[-1] + n]
            while len(follow) < n:
                follow += follow[: n - len(follow)]
            return follow
    return []


def test_what_followed_the_last_tokens_is_found_as_by_a_search_of_the_whole_text():
    """Texts grow by single tokens and by hundreds. Where two triples share a place, the search may know more."""
    rng, n_right, n_asked = random.Random(1), 0, 0
    for _ in range(60):
        drafter, seq = TextDrafter(), text(rng.randrange(1000) for _ in range(rng.choice([0, 5, 300])))
        for _ in range(40):
            copied = rng.randrange(len(seq.tokens))
            seq.extend(seq.tokens[copied : copied + rng.choice([1, 4, 200])])
            want, got = found_by_search(seq.tokens, 5), list(drafter.guess(seq, 5).tokens)
            assert len(got) in (0, 5)
            n_right += got == want
            n_asked += 1
    assert n_right >= 0.95 * n_asked


def test_one_letter_repeated_is_continued_and_another_sequence_of_the_name_is_another_text():
    drafter = TextDrafter()
    assert drafter.guess(text([7] * 5000), 4) == ([7] * 4, 6)
    assert drafter.guess(text([8, 9]), 4) == ((), 0)


def test_the_kind_of_a_look_up_is_how_many_tokens_agree():
    for n, kind in ((2, 2), (3, 3), (4, 4), (5, 4), (6, 6), (9, 6)):
        copied = list(range(100, 100 + n))
        assert TextDrafter().guess(text([9, *copied, 50, 8, *copied]), 1) == ([50], kind)


def test_what_the_client_predicts_is_drafted_before_what_the_text_repeats():
    request = msgspec.structs.replace(make_request("r", n_text=2, max_tokens=100), predicted_ids=(50, 51, 52, 53, 54))
    seq, drafter = LiveSequence(request, (0.0, 0), 0.0, (50, 51)), PredictionDrafter()  # two tokens of an earlier life
    assert drafter.guess(seq, 2) == ((52, 53), 1)
    seq.extend((60, 61, 60, 61))
    assert not drafter.guess(seq, 3).tokens  # lost: now the look-up speaks, which is asked behind it
    assert list(DRAFTERS) == ["grammar", "prediction", "ngram", "mtp", "model"]
    assert TextDrafter().guess(seq, 3).tokens == [60, 61, 60]
    seq.extend((52, 53))
    assert drafter.guess(seq, 3) == ((54,), 1)
    seq.extend((54,))
    assert not drafter.guess(seq, 3).tokens


def steps(worth, seconds, n_steps, offers, rng, right):
    """The rows that one sequence gets in each step, with drafts that are right with this probability."""
    luck, rows = Luck(), []
    for _ in range(n_steps):
        (n,) = worth.share(1, [luck], [offers])
        n_right = next((i for i in range(n) if rng.random() >= right), n)
        if n:
            luck.learn(n, n_right)
        work = [TokenWork(text([5]), 3, 1 + n, True, (4,) * n)]
        worth.observe(StepBatch(1, Lane.LANGUAGE, work, 1 + n, 1, n_drafts=n), seconds(1 + n))
        rows.append(n)
    return rows


@pytest.mark.parametrize(
    ("right", "seconds", "low", "high"),
    [
        (1.0, lambda rows: 0.01, 6.5, 7.0),  # free rows
        (0.9, lambda rows: 0.01 * (1 + 0.02 * rows), 5.0, 7.0),
        (0.0, lambda rows: 0.01 * (1 + 0.05 * rows), 0.0, 0.3),  # wrong drafts: one row now and then
        (0.9, lambda rows: 0.01 * rows, 0.0, 0.3),  # a row costs what it yields
        (1.0, lambda rows: 0.01 if rows <= 4 else 0.1, 2.5, 3.3),  # a cliff
    ],
)
def test_rows_are_added_as_long_as_tokens_per_second_rise(right, seconds, low, high):
    rows = steps(Worth(64), seconds, 800, 7, random.Random(2), right)[400:]
    assert low <= sum(rows) / len(rows) <= high
    assert any(rows)  # also where they do not pay, they are tried again


@pytest.mark.parametrize(
    ("right", "guess_s", "low", "high"),
    [
        (0.95, 0.0001, 5.0, 7.0),
        (0.8, 0.002, 1.0, 4.0),  # each takes a fifth of a step
        (0.8, 0.02, 0.0, 0.3),  # longer than a step
        (0.0, 0.0005, 0.0, 0.3),
    ],
)
def test_a_device_guesses_as_much_as_pays_and_tries_again(right, guess_s, low, high):
    worth, luck, rng, offered, asked = Worth(64), Luck(), random.Random(3), 0, []
    for _ in range(1200):
        wanted = worth.guesses([luck], 7)
        (n,) = worth.share(1, [luck], [offered])
        if n:
            luck.learn(n, next((i for i in range(n) if rng.random() >= right), n))
        work = [TokenWork(text([5]), 3, 1 + n, True, (4,) * n)]
        batch = StepBatch(1, Lane.LANGUAGE, work, 1 + n, 1, n_drafts=n, n_guesses=wanted, guess_s=wanted * guess_s)
        worth.observe(batch, 0.01 * (1 + 0.02 * n) + batch.guess_s)
        offered = wanted
        asked.append(wanted)
    assert low <= sum(asked[600:]) / 600 <= high
    assert any(asked[600:])


def test_no_step_gets_more_rows_than_the_kernel_or_the_limit_of_time_allows():
    lucks = [Luck() for _ in range(3)]
    few, none, slow = Worth(8), Worth(3), Worth(64, 0.02, lambda rows: 1 + rows // 6)
    for worth in (few, none, slow):
        assert not any(worth.share(3, lucks, [7, 7, 7]))  # before a step without drafts was seen
        worth.observe(StepBatch(1, Lane.LANGUAGE, [TokenWork(text([5]), 3, 1, True)], 1, 1), 0.01)
    assert sum(few.share(3, lucks, [7, 7, 7])) == 5
    assert none.share(3, lucks, [7, 7, 7]) == [0, 0, 0]
    assert 0 < sum(slow.share(3, lucks, [7, 7, 7])) <= 8


def test_drafts_take_no_token_of_the_budget_that_another_decode_needs():
    for budget, n_drafts in ((1, 0), (2, 0), (4, 2), (9, 6)):
        drafts = Drafts(SequenceRoom(make_caches(), 0), Drafting([TextDrafter()], None, 3))
        work = [TokenWork(text([5, 6] * 4), 9, 1, True) for _ in range(2)]
        for item in work:
            item.seq.hold.capacity = 20
        got, n = drafts.extend(work, budget)
        assert (sum(len(item.drafts) for item in got), n) == (n_drafts, 2 + n_drafts)


class Known:
    """A drafter of somebody else, which knows the answers up to a wrong token now and then."""

    name = "known"

    def __init__(self, rng):
        self.rng = rng

    def guess(self, seq, n):
        answer = expected_tokens(seq.request)[seq.n_produced :][:n]
        return Guess([token if self.rng.random() < 0.8 else 3 for token in answer])

    def keep(self, seqs):
        pass


@pytest.mark.parametrize(("kv_blocks", "budget"), [(64, 64), (14, 64), (64, 9)])
def test_a_drafter_from_outside_saves_steps_and_changes_no_token(kv_blocks, budget):
    """With few blocks requests preempt each other; what is drafted takes no block that was found again."""
    requests = [make_request(f"r{i}", n_text=3 + i, max_tokens=30) for i in range(4)]
    n_steps = {}
    for drafting in (None, Drafting([Known(random.Random(4))], None, 5)):
        caches = make_caches(kv_blocks=kv_blocks)
        s, device, answers = (
            Scheduler(Role.parse("PD"), caches, Budgets(tokens=budget), drafting=drafting),
            FakeDevice(),
            {},
        )
        for request in requests:
            s.add(request, 0.0)
        n = 0
        while s.n_running or s.n_waiting:
            batch = s.next(float(n), Lane.LANGUAGE).batch
            for outcome in s.apply(device.run(batch), float(n)):
                answers.setdefault(outcome.seq.id, []).extend(outcome.tokens)
            s.check()
            n += 1
        assert all(answers[r.id] == expected_tokens(r) for r in requests)
        caches.check(idle=True)
        n_steps[drafting is not None] = n
    assert n_steps[True] < (0.6 if kv_blocks == budget else 1.0) * n_steps[False]
    counts = s.drafts.counts["known"]
    assert set(counts.left_out) == ({"budget"} if budget < 64 else set())
    assert counts.n_accepted == sum(counts.by_position) and 0.5 < counts.n_accepted / counts.n_tokens < 1.0
