"""What runners promise beyond the numbers: failures stay inside results, order is kept, state is not needed later."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from hydrainfer.core import EncodeWork, Lane, SamplingParams, StepBatch, TokenWork
from hydrainfer.models import decoder
from hydrainfer.ops import select_ops
from tests.runtime.harness import IMAGE, Prompt, Rig

pytestmark = pytest.mark.cpu

TEXT = Prompt([1, 400, 401, 402], [])


def test_results_are_in_the_order_of_the_work(rig):
    """A chunk before decodes: the runner reorders them inside, never outside."""
    prompts = [Prompt([1, 400 + i, 401, 402 + i], []) for i in range(3)]
    alone = [rig.run([rig.sequence(p, 3)])[0] for p in prompts]
    seqs = [rig.sequence(p, 3) for p in prompts]
    for s in (seqs[0], seqs[2]):
        rig.step([TokenWork(s, 0, 4, True)])
    rig.step([TokenWork(seqs[0], 4, 1, True), TokenWork(seqs[1], 0, 4, True), TokenWork(seqs[2], 4, 1, True)])
    assert [s.tokens[4:] for s in seqs] == [alone[0][:2], alone[1][:1], alone[2][:2]]


def test_missing_pixels_fail_their_request_alone(rig):
    good, bad = (rig.sequence(Prompt([1, IMAGE, 300], [s]), 2) for s in (1, 2))
    del rig.pixels[bad.request.media[0].pixels]
    result = rig.encode([bad, good])
    assert result.error is None and list(result.failed) == [bad.id]
    assert bool(rig.embeds.bytes[good.hold.blocks["embed"][0]].any())
    assert not rig.embeds.bytes[bad.hold.blocks["embed"][0]].any()


def test_pixels_of_the_wrong_shape_fail_their_request_alone(rig):
    seq = rig.sequence(Prompt([1, IMAGE, 300], [1]), 2)
    rig.pixels[seq.request.media[0].pixels] = torch.zeros(3, 3, 3, dtype=torch.uint8).numpy()
    assert list(rig.encode([seq]).failed) == [seq.id]


def test_a_ticket_complete_at_once_wakes_the_engine(rig):
    seq = rig.sequence(Prompt([1, IMAGE, 300], [1]), 2)
    seq.hold.blocks = {}
    rig.wake.clear()
    ticket = rig.vision.launch(StepBatch(1, Lane.VISION, [EncodeWork(seq, 0)], 1))
    assert rig.wake.is_set() and ticket.poll(0.0).error is not None and ticket.ready_at() is None


@pytest.mark.parametrize("error", [RuntimeError("boom"), MemoryError(), torch.OutOfMemoryError()])
def test_a_failing_forward_is_a_result(rig, monkeypatch, error):
    def fail(*_a, **_k):
        raise error

    seq = rig.sequence(TEXT, 3)
    with monkeypatch.context() as m:
        m.setattr(rig.model, "forward", fail)
        result = rig.step([TokenWork(seq, 0, 4, True)])
        assert result.error is not None and "boom" not in result.error.message and not result.tokens
    assert rig.step([TokenWork(seq, 0, 4, True)]).error is None  # the lane lives on


def test_a_batch_that_cannot_be_packed_is_a_result(rig):
    seq = rig.sequence(TEXT, 3)
    seq.hold.blocks = {}
    assert rig.step([TokenWork(seq, 0, 4, True)]).error is not None


def test_sequences_may_change_once_launch_returned(rig):
    want = rig.run([rig.sequence(TEXT, 1)])
    seq = rig.sequence(TEXT, 1, SamplingParams(temperature=0.0, repetition_penalty=1.0))
    ticket = rig.language.launch(StepBatch(1, Lane.LANGUAGE, [TokenWork(seq, 0, 4, True)], 4))
    seq.tokens[:] = [0] * 4
    seq.hold.blocks["kv"][:] = [0] * len(seq.hold.blocks["kv"])
    assert rig.wait(ticket).tokens == want[0]


def test_a_preempted_request_continues_with_the_same_tokens(rig):
    prompt = Prompt([1, IMAGE, 300, 301], [1])
    (want,) = rig.run([rig.sequence(prompt, 8)])
    seq = rig.sequence(prompt, 8)
    rig.encode([seq])
    rig.step([TokenWork(seq, 0, len(seq.tokens), True)])
    rig.step([TokenWork(seq, seq.n_computed, 1, True)])
    blocks = {k: list(reversed(v)) for k, v in seq.hold.blocks.items()}  # other blocks, as after a new reservation
    seq.rewind()
    seq.hold.blocks = blocks
    rig.encode([seq])
    while seq.n_produced < 8:
        n = len(seq.tokens) - seq.n_computed
        rig.step([TokenWork(seq, seq.n_computed, n, True)])
    assert seq.tokens[seq.request.n_prompt :] == want


SEEDED = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, min_tokens=3, logprobs=1)


@pytest.mark.parametrize("sampling", [None, SEEDED], ids=["greedy", "seeded"])
def test_each_row_of_a_verified_item_samples_what_a_step_of_its_own_does(rig, sampling):
    """Beside a chunk and a decode; the draft that is wrong changes nothing before it."""
    prompts = [Prompt([1, IMAGE, 300, 301], [1]), Prompt([1, 500, 501], []), Prompt([1, 600], [])]
    want = [rig.run([rig.sequence(p, 6, sampling, seed=5)])[0] for p in prompts]
    seqs = [rig.sequence(p, 6, sampling, seed=5) for p in prompts]
    rig.encode(seqs[:1])
    rig.step([TokenWork(s, 0, len(s.tokens), True) for s in seqs[:2]])
    drafts = (*want[0][1:4], want[0][4] + 1)
    items = [TokenWork(seqs[2], 0, 2, True), TokenWork(seqs[0], seqs[0].n_computed, 5, True, drafts)]
    items.append(TokenWork(seqs[1], seqs[1].n_computed, 1, True))
    result = rig.wait(rig.language.launch(StepBatch(99, Lane.LANGUAGE, items, 8, n_drafts=4)))
    assert result.tokens == [want[2][0], *want[0][1:5], result.tokens[5], want[1][1]]
    assert sorted(result.logprobs) == (list(range(7)) if sampling else [])
    for seq in seqs:
        rig.release(seq)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verified_rows_have_the_bits_of_single_steps(checkpoints, dtype):
    """Two requests at once, with and without a picture: 1 to 8 rows of one of them, beside a row of the other. What the
    head is multiplied with has the same bits; its own product may go another way for more rows."""
    rig = Rig(checkpoints(), dtype=dtype)
    seen = []
    logits = rig.model.logits
    rig.model.logits = lambda hidden: seen.append(hidden.clone()) or logits(hidden)
    asking = SamplingParams(temperature=0.0, logprobs=0)
    prompts = [Prompt([1, IMAGE, 300, 301], [1]), Prompt([1, 500, 501], [])]
    seqs = [rig.sequence(p, 12, asking) for p in prompts]
    rig.encode(seqs[:1])
    rig.step([TokenWork(s, 0, len(s.tokens), True) for s in seqs])
    n, seen[:] = [len(s.tokens) for s in seqs], []
    for _ in range(8):
        rig.step([TokenWork(s, s.n_computed, 1, True) for s in seqs])
    alone, answers = torch.stack(seen), [s.tokens[n_before:] for s, n_before in zip(seqs, n)]
    for one, other in ((0, 1), (1, 0)):
        for n_rows in range(1, min(9, rig.model.language.few_rows)):
            for s, n_before in zip(seqs, n):
                s.tokens[n_before:], s.n_computed = [], n_before - 1
            drafts = tuple(answers[one][: n_rows - 1])
            work = [
                TokenWork(seqs[one], n[one] - 1, n_rows, True, drafts),
                TokenWork(seqs[other], n[other] - 1, 1, True),
            ]
            seen[:] = []
            result = rig.wait(
                rig.language.launch(StepBatch(99, Lane.LANGUAGE, work, n_rows + 1, 2, n_drafts=n_rows - 1))
            )
            assert result.error is None
            assert torch.equal(seen[0][:n_rows], alone[:n_rows, one]), n_rows
            assert torch.equal(seen[0][n_rows], alone[0, other])
    for seq in seqs:
        rig.release(seq)
    rig.close()


def test_recycled_request_ids_and_many_requests(rig):
    """Block-table rows are reclaimed and never mixed up."""
    want = [rig.run([rig.sequence(Prompt([1, 300 + i % 7, 301], []), 3)])[0] for i in range(7)]
    for first in range(0, 140, 7):
        got = rig.run([rig.sequence(Prompt([1, 300 + (first + i) % 7, 301], []), 3) for i in range(7)])
        assert got == want


def test_the_number_of_threads_may_change_between_batches(checkpoints):
    from hydrainfer.runtime import LaneThread, LanguageRunner, ThreadCount

    rig = Rig(checkpoints())
    seen, asked = [], iter([1, 2, 1])
    forward = rig.model.forward
    rig.model.forward = lambda *a: (
        seen.append((torch.get_num_threads(), threading.current_thread().name)),
        forward(*a),
    )[1]
    rig.language.close()
    before = torch.get_num_threads()
    lane = LaneThread("language", rig.model.device, rig.wake.set, ThreadCount(lambda: next(asked), fixed=True))
    rig.language = LanguageRunner(rig.model, (rig.kv, rig.embeds), lane)
    for _ in range(3):
        rig.step([TokenWork(rig.sequence(TEXT, 1), 0, 4, True)])
    assert seen == [(1, "hydrainfer-language"), (2, "hydrainfer-language"), (1, "hydrainfer-language")]
    assert torch.get_num_threads() == before
    rig.close()


def test_torch_operators_alone_give_the_same_tokens(checkpoints, rig):
    path, prompt = checkpoints(), Prompt([1, IMAGE, 300, 301], [1])
    want = rig.run([rig.sequence(prompt, 6)])
    for only in (None, "reference"):
        ops = select_ops("cpu", torch.float32, 16, use_native=False, only=only)
        other = Rig(path, ops=ops)
        assert other.run([other.sequence(prompt, 6)], 5) == want
        other.close()


def test_a_shortlist_gives_the_same_tokens(checkpoints, monkeypatch):
    """A large head has one. A batch in which a row asks for more than the likeliest token does without."""
    if select_ops("cpu", torch.float32, 16).likeliest is None:
        pytest.skip("no compiler here")
    found, texts = {}, [Prompt([1, 300 + i, 301, 400 + i], []) for i in range(3)]
    plain, told = SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, logprobs=2)
    for least in (1 << 40, 0):
        monkeypatch.setattr(decoder, "_LARGE_HEAD", least)
        rig, met = Rig(checkpoints()), []
        if find := rig.model.ops.likeliest:
            short = lambda *a, find=find, met=met: met.append(len(a[0])) or find(*a)  # noqa: E731
            rig.model.language._ops = replace(rig.model.language._ops, likeliest=short, likeliest_rows=8)
        alone = rig.run([rig.sequence(Prompt([1, IMAGE, 300], [1]), 6)])
        together = rig.run([rig.sequence(text, 6) for text in texts])
        n_met = len(met)
        asked = rig.run([rig.sequence(text, 6, s) for text, s in zip(texts, (plain, told, plain))])
        assert asked == together and len(met) == n_met and set(met) == ({1, 3} if least == 0 else set())
        found[least] = alone, together
        assert (rig.model.language.shortlist is None) == (least > 0)
        rig.close()
    assert found[0] == found[1 << 40]


def test_closing_twice(rig):
    rig.language.close()
    rig.language.close()
