"""The live requests of the server: where each one runs, the tokens it has so far, and its recovery when they are lost.

    submit ─> placed at an instance ─moves─> another … ─> its end is sent to the client, once
                        │ the instance dies, or a token is missing
                        └─> the next life: a new name at the instances, prompt + tokens sent so far, placed again

The name of a life is unique, so messages that are left of an earlier life cannot be taken for those of a later one. A
client never gets a token twice. Pure: no sockets, no clock. Messages to instances are posted to their links; outputs
for clients go to `sink`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from hydrainfer.cluster.instance import Pulse
from hydrainfer.cluster.link import Links
from hydrainfer.cluster.messages import Beat, Cancel, Learned, Moved, Peer, Report, Submit
from hydrainfer.cluster.placing import Placer
from hydrainfer.cluster.rolling import Incarnation
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


@dataclass(slots=True)
class LiveRequest:
    """A request that has not ended. `name`: the name of its present life. `owner`: the instance that has it; None while
    no instance can take it. `giver`: the instance that handed it to `owner` at `given_s`, until `owner` has confirmed
    that it arrived. `heard`: whether `owner` has reported it. `hops`: its moves in this life."""

    request: Request
    name: str
    n_lives: int = 1
    n_deaths: float = 0.0  # weighted deaths of its instances in a row, without progress between them
    n_detours: int = 0  # the same of lives begun because of cut pairs
    n_before: int = 0  # tokens it had when its present life began
    produced: list[int] = field(default_factory=list)
    owner: Incarnation | None = None
    giver: Incarnation | None = None
    given_s: float = 0.0
    heard: bool = False
    hops: int = 0
    early: list[tuple[Output, str]] = field(default_factory=list)  # came before one that precedes them; and from whom
    since: float = 0.0  # when it lost its owner, or when the first `early` came
    cancelled: bool = False

    @property
    def where(self) -> str:
        """The name of the instance that has it, empty if none has."""
        return "" if self.owner is None else self.owner[0]

    def needs(self, stage: Stage) -> bool:
        """Whether the request cannot finish unless some instance runs `stage`. A request that is at an instance without
        that stage is past encode; once it has produced a token, it is past prefill."""
        if stage not in self.request.plan():
            return False
        return self.owner is None or stage is Stage.DECODE or (stage is Stage.PREFILL and not self.produced)


class Lives:
    """The live requests. `links`: those to the instances that run. `record` gets the lifecycle events of all instances,
    with the requests' own ids. `n_recovered`: lives that began because an earlier one was lost."""

    def __init__(
        self,
        placer: Placer,
        links: Links,
        sink: OutputSink,
        record: Callable[[LifecycleEvent], None],
        pulse: Pulse,
    ) -> None:
        self.roster = placer.roster
        self.n_recovered = 0
        self._placer = placer
        self._links = links
        self._sink = sink
        self._record = record
        self._pulse = pulse
        self._live: dict[str, LiveRequest] = {}  # by the request's id
        self._lives: dict[str, LiveRequest] = {}  # by the name of its present life
        self._lost: Stage | None = None
        self._out: list[Output] = []

    # ---- clients

    def submit(self, request: Request, now: float) -> None:
        """Place a new request. If no instance runs its first stage now, the request waits for one, like a request whose
        instance has died. Raises `Unavailable` if a stage is lost for good."""
        if self._lost is not None:
            raise _lost_error(self._lost)
        live = LiveRequest(request, request.id)
        self._place(live, now)
        self._live[request.id] = self._lives[request.id] = live
        arrived_s = now if request.arrival_s is None else request.arrival_s
        self._note(LifecycleEvent(request.id, EventKind.ARRIVED, arrived_s, n=request.n_prompt, instance=live.where))

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

    def meet(self, peers: tuple[Peer, ...], restarted: Incarnation | None, now: float) -> None:
        """Note who lives now, and place the requests of the dead elsewhere. `restarted`: an incarnation that was ended
        on purpose."""
        told = self.roster.listeners()
        dead = {(peer.name, peer.incarnation) for peer in self.roster.update(peers)}
        new = self.roster.listeners() - told
        for name, cached in self.roster.locator.learned() if new else ():
            self._spread(name, cached, new)
        for live in list(self._live.values()) if dead else ():
            ended = dead & {live.owner, live.giver}
            if ended:
                self._lose(live, now, by_death=restarted not in ended)
        self._flush()

    def report(self, report: Report, now: float) -> None:
        """Follow what an instance has done, and pass its outputs on."""
        self.roster.hear(report.name, report.load)
        if report.cached is not None:
            self.roster.locator.learn(report.name, report.cached)
            self._spread(report.name, report.cached, self.roster.listeners())
        self._reroute(report, now)
        reporter = (report.name, report.incarnation)
        for moved in report.moved:
            self._follow(reporter, moved, now)
        for event in report.events:
            live = self._lives.get(event.request_id)
            if live is not None:
                live.heard |= live.owner == reporter
            if live is not None and event.kind is not EventKind.ARRIVED:  # `submit` has recorded ARRIVED
                self._note(event._replace(request_id=live.request.id, instance=report.name))
        for output in report.outputs:
            live = self._lives.get(output.request_id)
            if live is not None:
                self._hear(live, output, report, now)
        self._flush()

    # ---- time

    def beat(self, lost: Stage | None, now: float) -> None:
        """Tell the instances about each other's loads, and check deadlines and requests without an instance. `lost`: a
        stage that no instance will run again; requests that need it end."""
        self._lost = lost
        if lost is not None:
            for live in [live for live in self._live.values() if live.needs(lost)]:
                self._revoke([live.name])
                self._end(live, now, "error", _lost_error(lost))
        self._post_loads()
        for live in list(self._live.values()):
            self._check(live, now)
        self._flush()

    @property
    def n_live(self) -> int:
        return len(self._live)

    # ---- inside

    def _place(self, live: LiveRequest, now: float) -> bool:
        name = self._placer.choose(live.request, live.request.plan()[0], ())
        if name is None:
            live.owner, live.since = None, now
            return False
        live.owner, live.heard = (name, self.roster.peers[name].incarnation), False
        request = msgspec.structs.replace(live.request, id=live.name)
        self._links[name].post(Submit(request, tuple(live.produced)))
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
            self._post_loads()
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

    def _hear(self, live: LiveRequest, output: Output, report: Report, now: float) -> None:
        at_s = report.at_s
        if output.error is not None or output.finish_reason == "abort":
            self._end(live, at_s, output.finish_reason or "error", output=output)
            return
        if output.start > len(live.produced):
            if not live.early:
                live.since = now
            live.early.append((output, report.name))
            return
        self._tell(live, output, at_s, report.name)
        for early, instance in sorted(live.early, key=lambda one: one[0].start):
            if early.start <= len(live.produced) and live.request.id in self._live:
                live.early.remove((early, instance))
                self._tell(live, early, at_s, instance)

    def _tell(self, live: LiveRequest, output: Output, at_s: float, instance: str) -> None:
        """Pass the new part of an instance's `output` on to the client."""
        known = len(live.produced) - output.start
        tokens = output.token_ids[known:]
        live.produced += tokens
        if len(live.produced) - live.n_before >= _CLEARED:
            live.n_deaths, live.n_detours = 0.0, 0
        for _ in tokens:
            self._note(LifecycleEvent(live.request.id, EventKind.TOKEN, at_s, instance=instance))
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
        self._note(LifecycleEvent(request_id, EventKind.FINISHED, at_s, detail=finish, instance=live.where))
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
        for link in self._links.values() if names else ():
            link.post(Cancel(tuple(names)))

    def _note(self, event: LifecycleEvent) -> None:
        try:
            self._record(event)
        except Exception:  # a failure in metrics must not stop serving
            _log.exception("an event could not be recorded")

    def _flush(self) -> None:
        if self._out:
            self._sink(self._out)
            self._out = []

    def _spread(self, name: str, cached: Cached, listeners: Iterable[Incarnation]) -> None:
        """Tell instances that may hand requests to `name` which prefixes it has gained and lost."""
        if not self.roster.roles[name].runs(Stage.PREFILL):
            return
        for other, _ in listeners:
            self._links[other].post(Learned(name, cached))

    def _post_loads(self) -> None:
        beat = Beat(dict(self.roster.loads), dict(self.roster.cuts))
        for link in self._links.values():
            link.post(beat)


def _lost_error(stage: Stage) -> Unavailable:
    """The error for requests that need a lost stage. The reason is in the log and in `/health`."""
    return Unavailable(
        f"no instance can {stage.value} any more, and none can be started again: the server ends", code="stage_lost"
    )
