"""The emulated device under a virtual clock, with the engine, the caches and the stores of a real one."""

import threading
import time

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from msgspec import structs

from hydrainfer.cache import CacheSet, EmbedSpec, FullSpec
from hydrainfer.core import (
    CostModel,
    EncodeWork,
    Handoff,
    Lane,
    LiveSequence,
    Role,
    SamplingParams,
    StepBatch,
    TokenWork,
    split_chain,
)
from hydrainfer.engine import Engine, EngineThread
from hydrainfer.runtime import EmulatedDevice, EmulatedRunner, spoken_ids
from hydrainfer.runtime.emulated import _Language
from hydrainfer.scheduler import Budgets, Drafting, Guess, Policy, Scheduler
from hydrainfer.storage import BlockStore, Exports, LocalExports, LocalTransport
from tests.cache.other_kinds import STATE, WINDOW
from tests.scheduler.fakes import make_request, placeholders

pytestmark = pytest.mark.cpu
KV = FullSpec.of(layers=2, kv_heads=1, head_dim=4, dtype="bfloat16", block_tokens=4)
EMBED = EmbedSpec.of(width=8, dtype="float32", block_tokens=4)
COST = CostModel(encode_image_s=3.0, step_base_s=1.0, prefill_token_s=0.0, decode_token_s=0.0)
SPOKEN = range(10, 200)


class Rig:
    """One emulated instance."""

    def __init__(
        self,
        role="EPD",
        cost=COST,
        kv_blocks=64,
        tokens=16,
        overlap="free",
        headroom=32,
        pixels=None,
        clock=None,
        sink=None,
        more=None,
        drafting=None,
    ):
        self.now = 0.0
        sizes = {KV: kv_blocks, EMBED: 32, **(more or {})}
        self.stores = {spec.name: BlockStore(spec, n) for spec, n in sizes.items()}
        self.caches = CacheSet(sizes)
        device = EmulatedDevice(cost, clock or (lambda: self.now), self.stores, SPOKEN, pixels)
        role = Role.parse(role)
        self.runners = {lane: EmulatedRunner(device, lane) for lane in role.lanes}
        policy = Policy(encode_wait_s=2.0, headroom_tokens=headroom)
        self.scheduler = Scheduler(role, self.caches, Budgets(tokens=tokens, images=2), policy, drafting=drafting)
        self.outputs, self.ends = [], {}
        self.engine = Engine(self.scheduler, self.runners, sink or self._sink, overlap=overlap)

    def _sink(self, outputs):
        self.outputs += outputs
        self.ends |= {o.request_id: self.now for o in outputs if o.finish_reason}

    def run(self, *requests, until=1e9):
        for r in requests:
            self.engine.submit(r, self.now)
        wake = self.engine.step(self.now)
        while wake is not None and wake <= until:
            self.now = wake
            wake = self.engine.step(self.now)
        return self

    def tokens(self, request_id):
        return [t for o in self.outputs if o.request_id == request_id for t in o.token_ids]

    def end(self, request_id):
        (last,) = [o for o in self.outputs if o.request_id == request_id and o.finish_reason]
        return last


def alone(request):
    return Rig().run(request).tokens(request.id)


def test_a_request_takes_the_time_of_its_batches():
    cost = CostModel(encode_image_s=3.0, step_base_s=1.0, prefill_token_s=0.1, decode_token_s=0.5)
    request = make_request("r", n_text=5, pictures=[1], max_tokens=4)  # 11 tokens
    rig = Rig(cost=cost).run(request)
    assert rig.ends["r"] == pytest.approx(3.0 + (1.0 + 11 * 0.1) + 3 * 1.5)
    assert len(rig.tokens("r")) == 4 and rig.engine.idle
    rig.caches.check(idle=True)


