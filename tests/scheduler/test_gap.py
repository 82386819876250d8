"""The time between decode steps is bounded by what was measured: chunks shrink, and pictures go on for so long."""

import pytest

from hydrainfer.core import Lane, Role, Stage
from hydrainfer.scheduler import Budgets, Scheduler
from tests.scheduler.fakes import FakeDevice, make_caches, make_request

pytestmark = pytest.mark.unit
STEP_S, TOKEN_S, PICTURE_S = 0.02, 0.001, 0.3


class Clocked:
    """A scheduler whose batches take what they hold."""

    def __init__(self, gap_s, **more):
        self.caches = make_caches(kv_blocks=300)
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

    def decoding(self, n=1):
        for i in range(n):
            self.s.add(make_request(f"d{i}", n_text=3, max_tokens=300), self.now)
        for _ in range(3):
            self.step()
        assert len(self.s.decoding) == n


@pytest.mark.parametrize(("gap_s", "most_s"), [(0.0, 2.5 * STEP_S), (0.1, 0.1), (1e-3, 1.9 * STEP_S)])
def test_chunks_beside_decodes_fit_the_gap(gap_s, most_s):
    """Also where the limit cannot be met: then a chunk is small, but there is one."""
    rig = Clocked(gap_s)
    rig.decoding()
    rig.s.add(make_request("long", n_text=500, max_tokens=2), rig.now)
    chunks = []
    while "long" in rig.s.prefilling or not chunks:
        batch = rig.launch()
        assert batch.n_decodes == 1
        assert rig.land(batch) <= most_s + 1e-9
        chunks.append(batch.n_items - 1)
    assert sum(chunks) == 500 and max(chunks) >= 16
    if gap_s == 0.1:
        assert max(chunks) == 70  # 0.09 s less the step


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


def test_who_waits_for_seconds_gets_more_at_a_time():
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
