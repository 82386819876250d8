"""The time between decode steps is bounded by what was measured: chunks shrink, and pictures go on for so long."""

import pytest

from hydrainfer.core import Handoff, Lane, Role, Stage
from hydrainfer.scheduler import Budgets, Scheduler
from tests.scheduler.fakes import FakeDevice, make_caches, make_request

pytestmark = pytest.mark.unit
STEP_S, TOKEN_S, PICTURE_S = 0.02, 0.001, 0.3


class Clocked:
    """A scheduler whose batches take what they hold."""

    def __init__(self, gap_s, **more):
        self.caches = make_caches(kv_blocks=400)
        self.s = Scheduler(Role.parse("EPD"), self.caches, Budgets(gap_s=gap_s, **more))
        self.device, self.now, self.batches = FakeDevice(), 0.0, []

    def launch(self, lane=Lane.LANGUAGE, interrupts=False):
        batch = self.s.next(self.now, lane, interrupts).batch
        if batch is not None:
            self.batches.append(batch)
        return batch

    def land(self, batch):
        took_s = PICTURE_S * batch.n_items
        if batch.lane is Lane.LANGUAGE:
            took_s = STEP_S + TOKEN_S * (batch.n_items - batch.n_decodes)
        self.now += took_s
        self.s.observe(batch, took_s)
        self.s.apply(self.device.run(batch), self.now)
        return took_s

    def step(self):
        return self.land(self.launch())

    def decoding(self, n=1, max_tokens=300):
        for i in range(n):
            self.s.add(make_request(f"d{i}", n_text=3, max_tokens=max_tokens), self.now)
        for _ in range(3):
            self.step()
        assert len(self.s.decoding) == n

    def until(self, n):
        """The first has produced so many tokens: of each ten, one may be late."""
        while self.s.get("d0").n_produced < n:
            self.step()

    def measured(self):
        """The same, and what a chunk takes beside it."""
        self.s.add(make_request("first", n_text=40, max_tokens=1), self.now)
        while "first" in self.s.prefilling or self.s.n_waiting:
            self.step()


@pytest.mark.parametrize(("gap_s", "most_s"), [(0.0, 2.5 * STEP_S), (0.1, 0.1), (1e-3, 1.9 * STEP_S)])
def test_chunks_beside_decodes_fit_the_gap(gap_s, most_s):
    """Also where the limit cannot be met: then a chunk is small, but there is one."""
    rig = Clocked(gap_s)
    rig.decoding(max_tokens=1000)
    rig.s.get("d0").n_late = 20
    rig.s.add(make_request("long", n_text=500, max_tokens=2), rig.now)
    chunks = []
    while "long" in rig.s.prefilling or not chunks:
        batch = rig.launch()
        assert batch.n_decodes == 1
        assert rig.land(batch) <= most_s + 1e-9
        chunks.append(batch.n_items - 1)
    assert sum(chunks) == 500 and max(chunks) >= 16
    if gap_s == 0.1:
        assert 60 < max(chunks) <= 67  # 0.085 s less the step, and a little more with each that was in time


@pytest.mark.parametrize(("n_made", "n_late", "waits"), [(8, 0, False), (10, 0, True), (18, 1, False), (20, 1, True)])
def test_one_token_in_ten_may_be_late_for_all_of_a_prompt_or_a_picture(n_made, n_late, waits):
    rig = Clocked(0.1)
    rig.decoding()
    rig.measured()
    rig.until(n_made)
    rig.s.get("d0").n_late = n_late
    rig.s.add(make_request("picture", pictures=[1], max_tokens=2), rig.now)
    vision = rig.launch(Lane.VISION)
    decode = rig.launch(interrupts=True)
    assert (decode is None) is waits
    if decode is not None:
        assert decode.after_s == pytest.approx(0.85 * 0.1 - STEP_S, rel=0.01)
        rig.land(decode)
    rig.land(vision)
    rig.s.add(make_request("long", n_text=500, max_tokens=2), rig.now)
    assert (rig.launch().n_items >= 500) is waits
    rig.land(rig.batches[-1])
    while rig.s.prefilling:
        rig.step()
    rig.step()
    assert rig.s.get("d0").n_late == n_late + 1  # a picture in the way, or both


def test_all_that_waits_is_done_in_one_pause_but_not_for_longer_than_two_seconds():
    rig = Clocked(0.1, images=1)
    rig.decoding(10, max_tokens=30)
    while rig.s.decoding:
        rig.step()
    rig.decoding()
    rig.measured()
    rig.until(10)
    for i in range(8):
        rig.s.add(make_request(f"picture{i}", n_text=180, pictures=[i], max_tokens=40), rig.now)
    for _ in range(4):
        vision = rig.launch(Lane.VISION)
        assert rig.launch(interrupts=True) is None
        rig.land(vision)
        prefill = rig.launch()
        assert prefill.n_decodes == 0
        rig.land(prefill)
    assert rig.launch(Lane.VISION).n_items == 1
    assert rig.land(rig.launch(interrupts=True)) == STEP_S
    assert [rig.s.get(name).n_late for name in ("d0", "picture0", "picture3")] == [1, 1, 0]