@pytest.mark.parametrize("tokens", [1, 7, 24])
def test_chunks_read_the_rows_of_their_placeholders_where_pictures_have_text_inside(tokens, monkeypatch):
    request = make_request("r", 9, [1, 3, 2], max_tokens=4, gaps={1: ((2, 1), (5, 9)), 2: ((4, 4),)})
    want, look, looked = alone(request), _Language._look, []

    def noting(self, work, reads):
        n = len(reads.tags)
        look(self, work, reads)
        looked.append((range(work.start, work.start + work.count), [tag & 0xFFFFFFFF for tag in reads.tags[n:]]))

    monkeypatch.setattr(_Language, "_look", noting)
    rig = Rig(tokens=tokens).run(request)
    assert rig.tokens("r") == want and rig.end("r").error is None
    for chunk, parts in looked:
        shown = {
            (span.start, row // EMBED.block_tokens + 1)
            for p, (span, row) in placeholders(request).items()
            if p in chunk
        }
        assert parts == [part for _, part in sorted(shown)]
    assert {p for chunk, _ in looked for p in chunk} >= set(placeholders(request))
    rig.caches.check(idle=True)


@pytest.mark.parametrize("slowdown", [1.0, 2.0])
def test_a_batch_is_slower_while_the_other_lane_runs(slowdown):
    now = 0.0
    cost = CostModel(
        encode_image_s=3.0, step_base_s=1.0, prefill_token_s=0.0, decode_token_s=0.0, overlap_slowdown=slowdown
    )
    device = EmulatedDevice(cost, lambda: now, {s.name: BlockStore(s, 4) for s in (KV, EMBED)}, SPOKEN)
    seq = LiveSequence(make_request("r"), (0.0, 0), 0.0)
    prefill = StepBatch(1, Lane.LANGUAGE, [TokenWork(seq, 0, 5, True)], 5)
    assert device.occupy(prefill).end_s == 1.0
    end = device.occupy(StepBatch(2, Lane.VISION, [EncodeWork(seq, 0)], 1)).end_s
    assert end == pytest.approx(3.0 + 1.0 - 1.0 / slowdown)  # for the first second it does 1 / slowdown of its work
    now = 1.0
    assert device.occupy(prefill).end_s == pytest.approx(1.0 + slowdown)  # wholly beside the encode
    now = 10.0
    assert device.occupy(prefill).end_s == 11.0


def test_a_picture_waits_for_nobody_under_free_overlap():
    rig = Rig()
    rig.run(make_request("text", max_tokens=12), until=1.0)
    rig.run(make_request("picture", pictures=[1], max_tokens=1))
    assert rig.ends["text"] == pytest.approx(12.0)  # decodes go on beside the encode
    assert rig.ends["picture"] == pytest.approx(1.0 + 3.0 + 1.0)


def test_tokens_depend_on_prompt_picture_and_seed_only():
    a = make_request("a", pictures=[1], max_tokens=9)
    assert alone(a) == alone(make_request("other id", pictures=[1], max_tokens=9))
    assert alone(a) != alone(make_request("a", pictures=[2], max_tokens=9))
    assert alone(a) != alone(make_request("a", n_text=6, pictures=[1], max_tokens=9))
    assert set(alone(a)) <= set(SPOKEN) and len(set(alone(a))) > 3

    def drawn(**kw):
        sampling = SamplingParams(max_tokens=9, temperature=kw.pop("temperature", 1.0))
        request = make_request("s", max_tokens=9, sampling=sampling)
        return alone(type(request)(**{f: getattr(request, f) for f in request.__struct_fields__} | kw))

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    assert drawn(seed=1, choice=1) != drawn(seed=1, choice=0)
    assert drawn(seed=1, temperature=0.0) == drawn(seed=2, temperature=0.0)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3), st.integers(1, 20)), min_size=1, max_size=6),
    kv_blocks=st.integers(16, 40),
    tokens=st.integers(3, 24),
)
def test_tokens_do_not_depend_on_batching_or_preemption(shapes, kv_blocks, tokens):
    requests = [
        make_request(f"r{i}", n_text=n, pictures=[p] if p else [], max_tokens=m) for i, (n, p, m) in enumerate(shapes)
    ]
    rig = Rig(kv_blocks=kv_blocks, tokens=tokens, headroom=0).run(*requests)
    for r in requests:
        assert rig.end(r.id).finish_reason == "length", rig.end(r.id).error
        assert rig.tokens(r.id) == alone(r)
    rig.scheduler.check()
    rig.caches.check(idle=True)


class Oracle:
    """A drafter that knows most of the answers."""

    name = "oracle"

    def __init__(self, answers):
        self.answers, self.n_asked = answers, 0

    def guess(self, seq, n):
        self.n_asked += 1
        answer = self.answers[seq.id][seq.n_produced :][:n]
        return Guess(answer if self.n_asked % 3 else [*answer[:2], 9])

    def keep(self, seqs):
        pass


