"""The loop under a virtual clock: every request ends once, lanes overlap as asked, deadlines and failures are typed."""

import os
import random

import pytest

from hydrainfer.core import DEVICE_LOST, EventKind, InternalError, Lane, Role, StepBatch, StepResult
from hydrainfer.engine import Engine, EngineThread
from hydrainfer.engine.lanes import Lanes
from hydrainfer.metrics import INTERVALS, Timelines
from hydrainfer.scheduler import Budgets, Scheduler
from tests.engine.rig import IdleRunner, Immediate, Rig, TimedTicket, threaded
from tests.scheduler.fakes import FakeDevice, Guessing, expected_tokens, make_caches, make_request
from tests.waiting import HELD_S, PATIENCE_S, wait_until

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("overlap", ["free", "step", "off", "slice"])
def test_every_request_ends_once_with_its_tokens(overlap, ahead):
    rig = Rig(overlap, engine={"ahead": ahead})
    requests = [make_request(f"r{i}", n_text=3 + i, pictures=[i % 3] * (i % 2), max_tokens=5) for i in range(6)]
    for r in requests:
        rig.engine.submit(r, rig.now)
    rig.run()
    for r in requests:
        assert rig.tokens(r.id) == expected_tokens(r)
        assert rig.end(r.id).finish_reason == "length"
    language = rig.runners[Lane.LANGUAGE]
    assert any(at < begin for at, (begin, _) in zip(language.launched_s, language.spans)) is ahead
    assert rig.engine.idle
    rig.caches.check(idle=True)


@pytest.mark.parametrize(("after_s", "launched"), [(0.0, [Lane.LANGUAGE]), (0.5, [])])
def test_no_step_is_launched_behind_decodes_that_wait_for_pictures(after_s, launched):
    """The scheduler would grant their late token a second time, before it knows that they were late."""
    lanes = Lanes({lane: IdleRunner() for lane in Lane}, "slice", ahead=True)
    lanes.launch(StepBatch(1, Lane.VISION, [], 1), 0.0)
    lanes.launch(StepBatch(2, Lane.LANGUAGE, [None], 1, 1, after_s), 0.0)
    assert lanes.in_flight[Lane.LANGUAGE][0].batch.decodes_only
    assert list(lanes.turns(lambda: False, lambda: (0, 1), lambda: False)) == launched


def test_drafts_that_a_step_ahead_has_overtaken_are_not_used():
    rig = Rig("off", device=Guessing(FakeDevice(), 1.0, random.Random(1)), engine={"ahead": True})
    requests = [make_request(f"r{i}", max_tokens=9 + i) for i in range(3)]
    for request in requests:
        rig.engine.submit(request, 0.0)
    rig.run()
    assert all(rig.tokens(request.id) == expected_tokens(request) for request in requests)


def overlapping(a, b):
    return any(x[0] < y[1] and y[0] < x[1] for x in a for y in b)


def test_lanes_overlap_as_configured():
    spans = {}
    for overlap in ("free", "step", "off"):
        rig = Rig(overlap)
        rig.engine.submit(make_request("text", max_tokens=12), 0.0)
        rig.run(until=1.0)
        rig.engine.submit(make_request("picture", pictures=[1]), rig.now)
        rig.run()
        spans[overlap] = (rig.runners[Lane.VISION].spans, rig.runners[Lane.LANGUAGE].spans)
    assert overlapping(*spans["free"]) and overlapping(*spans["step"]) and not overlapping(*spans["off"])
    (encode_start, encode_end) = spans["step"][0][0]
    assert len([s for s in spans["step"][1] if encode_start <= s[0] < encode_end]) == 1  # joined: one step per encode
    (encode_start, encode_end) = spans["free"][0][0]
    assert len([s for s in spans["free"][1] if encode_start <= s[0] < encode_end]) == 3  # decodes go on meanwhile


