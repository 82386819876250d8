"""The live requests of the server: where each one runs, the tokens it has so far, and its recovery when they are lost.

    submit ─> placed at an instance ─moves─> another … ─> its end is sent to the client, once
                        │ the instance dies, or a token is missing
                        └─> the next life: a new name at the instances, prompt + tokens sent so far, placed again

The name of a life is unique, so messages that are left of an earlier life cannot be taken for those of a later one. A
client never gets a token twice. Pure: no sockets, no clock. Messages to instances are collected from `orders`; outputs
for clients go to `sink`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec

from hydrainfer.cluster.instance import Pulse
from hydrainfer.cluster.live import Incarnation, LiveRequest, Member, has_work, needs
from hydrainfer.cluster.messages import Beat, Cancel, Hello, HubOrder, Learned, Members, Moved, Peer, Report, Submit
from hydrainfer.cluster.restarts import Lost, Restarts
from hydrainfer.cluster.rolling import Rolling
from hydrainfer.cluster.roster import Roster
from hydrainfer.core import (
    Cached,
    DeadlineExceeded,
    ErrorInfo,
    EventKind,
    HydraError,
    InternalError,
    LifecycleEvent,
    Output,
    OutputSink,
    Request,
    Stage,
    Unavailable,
)

_log = logging.getLogger(__name__)
_MAX_DEATHS = 4
_UNHEARD = 0.125  # weight of a death before the instance reported the request: it was likely dead on submission
_MAX_DETOURS = 2  # ways around cut pairs in a row, then a request stays where it is as long as its patience lasts
_CLEARED = 16  # tokens after which a request is not suspected of having killed the last instance


class Front:
    """The live requests and instances. `record` gets the lifecycle events of all instances, with the requests' own ids.
    `stall_s`: an instance whose step has hung for longer is killed. `away_s`: the `timeout_s` of `Restarts`."""

    def __init__(
        self,
        roster: Roster,
        sink: OutputSink,
        record: Callable[[LifecycleEvent], None] = lambda _: None,
        pulse: Pulse | None = None,
        stall_s: float = float("inf"),
        away_s: float = float("inf"),
    ) -> None:
        self.roster = roster
        self.members: dict[str, Member] = {}
        self.kills: list[Incarnation] = []  # the instances that the hub is to kill
        self.restarts = Restarts(roster.roles, away_s)
        self.rolling = Rolling()
        self.lost: Lost | None = None  # the first stage that was lost for good
        self.n_recovered = 0
        self._sink = sink
        self._record = record
        self._pulse = pulse or Pulse()
        self._stall_s = stall_s
        self._live: dict[str, LiveRequest] = {}  # by the request's id
        self._lives: dict[str, LiveRequest] = {}  # by the name of its present life
        self._buried: set[Incarnation] = set()
        self._orders: dict[str, list[HubOrder]] = {}
        self._out: list[Output] = []
        self._beat_at = 0.0

    # ---- clients

    def submit(self, request: Request, now: float) -> None:
        """Place a new request. If no instance runs its first stage now, the request waits for one, like a request whose
        instance has died. Raises `Unavailable` if a stage is lost for good."""
        if self.lost is not None:
            raise _lost_error(self.lost.stage)
        live = LiveRequest(request, request.id)
        self._place(live, now)
        self._live[request.id] = self._lives[request.id] = live
        arrived_s = now if request.arrival_s is None else request.arrival_s
        self._note(LifecycleEvent(request.id, EventKind.ARRIVED, arrived_s, n=request.n_prompt))

    def cancel(self, request_ids: Iterable[str], now: float) -> None:
        lives = [self._live[i] for i in request_ids if i in self._live]
        for live in lives:
            live.cancelled = True
            if live.owner is None:
                self._end(live, now, "abort")
        self._revoke([live.name for live in lives if live.owner is not None])
        self._flush()

    def end_all(self, error: HydraError, now: float) -> None:
        """End every request with `error`: the instances are gone."""
        for live in list(self._live.values()):
            self._end(live, now, "error", error)
        self._flush()

    # ---- instances

    def hello(self, hello: Hello, now: float) -> None:
        """Note that an instance runs. An earlier incarnation of it is dead."""
        if (hello.peer.name, hello.peer.incarnation) in self._buried:
            return  # its death was reported before its `Hello` arrived
        known = self.members.get(hello.peer.name)
        if known is not None and known.hello.peer.incarnation != hello.peer.incarnation:
            self.gone(hello.peer.name, known.hello.peer.incarnation, now)
        peer = msgspec.structs.replace(hello.peer, host=hello.host)
        self.members[hello.peer.name] = Member(msgspec.structs.replace(hello, peer=peer), now)
        self.restarts.back(hello.peer.name)
        self._announce()
        for name, cached in self.roster.learned():
            self._spread(name, cached, [hello.peer.name])
        self._beat_at = now  # requests may wait for this instance

    def failed(self, name: str, incarnation: int, error: ErrorInfo, now: float) -> None:
        """Note that an incarnation ends because of `error`. If it never ran, this was a failed attempt to start the
        instance."""
        if name not in self.members and (name, incarnation) not in self._buried:
            self.restarts.failed(name, error, now)

    def gone(self, name: str, incarnation: int, now: float, for_good: bool = False) -> None:
        """Note that the process of an incarnation is dead, and place its requests elsewhere. `for_good`: nothing starts
        it again."""
        self._buried.add((name, incarnation))
        member = self.members.get(name)
        if member is None or member.hello.peer.incarnation != incarnation:
            return
        del self.members[name]
        self.restarts.gone(name, now, for_good)
        self._orders.pop(name, None)
        self._announce()
        dead = (name, incarnation)
        for live in list(self._live.values()):
            if dead in (live.owner, live.giver):
                self._lose(live, now, by_death=dead != self.rolling.ended)
        self._flush()

    def report(self, report: Report, now: float) -> None:
        member = self.members.get(report.name)
        if member is None or member.hello.peer.incarnation != report.incarnation:
            return
        member.n_reports += 1
        if report.n and report.n != member.n_reports:
            self._kill(report.name, member)
            return
        member.heard_s = now
        member.stats = report.stats or member.stats
        self.roster.loads[report.name] = report.load
        if report.cached is not None:
            self.roster.learn(report.name, report.cached)
            self._spread(report.name, report.cached, self.members)
        self._reroute(report, now)
        for moved in report.moved:
            self._follow((report.name, report.incarnation), moved, now)
        for event in report.events:
            live = self._lives.get(event.request_id)
            if live is not None:
                live.heard |= live.owner == (report.name, report.incarnation)
            if live is not None and event.kind is not EventKind.ARRIVED:  # `submit` has recorded ARRIVED
                self._note(event._replace(request_id=live.request.id))
        for output in report.outputs:
            live = self._lives.get(output.request_id)
            if live is not None:
                self._hear(live, output, report.at_s, now)
        self._flush()

    # ---- time

    def tick(self, now: float) -> float:
        """Check deadlines, silent instances and requests without an instance. Returns the time of the next call."""
        pulse = self._pulse
        if now >= self._beat_at:
            self._excuse(max(0.0, now - self._beat_at - pulse.beat_s), now)
            self._beat_at = now + pulse.beat_s
            self._roll(now)
            self._check_members(now)
            self._check_stages(now)
            self._tell_all(Beat(dict(self.roster.loads), dict(self.roster.cuts)))
            for live in list(self._live.values()):
                self._check(live, now)
            self._flush()
        return self._beat_at

    def orders(self) -> dict[str, list[HubOrder]]:
        """The orders to send, by instance; each is returned once."""
        orders, self._orders = self._orders, {}
        return orders

    @property
    def n_live(self) -> int:
        return len(self._live)

    # ---- inside: requests

    def _check_stages(self, now: float) -> None:
        """End the requests that need a stage that is lost for good."""
        if self.lost is None:
            self.lost = self.restarts.lost(self.roster.dark(), now)
        if self.lost is not None:
            for live in [live for live in self._live.values() if needs(live, self.lost.stage)]:
                self._revoke([live.name])
                self._end(live, now, "error", _lost_error(self.lost.stage))

    def _place(self, live: LiveRequest, now: float) -> bool:
        name = self.roster.choose(live.request, live.request.plan()[0], ())
        if name is None:
            live.owner, live.since = None, now
            return False
        live.owner, live.heard = (name, self.roster.peers[name].incarnation), False
        request = msgspec.structs.replace(live.request, id=live.name)
        self._orders.setdefault(name, []).append(Submit(request, tuple(live.produced)))
        return True

    def _lose(self, live: LiveRequest, now: float, by_death: bool = True) -> None:
        """Begin the next life of a request, with the tokens that the client has got. The present life ends without a
        last output."""
        self._revoke([live.name])  # an instance may still have it
        if live.cancelled:
            self._end(live, now, "abort")
            return
        if by_death:
            live.n_deaths += 1.0 if live.heard else _UNHEARD
        if live.n_deaths >= _MAX_DEATHS:
            error = InternalError(
                f"{live.n_deaths:.0f} instances in a row died while they ran this request", code="lost"
            )
            self._end(live, now, "error", error)
            return
        del self._lives[live.name]
        self.n_recovered += 1
        live.name = f"{live.request.id}~{live.n_lives}"
        live.n_lives += 1
        live.hops, live.giver, live.n_before = 0, None, len(live.produced)
        live.early.clear()
        self._lives[live.name] = live
        self._note(LifecycleEvent(live.request.id, EventKind.RECOVERED, now))
        self._place(live, now)

    def _reroute(self, report: Report, now: float) -> None:
        """Begin the next life of the requests that an instance cannot hand on, if there is a way around it. The others
        wait there for the connection."""
        roster = self.roster
        if report.cut != roster.cuts.get(report.name, ()):
            roster.cuts[report.name] = report.cut
            self._tell_all(Beat(dict(roster.loads), dict(roster.cuts)))
        for name in report.stuck:
            live = self._lives.get(name)
            if live is None or live.owner != (report.name, report.incarnation) or live.n_detours == _MAX_DETOURS:
                continue
            if roster.has_way(live.request):
                live.n_detours += 1
                self._lose(live, now, by_death=False)

    def _follow(self, reporter: Incarnation, moved: Moved, now: float) -> None:
        """Note which instance owns a request now. The reports of giver and taker may come in either order; the one with
        more hops is newer."""
        live = self._lives.get(moved.request_id)
        if live is None or moved.hops < live.hops:
            return
        owner = (moved.owner, moved.incarnation)
        if owner == reporter:
            live.owner, live.giver, live.hops, live.heard = owner, None, moved.hops, True
        elif moved.hops > live.hops:
            live.owner, live.giver, live.hops, live.heard = owner, reporter, moved.hops, False
            live.given_s = now
            if not self.roster.knows(*owner):
                self._lose(live, now)

    def _hear(self, live: LiveRequest, output: Output, at_s: float, now: float) -> None:
        if output.error is not None or output.finish_reason == "abort":
            self._end(live, at_s, output.finish_reason or "error", output=output)
            return
        if output.start > len(live.produced):
            if not live.early:
                live.since = now
            live.early.append(output)
            return
        self._tell(live, output, at_s)
        for early in sorted(live.early, key=lambda o: o.start):
            if early.start <= len(live.produced) and live.request.id in self._live:
                live.early.remove(early)
                self._tell(live, early, at_s)

    def _tell(self, live: LiveRequest, output: Output, at_s: float) -> None:
        """Pass the new part of `output` on to the client."""
        known = len(live.produced) - output.start
        tokens = output.token_ids[known:]
        live.produced += tokens
        if len(live.produced) - live.n_before >= _CLEARED:
            live.n_deaths, live.n_detours = 0.0, 0
        for _ in tokens:
            self._note(LifecycleEvent(live.request.id, EventKind.TOKEN, at_s))
        prompt = () if known else output.prompt_logprobs  # prompt logprobs come with the first token
        fresh = msgspec.structs.replace(
            output, token_ids=tokens, logprobs=output.logprobs[known:], prompt_logprobs=prompt
        )
        if output.finish_reason is not None:
            self._end(live, at_s, output.finish_reason, output=fresh)
        elif tokens:
            self._out.append(msgspec.structs.replace(fresh, request_id=live.request.id))

    def _end(
        self,
        live: LiveRequest,
        at_s: float,
        finish: str,
        error: HydraError | None = None,
        output: Output | None = None,
    ) -> None:
        request_id = live.request.id
        del self._live[request_id], self._lives[live.name]
        output = output or Output("", finish_reason=finish, error=ErrorInfo.of(error) if error else None)
        self._note(LifecycleEvent(request_id, EventKind.FINISHED, at_s, detail=finish))
        self._out.append(msgspec.structs.replace(output, request_id=request_id))

    def _check(self, live: LiveRequest, now: float) -> None:
        if now > live.request.deadline_s + (self._pulse.grace_s if live.owner is not None else 0.0):
            self._revoke([live.name])
            late = DeadlineExceeded("the request's deadline passed before it was done; retry or raise the timeout")
            self._end(live, now, "error", late)
        elif live.owner is None and not self._try_again(live, now):
            stage = live.request.plan()[0].value
            none = Unavailable(f"no instance can {stage} now; retry later", retry_after_s=5.0)
            self._end(live, now, "error", none)
        elif live.giver is not None and now > live.given_s + self._pulse.handover_s:
            self._lose(live, now, by_death=False)  # its taker has dropped it: the pair cannot reach each other
        elif live.early and now > live.since + self._pulse.gap_s:
            self._lose(live, now, by_death=False)

    def _try_again(self, live: LiveRequest, now: float) -> bool:
        """Place a request if an instance can take it. Returns False once the request has waited for `patience_s`."""
        since = live.since
        if self._place(live, now):
            return True
        live.since = since
        return now < since + self._pulse.patience_s

    def _revoke(self, names: list[str]) -> None:
        """Cancel these lives at every instance. Instances remember the names, so a request that is on its way ends
        where it arrives."""
        if names:
            self._tell_all(Cancel(tuple(names)))

    def _note(self, event: LifecycleEvent) -> None:
        try:
            self._record(event)
        except Exception:  # a failure in metrics must not stop serving
            _log.exception("an event could not be recorded")

    def _flush(self) -> None:
        if self._out:
            self._sink(self._out)
            self._out = []

    # ---- inside: instances

    def _excuse(self, late_s: float, now: float) -> None:
        """Do not count `late_s`, by which a beat is late, as silence: the whole machine may have been paused."""
        for member in self.members.values():
            member.heard_s = min(now, member.heard_s + late_s)

    def _check_members(self, now: float) -> None:
        for name, member in self.members.items():
            peer, silent_s = member.hello.peer, now - member.heard_s
            hung_s = member.stats.hung_s if member.stats is not None else 0.0
            if silent_s > self._pulse.dead_s or hung_s > self._stall_s:
                self._kill(name, member)
            suspect = silent_s > self._pulse.suspect_s or name == self.rolling.resting
            if suspect != peer.suspect:
                member.hello = msgspec.structs.replace(
                    member.hello, peer=msgspec.structs.replace(peer, suspect=suspect)
                )
                self._announce()

    def _roll(self, now: float) -> None:
        there = {name: member.hello.peer.incarnation for name, member in self.members.items()}
        idle = {name: member.stats is not None and not has_work(member.stats) for name, member in self.members.items()}
        ended = self.rolling.turn(now, there, idle)
        if ended is not None:
            self._kill(ended[0], self.members[ended[0]])

    def _kill(self, name: str, member: Member) -> None:
        if not member.killed:
            member.killed = True
            self.kills.append((name, member.hello.peer.incarnation))

    def _announce(self) -> None:
        peers: tuple[Peer, ...] = tuple(m.hello.peer for m in self.members.values())
        self.roster.update(peers)
        self._tell_all(Members(peers))

    def _spread(self, name: str, cached: Cached, among: Iterable[str]) -> None:
        """Tell the instances that hand requests to `name` which prefixes it has gained and lost."""
        for other in among:
            if self.roster.hands_to(other, name):
                self._orders.setdefault(other, []).append(Learned(name, cached))

    def _tell_all(self, order: HubOrder) -> None:
        for name in self.members:
            self._orders.setdefault(name, []).append(order)


def _lost_error(stage: Stage) -> Unavailable:
    """The error for requests that need a lost stage. The reason is in the log and in `/health`."""
    return Unavailable(
        f"no instance can {stage.value} any more, and none can be started again: the server ends", code="stage_lost"
    )