@pytest.mark.parametrize(("more", "kv_blocks"), [({}, 64), ({}, 20), ({WINDOW: 40}, 64), ({STATE: 40}, 64)])
def test_verified_drafts_write_what_single_steps_write(more, kv_blocks):
    """Every later step reads what they wrote, and the next request finds it."""
    requests = [make_request(f"r{i}", n_text=5 + i, max_tokens=25, salt=b"one") for i in range(3)]
    answers = {r.id: alone(r) for r in requests}
    cost = CostModel(encode_image_s=3.0, step_base_s=1.0, prefill_token_s=0.0, decode_token_s=0.01)
    plain = Rig(kv_blocks=kv_blocks, more=more, cost=cost).run(*requests)
    rig = Rig(kv_blocks=kv_blocks, more=more, cost=cost, drafting=Drafting([Oracle(answers)], None, 4)).run(*requests)
    assert all(rig.end(r.id).error is None and rig.tokens(r.id) == answers[r.id] for r in requests)
    assert rig.now < 0.8 * plain.now
    rig.scheduler.check()
    rig.caches.check(idle=True)


def test_preemption_happens_in_such_a_test_and_changes_nothing():
    requests = [make_request(f"r{i}", n_text=8, max_tokens=20) for i in range(4)]
    rig = Rig(kv_blocks=12, headroom=0).run(*requests)
    assert rig.scheduler.n_preemptions > 0
    assert [rig.tokens(r.id) for r in requests] == [alone(r) for r in requests]


def test_an_emulated_answer_has_no_end_token():
    first = alone(make_request("r"))
    again = alone(make_request("r", eos_ids=tuple(first)))
    assert len(again) == 8 and not set(again) & set(first)


def test_logprobs_have_the_shape_of_real_ones():
    request = make_request("r", max_tokens=3, sampling=SamplingParams(max_tokens=3, logprobs=4))
    rig = Rig().run(request)
    told = [p for o in rig.outputs for p in o.logprobs]
    assert len(told) == 3
    for token, p in zip(rig.tokens("r"), told):
        assert (p.rank, p.top[0]) == (1, (token, p.logprob))
        assert len({t for t, _ in p.top}) == 4 and [v for _, v in p.top] == sorted([v for _, v in p.top], reverse=True)
    none = make_request("n", max_tokens=1, sampling=SamplingParams(max_tokens=1, logprobs=0))
    (p,) = (p for o in Rig().run(none).outputs for p in o.logprobs)
    assert p.top == () and p.logprob < 0


def check_fails(rig, request_id):
    end = rig.end(request_id)
    assert (end.finish_reason, end.error.code, end.error.status) == ("error", "emulated_mismatch", 500)


@pytest.mark.parametrize("n_after", [0, 1, 5])
def test_a_wrong_kv_block_fails_its_request_alone(n_after):
    """Whichever block it is: in a decode all of one sequence's blocks are looked at once in so many steps."""
    for which in range(3):
        rig = Rig()
        rig.run(*(make_request(f"r{i}", n_text=9, max_tokens=30) for i in range(3)), until=3.0 + n_after)
        block = rig.scheduler.get("r1").hold.blocks["kv"][which]
        rig.stores["kv"].bytes[block].zero_()
        rig.run()
        check_fails(rig, "r1")
        for other in ("r0", "r2"):
            assert rig.end(other).finish_reason == "length" and len(rig.tokens(other)) == 30
        rig.caches.check(idle=True)


def test_a_stale_copy_of_the_last_block_is_seen_at_once():
    rig = Rig().run(make_request("r", n_text=9, max_tokens=30), until=1.0)
    last = rig.scheduler.get("r").hold.blocks["kv"][2]
    old = rig.stores["kv"].bytes[last].clone()
    rig.run(until=2.0)
    rig.stores["kv"].bytes[last] = old
    rig.run(until=4.0)
    check_fails(rig, "r")


def test_a_wrong_embedding_fails_who_reads_it():
    rig = Rig(tokens=4)
    rig.run(make_request("r", n_text=9, pictures=[1], max_tokens=3), until=2.9)
    block = rig.scheduler.get("r").hold.blocks["embed"][1]
    rig.run(until=3.0)  # encoded, and prefill has begun
    rig.stores["embed"].bytes[block] = 7.0
    rig.run(make_request("text", max_tokens=3))
    check_fails(rig, "r")
    assert rig.end("text").finish_reason == "length"


def test_lost_pixels_fail_their_request():
    pixels = {"px1": "there"}
    rig = Rig(pixels=pixels.__getitem__)
    rig.run(make_request("r1", pictures=[1]), make_request("r2", pictures=[2]))
    assert rig.end("r1").finish_reason == "length"
    assert rig.end("r2").error.code == "pixels_gone"