def test_cancel_ends_with_abort_and_frees_everything():
    rig = Rig()
    rig.engine.submit(make_request("a", pictures=[1], max_tokens=50), 0.0)
    rig.run(until=8.0)
    rig.engine.cancel(["a", "unknown"], rig.now)
    rig.run()
    assert rig.end("a").finish_reason == "abort"
    assert rig.tokens("a") == expected_tokens(make_request("a", pictures=[1], max_tokens=50))[: len(rig.tokens("a"))]
    rig.caches.check(idle=True)


def test_deadline_ends_with_504_even_in_the_queue():
    rig = Rig(kv_blocks=8)
    rig.engine.submit(make_request("runs", n_text=8, max_tokens=20, deadline_s=5.5), 0.0)
    rig.engine.submit(make_request("waits", n_text=16, max_tokens=10, deadline_s=3.0), 0.0)
    rig.run()
    assert rig.end("waits").error.status == 504 and rig.tokens("waits") == []
    assert rig.end("runs").error.status == 504 and len(rig.tokens("runs")) == 5
    rig.caches.check(idle=True)


def test_a_waiting_request_that_cannot_meet_its_deadline_ends_before_it_costs_anything():
    rig = Rig(overlap="off")
    rig.engine.submit(make_request("first", pictures=[1, 2], max_tokens=30), 0.0)
    rig.run(until=4.0)  # a picture takes 1.5 s: certainly not less than half of that
    rig.engine.submit(make_request("hopeless", pictures=[3, 4, 5, 6], deadline_s=rig.now + 2.9), rig.now)
    rig.engine.submit(make_request("hopeful", pictures=[7, 8], deadline_s=rig.now + 19.0), rig.now)
    rig.run(until=rig.now + 0.5)
    assert rig.end("hopeless").error.status == 504 and "any more" in rig.end("hopeless").error.message
    rig.run()
    assert rig.end("hopeful").finish_reason == "length"
    assert set(rig.device.n_encoded) == {b"picture%d" % n for n in (1, 2, 7, 8)}
    rig.caches.check(idle=True)


def test_a_request_that_waits_for_anothers_prefill_may_still_meet_its_deadline():
    rig = Rig(overlap="off", step_s=0.1)
    rig.engine.submit(make_request("measured", pictures=[1, 2]), 0.0)
    rig.run()  # a picture takes 1.5 s: certainly not less than half of that
    for name, late_s in {"first": 1e3, "second": 8.0}.items():  # four pictures take 6 s, and 3 s are left after 5 s
        request = make_request(name, pictures=[3, 4, 5, 6], max_tokens=2, deadline_s=rig.now + late_s)
        rig.engine.submit(request, rig.now)
    rig.run()
    assert rig.end("second").finish_reason == "length", rig.end("second").error
    assert max(rig.device.n_encoded.values()) == 1
    rig.caches.check(idle=True)


def test_too_large_a_request_ends_with_400_and_the_rest_goes_on():
    rig = Rig(kv_blocks=8)
    rig.engine.submit(make_request("large", n_text=40), 0.0)
    rig.engine.submit(make_request("small"), 0.0)
    rig.run()
    assert rig.end("large").error.status == 400
    assert rig.end("small").finish_reason == "length"


class FailingDevice(FakeDevice):
    def run(self, batch):
        if any(w.seq.id == "bad" for w in batch.work):
            return StepResult(batch, error=InternalError("the step failed"))
        return super().run(batch)


def test_a_failed_batch_ends_its_requests_only():
    rig = Rig(device=FailingDevice())
    rig.engine.submit(make_request("bad", pictures=[1, 2]), 0.0)
    rig.engine.submit(make_request("good", pictures=[3, 4]), 0.0)
    rig.run()
    assert rig.end("bad").error.status == 500
    assert rig.tokens("good") == expected_tokens(make_request("good", pictures=[3, 4]))
    rig.caches.check(idle=True)


