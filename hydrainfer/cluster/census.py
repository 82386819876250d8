"""The instances that run: who has said hello, who is silent, who is killed, and which stages are lost.

    Hello ─> member ─silent, or about to be restarted─> suspect ─silent for longer─> killed
               │                                                                      │
               └───────────── its process ends ──────────> gone, buried <─────────────┘

A number is an *incarnation*: an instance that is started again has a new one. The layout may change while it serves:
instances are added, leave once they have no requests, or take on other stages that they have loaded. Pure: no sockets,
no clock, no launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from hydrainfer.cluster.instance import Pulse
from hydrainfer.cluster.link import Link, Links
from hydrainfer.cluster.messages import Become, Close, Hello, Members, Peer, Report
from hydrainfer.cluster.restarts import Lost, Restarts
from hydrainfer.cluster.rolling import Incarnation, Rolling
from hydrainfer.core import ConfigError, ErrorInfo, InstanceStats, Role, Stage


@dataclass(slots=True)
class Member:
    """One live incarnation. `killed`: it is to be killed, or has been. `closed`: it has been told to close."""

    hello: Hello
    stats: InstanceStats | None = None
    killed: bool = False
    closed: bool = False


Announce = Callable[[tuple[Peer, ...], Incarnation | None, float], None]
"""A function that is told all who live, the incarnation that was ended last to be restarted, and the time."""


class Census:
    """The instances of a layout. `roles`: that of each, running or not. `links`: those to the instances that run, which
    the census makes and ends. `announce`: called whenever that changes. `stall_s`: an instance whose step has hung for
    longer is killed. `away_s`: the `timeout_s` of `Restarts`. `kills`: the incarnations that somebody is to kill.
    `leaving`: the instances that leave the layout; `told_to_close`: those that somebody is to let end for good.
    `lost`: the first stage that was lost for good."""

    def __init__(
        self,
        roles: Mapping[str, Role],
        links: Links,
        announce: Announce,
        pulse: Pulse,
        stall_s: float = float("inf"),
        away_s: float = float("inf"),
    ) -> None:
        self.members: dict[str, Member] = {}
        self.kills: list[Incarnation] = []
        self.roles = dict(roles)
        self.restarts = Restarts(self.roles, away_s)
        self.rolling = Rolling()
        self.leaving: set[str] = set()
        self.told_to_close: list[str] = []
        self.lost: Lost | None = None
        self._links = links
        self._tell = announce
        self._pulse = pulse
        self._stall_s = stall_s
        self._buried: set[Incarnation] = set()

    # ---- what is heard

    def hello(self, hello: Hello, now: float) -> bool:
        """Note that an instance runs. An earlier incarnation of it is dead. Returns False if this one is known to have
        died before its `Hello` arrived."""
        name, incarnation = hello.peer.name, hello.peer.incarnation
        if (name, incarnation) in self._buried:
            return False
        known = self.members.get(name)
        if known is not None and known.hello.peer.incarnation != incarnation:
            self.gone(name, known.hello.peer.incarnation, now)
        peer = msgspec.structs.replace(hello.peer, host=hello.host)
        self.members[name] = Member(msgspec.structs.replace(hello, peer=peer))
        if name not in self._links:
            self._links[name] = Link(incarnation, now)
        self.restarts.back(name)
        self._announce(now)
        return True

    def failed(self, name: str, incarnation: int, error: ErrorInfo, now: float) -> None:
        """Note that an incarnation ends because of `error`. If it never ran, this was a failed attempt to start the
        instance."""
        if name not in self.members and (name, incarnation) not in self._buried:
            self.restarts.failed(name, error, now)

    def gone(self, name: str, incarnation: int, now: float, for_good: bool = False) -> None:
        """Note that the process of an incarnation is dead. `for_good`: nothing starts it again."""
        self._buried.add((name, incarnation))
        member = self.members.get(name)
        if member is None or member.hello.peer.incarnation != incarnation:
            return
        del self.members[name], self._links[name]
        if name in self.leaving:
            self.leaving.remove(name)
            del self.roles[name]
            if not member.closed:  # it died before: nobody is to start it again
                self.told_to_close.append(name)
        else:
            self.restarts.gone(name, now, for_good)
        self._announce(now)

    def heard(self, report: Report, now: float) -> bool:
        """Note a report. Returns False if it is not to be read: its sender is dead, or is killed because an earlier
        report of it was lost."""
        member = self.members.get(report.name)
        if member is None or member.hello.peer.incarnation != report.incarnation:
            return False
        if not self._links[report.name].hear(report.n, now):
            self._kill(report.name, member)
            return False
        member.stats = report.stats or member.stats
        return True

    # ---- a layout that changes

    def add(self, name: str, role: Role) -> None:
        """Let an instance join the layout. It counts once it has said hello."""
        assert name not in self.roles, f"{name} is there already"
        self.roles[name] = role

    def retire(self, name: str) -> None:
        """Let an instance leave the layout. It gets new requests only if no other can take them, and closes once it has
        none. Raises `ConfigError` if no other instance runs its stages."""
        others = [role for other, role in self.roles.items() if other != name and other not in self.leaving]
        self._check_stages(name, others)
        self.leaving.add(name)

    def become(self, name: str, role: Role, now: float) -> None:
        """Let an instance without requests do these stages, which it has loaded, from now on. Raises `ConfigError` if
        it has requests, or if no other instance runs the stages that it gives up."""
        member = self.members.get(name)
        if member is None or member.stats is None or _has_work(member.stats):
            raise ConfigError(f"{name} has requests, or does not run: it cannot become {role} now")
        self._check_stages(name, [*(other for n, other in self.roles.items() if n != name), role])
        self.roles[name] = role
        peer = msgspec.structs.replace(member.hello.peer, role=str(role))
        member.hello = msgspec.structs.replace(member.hello, peer=peer)
        self._links[name].post(Become(str(role)))
        self._announce(now)

    def _check_stages(self, name: str, others: Iterable[Role]) -> None:
        stages = frozenset[Stage]().union(*(role.stages for role in others))
        missing = sorted(stage.value for stage in self.roles[name].stages - stages)
        if missing:
            raise ConfigError(f"without {name}, no instance could {' or '.join(missing)}")

    # ---- time

    def beat(self, late_s: float, now: float) -> None:
        """Check silent instances, the rolling restart and lost stages. `late_s`, by which this beat is late, does not
        count as silence: the whole machine may have been paused."""
        for link in self._links.values():
            link.excuse(late_s, now)
        self._roll(now)
        self._check_members(now)
        if self.lost is None:
            self.lost = self.restarts.lost(self.dark(), now)

    def dark(self) -> list[Stage]:
        """Stages of the layout that no instance runs now."""
        wanted = [stage for stage in Stage if any(role.runs(stage) for role in self.roles.values())]
        return [stage for stage in wanted if not any(self.roles[name].runs(stage) for name in self.members)]

    def _check_members(self, now: float) -> None:
        for name, member in self.members.items():
            peer, silent_s = member.hello.peer, now - self._links[name].heard_s
            hung_s = member.stats.hung_s if member.stats is not None else 0.0
            if silent_s > self._pulse.dead_s or hung_s > self._stall_s:
                self._kill(name, member)
            leaves = name in self.leaving
            if leaves and member.stats is not None and not _has_work(member.stats) and peer.suspect:
                self._close(name, member)
            suspect = silent_s > self._pulse.suspect_s or name == self.rolling.resting or leaves
            if suspect != peer.suspect:
                peer = msgspec.structs.replace(peer, suspect=suspect)
                member.hello = msgspec.structs.replace(member.hello, peer=peer)
                self._announce(now)

    def _roll(self, now: float) -> None:
        there = {name: member.hello.peer.incarnation for name, member in self.members.items()}
        idle = {name: member.stats is not None and not _has_work(member.stats) for name, member in self.members.items()}
        ended = self.rolling.turn(now, there, idle)
        if ended is not None:
            self._kill(ended[0], self.members[ended[0]])

    def _kill(self, name: str, member: Member) -> None:
        if not member.killed:
            member.killed = True
            self.kills.append((name, member.hello.peer.incarnation))

    def _close(self, name: str, member: Member) -> None:
        if not member.closed:
            member.closed = True
            self._links[name].post(Close())
            self.told_to_close.append(name)

    def _announce(self, now: float) -> None:
        peers = tuple(member.hello.peer for member in self.members.values())
        for link in self._links.values():
            link.post(Members(peers))
        self._tell(peers, self.rolling.ended, now)


def _has_work(stats: InstanceStats) -> bool:
    return bool(stats.n_waiting or stats.n_running or stats.n_migrating or stats.n_arriving or stats.n_parked)