def moved(source, target, request_id, spoil=None):
    """Hand a request over as a migration does: its blocks are copied, then it lands."""
    local = LocalExports()
    handles = Exports("a:0", source.stores, "local", local=local).handles
    seq = source.scheduler.get(request_id)
    pulls = target.scheduler.expect(Handoff.of(seq, source.scheduler.room.offered(seq), "a", 0, handles), 0.0)
    for spec, (theirs, ours) in pulls.blocks.items():
        LocalTransport(local).copy(handles[spec], theirs, target.stores[spec], ours)
        if spoil is not None:
            spoil(target.stores[spec].bytes, ours)
    target.scheduler.land(request_id, 0.0)
    return target.run()


@pytest.mark.parametrize("more", [{}, {WINDOW: 8}, {STATE: 8}], ids=["", "window", "state"])
def test_tokens_are_the_same_wherever_it_goes(more):
    request = make_request("r", n_text=9, pictures=[1, 2], max_tokens=12)
    first, second, third = Rig("E").run(request), Rig("P", more=more), Rig("D", more=more)
    moved(first, second, "r")
    moved(second, third, "r")
    assert second.tokens("r") + third.tokens("r") == alone(request)


@pytest.mark.parametrize("what", ["kv", "embed"])
@pytest.mark.parametrize("which", [0, -1])
def test_a_block_that_was_not_copied_is_seen(what, which):
    def swap(data, blocks):
        data[blocks[which]] = torch.zeros(())

    request = make_request("r", n_text=9, pictures=[1, 2], max_tokens=12)
    first, second = (Rig("E"), Rig("PD")) if what == "embed" else (Rig("EP"), Rig("D"))
    first.run(request)
    check_fails(moved(first, second, "r", swap), "r")


def test_blocks_in_the_wrong_order_are_seen():
    def swap(data, blocks):
        data[blocks[:2]] = data[[blocks[1], blocks[0]]]

    first = Rig("EP").run(make_request("r", n_text=9, max_tokens=12))
    check_fails(moved(first, Rig("D"), "r", swap), "r")


def test_a_thread_wakes_by_itself_when_a_batch_is_ready():
    thread = EngineThread(time.monotonic)
    done, outputs = threading.Event(), []

    def sink(new):
        outputs.extend(new)
        if any(o.finish_reason for o in new):
            done.set()

    rig = Rig(cost=structs.replace(COST, encode_image_s=0.01, step_base_s=0.002), clock=time.monotonic, sink=sink)
    request = make_request("r", pictures=[1], max_tokens=5)
    thread.start(rig.engine)
    try:
        thread.submit(request)
        assert done.wait(60)
    finally:
        thread.close()
    assert [t for o in outputs for t in o.token_ids] == alone(request)


def test_a_batch_that_cannot_be_packed_ends_as_an_error():
    rig = Rig()
    seq = LiveSequence(make_request("r"), (0.0, 0), 0.0)  # it holds no blocks
    ticket = rig.runners[Lane.LANGUAGE].launch(StepBatch(1, Lane.LANGUAGE, [TokenWork(seq, 0, 5, True)], 5))
    assert ticket.poll(0.0).error.status == 500


def test_only_the_heads_of_blocks_are_touched():
    rig = Rig().run(make_request("r", pictures=[1], max_tokens=20))
    for store in rig.stores.values():
        words = store.bytes.view(torch.int64)
        assert words[:, 0].any() and not words[:, 1:].any()


def test_spoken_ids_leave_out_specials_bytes_and_what_was_added():
    assert spoken_ids(32064, 32000) == range(259, 32000)
    assert spoken_ids(2048, 2000) == range(259, 2000)
    assert spoken_ids(100, 0) == range(3, 100)


def test_equal_beginnings_share_blocks_whose_words_both_expect():
    requests = [make_request(f"r{i}", n_text=21, pictures=[1], max_tokens=12, salt=b"") for i in range(3)]
    rig = Rig(tokens=64)
    for r in requests:
        rig.run(r)
    assert rig.scheduler.room.n_tokens_found == 2 * 24 and not any(o.error for o in rig.outputs)
    assert len({tuple(rig.tokens(r.id)) for r in requests}) == 1
    shared = make_request("r", n_text=21, pictures=[1], max_tokens=12, salt=b"")
    rig.stores["kv"].bytes[rig.caches.pools["kv"].lookup_all(split_chain(shared.keys))[3]] = 0
    rig.run(shared)
    check_fails(rig, "r")
    rig.run(make_request("other", n_text=21, pictures=[1], max_tokens=12, salt=b"mine"))
    assert rig.end("other").finish_reason == "length"
    rig.caches.check(idle=True)