def test_intervals_of_a_request_add_up_to_its_life():
    rig = Rig(kv_blocks=9, headroom=0)
    done = {}
    timelines = Timelines(lambda request_id, timeline: done.update({request_id: timeline}))
    for i in range(4):
        rig.engine.submit(make_request(f"r{i}", n_text=6, pictures=[i % 2], max_tokens=9), float(0))
    rig.run()
    for event in rig.events:
        timelines.record(event)
    assert len(done) == 4 and len(timelines) == 0
    for t in done.values():
        assert set(t.intervals_s) <= set(INTERVALS)
        assert sum(t.intervals_s.values()) == pytest.approx(t.e2e_s)
        assert len(t.token_s) == 9
    assert any(e.kind is EventKind.PREEMPTED for e in rig.events)
    assert any(t.n_preemptions for t in done.values())


def test_the_end_is_recorded_before_it_is_told():
    """So an answer finds the timeline of its request."""
    told = []

    def sink(outputs):
        finished = {e.request_id for e in rig.events if e.kind is EventKind.FINISHED}
        told.extend(o.request_id in finished for o in outputs if o.finish_reason)

    rig = Rig(sink=sink)
    for name, options in {"a": {}, "b": {"deadline_s": 2.5}, "c": {}, "large": {"n_text": 400}}.items():
        rig.engine.submit(make_request(name, **options), 0.0)
    rig.engine.cancel(["c"], 0.0)
    rig.run()
    assert told == [True] * 4


def test_stall_is_measured_only_while_there_is_work():
    rig = Rig()
    assert rig.engine.stats(100.0).stalled_s == 0.0
    rig.now = 100.0
    rig.engine.submit(make_request("a"), 100.0)
    rig.engine.step(100.0)
    assert rig.engine.stats(130.0).stalled_s == 30.0
    rig.run()
    assert rig.engine.stats(999.0).stalled_s == 0.0


def test_a_lane_that_hangs_shows_while_the_other_goes_on():
    rig = Rig(encode_s=1000.0)
    rig.engine.submit(make_request("picture", pictures=[1]), 0.0)
    rig.engine.submit(make_request("text", max_tokens=60), 0.0)
    rig.run(until=50.0)
    assert len(rig.tokens("text")) == 50
    assert rig.engine.stats(50.0).stalled_s == 50.0


def test_a_thread_drives_the_engine_and_close_ends_what_runs():
    thread, outputs, caches = threaded()
    request = make_request("a", pictures=[1])
    (info,) = thread.instances()
    assert (info.name, info.role, info.state, info.pid) == ("EPD0", "EPD", "alive", os.getpid())
    assert info.stats.cache_blocks == caches.usage()
    thread.submit(request)
    wait_until(lambda: any(o.finish_reason for o in outputs))
    assert [t for o in outputs for t in o.token_ids] == expected_tokens(request)
    thread.close()
    caches.check(idle=True)
    with pytest.raises(Exception, match="shutting down"):
        thread.submit(make_request("b"))


class BrokenDevice(FakeDevice):
    def run(self, batch):
        raise RuntimeError("a bug in the runner")


def test_a_bug_in_the_loop_ends_every_request_and_shows_in_stats():
    thread, outputs, _ = threaded(BrokenDevice())
    thread.submit(make_request("a"))
    wait_until(lambda: len(outputs) == 1)
    thread.submit(make_request("b"))
    wait_until(lambda: len(outputs) == 2)
    assert [o.error.status for o in outputs] == [500, 500]
    assert thread.stats().stalled_s == float("inf")
    (info,) = thread.instances()
    assert (info.name, info.role, info.state, info.stats) == ("EPD0", "EPD", "dead", None)
    thread.close()


class ForgetfulDevice(FakeDevice):
    """Samples one token too few."""

    def run(self, batch):
        result = super().run(batch)
        del result.tokens[1:]
        return result


def broken_record(event):
    raise RuntimeError("a bug in the metrics")


def sink_that_fails_once(outputs):
    failed = []

    def sink(new):
        if not failed:
            failed.append(1)
            raise RuntimeError("a bug in the sink")
        outputs.extend(new)

    return sink


