"""What a server decides about its instances and its requests: a census, the lives, and the links between them and the
instances. Pure: the hub gives it sockets, tests give it a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hydrainfer.cluster.census import Census
from hydrainfer.cluster.forgetting import Forgetting
from hydrainfer.cluster.instance import Pulse
from hydrainfer.cluster.link import Links
from hydrainfer.cluster.lives import Lives
from hydrainfer.cluster.messages import Failed, Hello, Report, ToHub
from hydrainfer.cluster.placing import Placer
from hydrainfer.cluster.roster import Roster
from hydrainfer.core import LifecycleEvent, OutputSink, Role


class ServerSide:
    """The arguments are those of `Census` and `Lives`."""

    def __init__(
        self,
        roles: Mapping[str, Role],
        sink: OutputSink,
        record: Callable[[LifecycleEvent], None] = lambda _: None,
        pulse: Pulse | None = None,
        stall_s: float = float("inf"),
        away_s: float = float("inf"),
        placer: Placer | None = None,
    ) -> None:
        pulse = pulse or Pulse()
        self.links: Links = {}
        self.lives = Lives(placer or Placer(Roster()), self.links, sink, record, pulse)
        self.census = Census(roles, self.links, self.lives.meet, pulse, stall_s, away_s)
        self.forgetting = Forgetting(self.links)
        self._beat_s = pulse.beat_s
        self._beat_at = 0.0

    def hear(self, message: ToHub, now: float) -> None:
        """Handle a message of an instance."""
        match message:
            case Hello() if self.census.hello(message, now):
                self._beat_at = now  # requests may wait for this instance
            case Report() if self.census.heard(message, now):
                self.lives.report(message, now)
                self.forgetting.heard(message)
            case Failed(name, incarnation, error):
                self.census.failed(name, incarnation, error, now)

    def tick(self, now: float) -> float:
        """Check deadlines, silent instances and requests without an instance. Returns the time of the next call."""
        if now >= self._beat_at:
            late_s = max(0.0, now - self._beat_at - self._beat_s)
            self._beat_at = now + self._beat_s
            self.census.beat(late_s, now)
            lost = self.census.lost
            self.lives.beat(lost.stage if lost is not None else None, now)
            self.forgetting.settle()
        return self._beat_at