def test_prompts_share_a_pause_and_the_last_one_a_batch_with_the_decodes():
    rig = Clocked(0.1, tokens=500)
    rig.decoding()
    rig.measured()
    rig.until(10)
    for i in range(3):
        rig.s.add(make_request(f"long{i}", n_text=450, max_tokens=1), rig.now)
    batches = [rig.launch()]
    while rig.s.prefilling or rig.s.n_waiting:
        rig.land(batches[-1])
        batches.append(rig.launch())
    assert [b.n_decodes for b in batches[:-1]] == [0] * (len(batches) - 2) + [1]
    assert rig.s.get("d0").n_late == 1


def test_a_request_that_can_no_longer_keep_the_limit_gets_a_token_beside_each_prompt():
    rig = Clocked(0.1)
    rig.decoding(max_tokens=40)
    rig.measured()
    rig.s.get("d0").n_late = 9
    for i in range(3):
        rig.s.add(make_request(f"long{i}", n_text=450, max_tokens=1), rig.now)
    while rig.s.prefilling or rig.s.n_waiting:
        batch = rig.launch()
        assert batch.n_decodes == 1 and batch.n_items > 100
        rig.land(batch)


@pytest.mark.parametrize("wait_s", [0.0, 0.3])
def test_until_those_who_decode_may_be_late_other_work_waits_but_not_for_long(wait_s):
    rig = Clocked(0.1, wait_s=wait_s)
    rig.decoding(max_tokens=1000)
    rig.measured()
    rig.s.get("d0").n_late = 20
    rig.s.add(make_request("long", n_text=500, max_tokens=2), rig.now)
    began_s = rig.now
    while (batch := rig.launch()).decodes_only:
        assert rig.land(batch) == STEP_S
    assert wait_s <= rig.now - began_s <= wait_s + STEP_S
    assert 60 < batch.n_items < 80


def test_a_prompt_that_fits_the_limit_whole_does_not_wait():
    rig = Clocked(0.1, wait_s=0.3)
    rig.decoding(max_tokens=1000)
    rig.measured()
    rig.s.get("d0").n_late = 20
    for i in range(2):
        rig.s.add(make_request(f"short{i}", n_text=40, max_tokens=1), rig.now)
    assert [w.seq.id for w in rig.launch().work] == ["d0", "short0"]
    assert rig.land(rig.batches[-1]) <= 0.1
    rig.s.add(make_request("long", n_text=500, max_tokens=2), rig.now)
    assert {w.seq.id for w in rig.launch().work} == {"d0", "short1"}
    rig.land(rig.batches[-1])
    assert rig.launch().decodes_only


def test_an_answer_may_be_late_before_its_tenth_token_if_nine_in_ten_become_long_enough():
    rig = Clocked(0.1)
    for i in range(30):
        rig.s.add(make_request(f"short{i}", n_text=3, max_tokens=5 if i % 15 == 0 else 12), rig.now)
        while rig.s.get(f"short{i}"):
            rig.step()
    rig.decoding()
    rig.measured()
    assert rig.s.get("d0").n_produced < 9 and rig.s.gap.may_be_late()
    rig.s.get("d0").n_late = 1
    assert not rig.s.gap.may_be_late()
    for i in range(8):
        rig.s.add(make_request(f"shorter{i}", n_text=3, max_tokens=3), rig.now)
    while rig.s.n_waiting or len(rig.s.decoding) > 1:
        rig.step()
    rig.s.get("d0").n_late = 0
    assert rig.s.get("d0").n_produced < 10 and not rig.s.gap.may_be_late()


def test_a_request_that_was_late_too_often_waits_as_if_there_were_no_limit():
    rig = Clocked(0.1)
    rig.decoding(2, max_tokens=40)
    rig.measured()
    rig.s.get("d0").n_late = 4
    rig.s.add(make_request("long", n_text=500, max_tokens=2), rig.now)
    assert rig.step() <= 0.1  # for the other one
    rig.s.get("d1").n_late = 4
    assert rig.step() > 0.4


def test_the_part_of_the_limit_that_is_used_shrinks_with_late_tokens_and_grows_with_others():
    rig = Clocked(0.1)
    rig.decoding(max_tokens=1000)
    rig.measured()
    seq, used = rig.s.get("d0"), []
    for i in range(60):
        rig.s.add(make_request(f"long{i}", n_text=500, max_tokens=1), rig.now)
        seq.n_late = 20  # nothing is let be late
        batch = rig.launch()
        used.append(batch.n_items)
        rig.now += 0.03 * (i < 10)  # something else runs for so long
        rig.land(batch)
    assert used[10] <= 0.8 * used[0] and used[10] < used[-1] < used[0]