@pytest.mark.parametrize(
    "broken",
    [{"device": ForgetfulDevice()}, {"record": broken_record}, {"sink": sink_that_fails_once}],
    ids=["apply", "record", "sink"],
)
def test_every_request_ends_once_whatever_breaks(broken):
    thread, outputs, _ = threaded(**broken)
    both = [make_request("a", n_text=3, max_tokens=1), make_request("b", n_text=3, max_tokens=1)]
    thread._inbox.extend(lambda engine, now, r=r: engine.submit(r, now) for r in both)  # one batch: a ends, b fails
    thread.wake()
    wait_until(lambda: len(outputs) >= 2)
    thread.submit(make_request("c"))
    wait_until(lambda: len(outputs) >= 3)
    assert sorted(o.request_id for o in outputs if o.finish_reason) == ["a", "b", "c"]
    assert thread.stats().stalled_s == float("inf")
    thread.close()


class Slow(Immediate):
    """Ready when `release` is set, on a thread of its own."""

    def __init__(self, device, wake, release):
        super().__init__(device, wake)
        self.release = release

    def launch(self, batch):
        import threading

        result = self.device.run(batch)
        ticket = TimedTicket(lambda: result, float("inf"))

        def finish():
            self.release.wait(HELD_S)
            ticket.at = 0.0
            self.wake()

        threading.Thread(target=finish, daemon=True).start()
        return ticket


def test_close_waits_for_the_batch_in_flight_and_no_longer():
    import threading

    thread, outputs, release = EngineThread(), [], threading.Event()
    caches, device = make_caches(), FakeDevice()
    runners = {lane: Slow(device, thread.wake, release) for lane in Lane}
    scheduler = Scheduler(Role.parse("EPD"), caches, Budgets(tokens=16, images=2))
    thread.start(Engine(scheduler, runners, outputs.extend))
    thread.submit(make_request("a"))
    wait_until(lambda: device.batches)
    closer = threading.Thread(target=thread.close)
    closer.start()
    wait_until(lambda: outputs)
    assert outputs[0].error.status == 503 and closer.is_alive()
    release.set()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    caches.check(idle=True)


def test_a_lost_device_ends_the_engine_at_once():
    """Alone, too: after CUDA's sticky errors every batch fails, and a health check must not say that all is well."""

    class Lost(FakeDevice):
        def run(self, batch):
            return StepResult(batch, error=InternalError("the device failed", code=DEVICE_LOST))

    rig = Rig(device=Lost())
    rig.engine.submit(make_request("r0"), rig.now)
    with pytest.raises(InternalError, match="1 batches in a row"):
        rig.run()


def test_a_lane_whose_every_batch_fails_ends_the_engine():
    class Broken(FakeDevice):
        def run(self, batch):
            return StepResult(batch, error=InternalError("the model step failed"))

    rig = Rig(device=Broken(), engine={"give_up_after": 3})
    for i in range(2):
        rig.engine.submit(make_request(f"r{i}"), rig.now)
        rig.run()
        assert rig.end(f"r{i}").error.status == 500
    rig.engine.submit(make_request("last"), rig.now)
    with pytest.raises(InternalError, match="3 batches in a row"):
        rig.run()
    assert rig.engine.load().token_s == 0.0, "what failed at once is not fast"


def test_a_lane_that_lacks_memory_is_given_longer_but_not_for_ever():
    class Full(FakeDevice):
        missing = True

        def run(self, batch):
            error = InternalError("the device ran out of memory", code="out_of_memory") if self.missing else None
            return StepResult(batch, error=error) if error else super().run(batch)

    def asks(name):
        rig.engine.submit(make_request(name), rig.now)
        rig.run()

    rig = Rig(device=Full(), engine={"give_up_after": 3})
    for i in range(29):
        asks(f"r{i}")
        assert rig.end(f"r{i}").error.status == 500
    rig.device.missing = False
    asks("between")
    assert rig.end("between").finish_reason == "length"
    rig.device.missing = True
    for i in range(29):
        asks(f"again{i}")
    with pytest.raises(InternalError, match="30 batches in a row"):
        asks("last")
