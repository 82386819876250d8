"""Engines for tests: on a virtual clock, or in a thread with devices that take no time."""

from hydrainfer.core import Lane, Role
from hydrainfer.engine import Engine, EngineThread
from hydrainfer.scheduler import Budgets, Policy, Scheduler
from tests.scheduler.fakes import FakeDevice, make_caches


class TimedRunner:
    """Executes on a `FakeDevice` and has the result ready `seconds` later, by the clock of `poll`."""

    def __init__(self, device, clock, seconds):
        self.device, self.clock, self.seconds = device, clock, seconds
        self.spans, self.launched_s = [], []

    def launch(self, batch):
        self.launched_s.append(self.clock())
        start = max(self.clock(), self.spans[-1][1] if self.spans else 0.0)
        self.spans.append((start, start + self.seconds))
        return TimedTicket(lambda: self.device.run(batch), start + self.seconds)

    def close(self):
        pass


class IdleRunner:
    """Never comes to an end."""

    def launch(self, batch):
        return self

    def poll(self, now):
        return None


class TimedTicket:
    def __init__(self, run, at):
        self.run, self.at = run, at

    def poll(self, now):
        return self.run() if now >= self.at else None

    def ready_at(self):
        return self.at


class Rig:
    """An engine on a virtual clock. `engine`: further arguments of it."""

    def __init__(
        self, overlap="free", encode_s=3.0, step_s=1.0, device=None, headroom=32, sink=None, engine=None, **caches
    ):
        self.now = 0.0
        self.device = device or FakeDevice()
        self.runners = {
            Lane.VISION: TimedRunner(self.device, lambda: self.now, encode_s),
            Lane.LANGUAGE: TimedRunner(self.device, lambda: self.now, step_s),
        }
        self.caches = make_caches(**caches)
        policy = Policy(encode_wait_s=2.0, headroom_tokens=headroom)
        s = Scheduler(Role.parse("EPD"), self.caches, Budgets(tokens=16, images=2), policy)
        self.outputs, self.events = [], []
        told = sink or self.outputs.extend
        self.engine = Engine(s, self.runners, told, self.events.append, overlap, **engine or {})

    def run(self, until=1000.0):
        wake = self.engine.step(self.now)
        while wake is not None and wake <= until:
            self.now = wake
            wake = self.engine.step(self.now)

    def tokens(self, request_id):
        return [t for o in self.outputs if o.request_id == request_id for t in o.token_ids]

    def end(self, request_id):
        (last,) = [o for o in self.outputs if o.request_id == request_id and o.finish_reason]
        assert [o for o in self.outputs if o.request_id == request_id][-1] is last
        return last


class Immediate(TimedRunner):
    """Ready at once, and says so by `wake` as a real lane does."""

    def __init__(self, device, wake):
        super().__init__(device, lambda: 0.0, 0.0)
        self.wake = wake

    def launch(self, batch):
        ticket = super().launch(batch)
        self.wake()
        return ticket


def threaded(device=None, record=lambda _: None, sink=None):
    thread, outputs = EngineThread(), []
    device = device or FakeDevice()
    runners = {lane: Immediate(device, thread.wake) for lane in Lane}
    caches = make_caches()
    scheduler = Scheduler(Role.parse("EPD"), caches, Budgets(tokens=16, images=2))
    thread.start(Engine(scheduler, runners, sink(outputs) if sink else outputs.extend, record))
    return thread, outputs, caches