def test_tokens_that_are_late_on_purpose_do_not_narrow_the_slices():
    rig = Clocked(0.1)
    rig.decoding(max_tokens=1000)
    rig.measured()
    sizes = []
    for i in range(20):
        rig.s.get("d0").n_late = 0 if i else 20
        rig.s.add(make_request(f"long{i}", n_text=110, max_tokens=1), rig.now)
        while rig.s.get("d0").n_produced < 10 or f"long{i}" in rig.s.prefilling or rig.s.n_waiting:
            rig.step()
            sizes.append(rig.batches[-1].n_items)
    rig.s.get("d0").n_late = 99
    rig.s.get("d0").n_most = 10_000
    rig.s.add(make_request("cut", n_text=500, max_tokens=1), rig.now)
    assert max(sizes) >= 111 and rig.launch().n_items >= 60


def test_without_a_bound_a_chunk_is_what_the_budget_allows():
    rig = Clocked(None)
    rig.decoding()
    rig.s.add(make_request("long", n_text=500, max_tokens=2), rig.now)
    assert rig.launch().n_items == 501


def test_a_decode_step_is_measured_by_itself_before_anything_shares_it_and_again_later():
    rig = Clocked(0.0)
    rig.s.add(make_request("d", n_text=3, max_tokens=300), 0.0)
    rig.step()
    rig.s.add(make_request("long", n_text=900, max_tokens=2), rig.now)
    alone = []
    while "long" not in rig.s.decoding:
        rig.step()
        alone.append(rig.batches[-1].n_items == 1)
    assert alone[0] and not alone[1]
    assert sum(alone) == 1 + len(alone) // 33


def test_a_prompt_that_has_waited_for_seconds_gets_larger_chunks():
    rig = Clocked(0.0, step_s=0.5)
    rig.decoding()
    rig.s.add(make_request("long", n_text=900, max_tokens=2), rig.now)
    rig.step()
    usual = rig.batches[-1].n_items
    rig.now += 3.0
    rig.step()
    assert rig.batches[-1].n_items > 5 * usual


def test_pictures_go_on_for_what_the_gap_leaves_and_wait_for_better_prefills():
    rig = Clocked(0.0)
    rig.decoding()
    rig.s.add(make_request("picture", pictures=[1, 2], max_tokens=2), rig.now)
    vision = rig.launch(Lane.VISION)
    decode = rig.launch(interrupts=True)
    assert (decode.n_items, decode.after_s) == (1, pytest.approx(1.5 * STEP_S))
    rig.land(decode)
    rig.s.add(make_request("text", n_text=4, max_tokens=2), rig.now)
    rig.s.add(make_request("worse", n_text=400, max_tokens=2), rig.now)
    both = rig.launch(interrupts=True)
    assert [w.seq.id for w in both.work] == ["d0", "text"] and both.after_s == 0.0
    rig.land(both)
    assert {w.seq.id for w in rig.launch(interrupts=True).work} == {"d0", "text"}
    assert rig.s.get("worse").stage is Stage.PREFILL and not rig.s.get("worse").started
    rig.land(vision)


def test_a_vision_batch_whose_request_is_gone_does_not_hold_the_lane():
    rig = Clocked(0.1, wait_s=0.3)
    rig.decoding(max_tokens=1000)
    rig.s.get("d0").n_late = 20
    rig.s.add(make_request("picture", pictures=[1], max_tokens=2), rig.now)
    rig.launch(Lane.VISION)
    decode = rig.launch(interrupts=True)
    assert decode.after_s == 0.0, "it waits for a pause"
    rig.land(decode)
    rig.s.cancel("picture")
    assert rig.launch(interrupts=True).after_s > STEP_S


def test_a_prompt_fits_by_what_the_caches_hold_now():
    rig = Clocked(0.1, wait_s=10.0)
    rig.decoding(max_tokens=1000)
    rig.measured()
    for name, n in (("first", 300), ("again", 310)):
        rig.s.add(make_request(name, n_text=n, max_tokens=1, salt=b"a"), rig.now)
    rig.s.get("d0").n_late = 99  # whatever comes
    while rig.s.get("first"):
        assert "again" not in {w.seq.id for w in rig.launch().work}
        rig.land(rig.batches[-1])
    rig.s.get("d0").n_late = 20
    assert [w.seq.id for w in rig.launch().work] == ["d0", "again"]


def test_a_long_prompt_has_the_whole_pause():
    rig = Clocked(0.1, step_s=0.25)
    rig.decoding()
    rig.measured()
    rig.until(10)
    rig.s.add(make_request("long", n_text=600, max_tokens=1), rig.now)
    batches = []
    while rig.s.get("long"):
        batches.append(rig.launch())
        rig.land(batches[-1])
    assert [b.n_decodes for b in batches] == [0] * (len(batches) - 1) + [1] and len(batches) > 2
    assert rig.s.get("d0").n_late == 1


def test_a_request_from_another_instance_counts_as_having_got_a_token_just_then():
    p, ed = Clocked(0.1), Clocked(0.1)
    seq = p.s.add(make_request("r", n_text=3, max_tokens=30), 0.0)
    p.step()
    arrived = Handoff.of(seq, {}, "P0", 1, {}).sequence(5.0)
    assert arrived.stage is Stage.DECODE and arrived.latest_s == 5.0
    ed.s.decoding["r"] = arrived
    ed.s.gap._n_usual = 20
    assert ed.s.gap.may_pause(5.5) and not ed.s.gap.may_pause(7.5)
