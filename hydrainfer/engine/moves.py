"""Moves requests between this engine and its peers: the migration machines, tied to scheduler, placement and copies.

scheduler.migrating ─> placement ─> Source ─HandedOver─> forgotten here
peer's offer ─> Target ─room─> copy ─Confirm─> scheduler.land
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from hydrainfer.cache import Lease, Pulls
from hydrainfer.core import (
    Admit,
    ErrorInfo,
    Handoff,
    HydraError,
    InvalidRequest,
    Key,
    Landed,
    LiveSequence,
    Load,
    Message,
    Parcel,
    Reject,
    Release,
    Renew,
    Stage,
    Unavailable,
    Withdraw,
    owner_of,
)
from hydrainfer.engine.migration import Drop, Effect, Free, HandedOver, Land, Retry, Send, Source, Target, Timing
from hydrainfer.engine.ports import CopyTicket, PeerLink, PeerPuller, Placement
from hydrainfer.scheduler import Scheduler

_ASK_AGAIN_S = 0.05  # when no instance of a stage takes a request
_CANCELS_KEPT = 16384
_NEVER = float("inf")
_TO_SOURCE = (Admit, Reject, Landed, Release, Renew)


class Left(NamedTuple):
    """A peer owns the request now, after `hops` moves."""

    request_id: str
    peer: str
    hops: int


class Pulled(NamedTuple):
    """The KV of `n_tokens` tokens was copied to this instance in `seconds`."""

    n_tokens: int
    seconds: float


class Arrived(NamedTuple):
    """The request is ours. `cancelled`: it was cancelled while it was on its way."""

    seq: LiveSequence
    cancelled: bool


class Returned(NamedTuple):
    """The request starts again here, because the instance that was to take its kept KV had no room."""

    seq: LiveSequence


class Stranded(NamedTuple):
    """The request is here and no instance can take it."""

    request_id: str
    error: HydraError


Move = Left | Arrived | Pulled | Returned | Stranded


@dataclass(slots=True)
class _Departure:
    seq: LiveSequence
    hold: int
    give_up_at: float
    try_at: float  # while no offer is open
    offered: bool = False
    exclude: set[str] = field(default_factory=set)
    error: ErrorInfo | None = None
    recalled: bool = False  # its KV was kept here, and may be computed again instead
    n_cut: int = 0  # the peers in a row that were out of reach
    stuck: bool = False  # all peers of its stage are out of reach


class Moves:
    """The requests that move between one engine and its peers; used on the engine's thread only. `name` and
    `incarnation` are those of this instance."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        scheduler: Scheduler,
        placement: Placement,
        link: PeerLink,
        puller: PeerPuller,
        timing: Timing | None = None,
    ) -> None:
        timing = timing or Timing()
        self.name, self.incarnation = name, incarnation
        self._timing = timing
        self._scheduler, self._placement, self._link, self._puller = scheduler, placement, link, puller
        self.source = Source(timing, lambda key: puller.end_offer(_offer_name(key)))
        self._target = Target(timing, scheduler.rank_of)
        self._cut: dict[str, float] = {}  # peers that did not answer the last offer -> until when they get no other
        self._inbox: list[Parcel] = []
        self._dead: set[tuple[str, int]] = set()  # (peer, incarnation); their messages are ignored
        self._outbox: dict[str, list[Message]] = {}
        self._out: dict[str, _Departure] = {}
        self._unplaced: dict[str, _Departure] = {}  # departures without an open offer
        self._holds: dict[int, Lease | None] = {}
        self._n_holds = 0
        self._copies: dict[Key, CopyTicket] = {}
        self._copied: dict[Key, tuple[str, float, int]] = {}  # by copy: its source, when it began, its tokens of KV
        self._copies_at = _NEVER  # when the first may be done; -infinity if one does not know
        self._being_pulled: dict[bytes, Key] = {}  # shared content -> the arrival that brings it
        self._cancelled: dict[str, None] = {}  # the latest ids that were cancelled while they were not here
        self._moves: list[Move] = []
        self.blocks_pulled: Counter[str] = Counter()
        self.n_landed = 0

    # ---- called by the engine

    def deliver(self, parcel: Parcel) -> None:
        self._inbox.append(parcel)

    def turn(self, now: float) -> list[Move]:
        """Read messages, poll copies, admit offers that find room, and offer departing requests to peers."""
        parcels, self._inbox = self._inbox, []
        for parcel in parcels:
            if (parcel.sender, parcel.incarnation) in self._dead:
                continue
            self._scheduler.parking.hear(parcel.load)
            for message in parcel.messages:
                self._handle(parcel.sender, message, now)
        if self._copies and now >= self._copies_at:
            self._poll(now)
        self._do(self.source.tick(now), now)
        self._do(self._target.tick(now), now)
        self._admit(now)
        self.place(now)
        moves, self._moves = self._moves, []
        return moves

    def _poll(self, now: float) -> None:
        for key, copy in list(self._copies.items()):
            done = copy.poll(now)
            if done is not None:
                del self._copies[key]
                peer, began_s, n_tokens = self._copied.pop(key)
                if done and n_tokens:
                    self._moves.append(Pulled(n_tokens, now - began_s))
                if copy.cut:
                    self._cut[peer] = now + self._timing.cut_s
                self._do(self._target.pulled(key, done, now, copy.cut), now)
        self._copies_at = min(map(_done_at, self._copies.values()), default=_NEVER)

    def depart(self, seq: LiveSequence, now: float) -> None:
        """Take over a sequence whose next stage runs elsewhere; `place` offers it."""
        self._n_holds += 1
        self._holds[self._n_holds] = self._scheduler.room.detach(seq, f"{seq.id}/{self._n_holds}")
        recalled = seq.stage is Stage.PREFILL and seq.n_computed > 0
        departure = _Departure(seq, self._n_holds, now + self._timing.patience_s, now, recalled=recalled)
        self._out[seq.id] = self._unplaced[seq.id] = departure

    def place(self, now: float) -> None:
        """Offer each departing request that is due to an instance that runs its stage."""
        for departure in list(self._unplaced.values()) if self._unplaced else ():
            if departure.try_at <= now:
                self._place(departure, now)

    @property
    def to_post(self) -> bool:
        return bool(self._outbox)

    def post(self, load: Load) -> None:
        """Send all messages, one parcel per peer. Called after the step's outputs were handed out."""
        for peer, messages in self._outbox.items():
            self._link.send(peer, Parcel(self.name, self.incarnation, tuple(messages), load))
        self._outbox.clear()

    def cut(self, now: float) -> tuple[str, ...]:
        """The peers that are out of reach. The next offer may find out that one is not, but other instances should
        avoid the pair until then, or for a lease if there is no such offer."""
        return tuple(peer for peer, until in self._cut.items() if now < until + self._timing.lease_s)

    def stuck(self) -> tuple[str, ...]:
        """The requests that should begin elsewhere, if they can, because peers of their stage are out of reach."""
        return tuple(name for name, d in self._out.items() if d.stuck or d.n_cut > 1) if self._cut else ()

    def close(self, request_id: str, now: float) -> None:
        """Note that the request ends here: its offer is withdrawn, and its blocks come back when nobody reads them."""
        departure = self._out.pop(request_id, None)
        self._unplaced.pop(request_id, None)
        if departure is not None:
            self._do(self.source.close(request_id, departure.hold, now), now)

    def reorder(self) -> None:
        """Sort the offers again, because the scheduler's ranks have changed."""
        self._target.reorder()

    def cancel_arrival(self, request_id: str) -> None:
        """End a request as soon as it arrives, if it ever does. It may be on its way, and the cancellation is not
        repeated."""
        self._cancelled[request_id] = None
        if len(self._cancelled) > _CANCELS_KEPT:
            del self._cancelled[next(iter(self._cancelled))]

    def peer_dead(self, peer: str, incarnation: int, now: float) -> None:
        """Note that the peer's process is gone."""
        self._dead.add((peer, incarnation))
        self._mend(peer)
        for _, handoff in self._target.waiting():
            if handoff.source == peer:
                self._scheduler.forget_blocked(handoff.request.id)
        self._puller.forget(owner_of(peer, incarnation))
        self._do(self.source.peer_dead(peer), now)
        self._do(self._target.peer_dead(peer), now)

    def wake_at(self) -> float:
        wake_at = min(self.source.wake_at(), self._target.wake_at())
        if self._copies_at < wake_at:
            ready = (t for c in self._copies.values() if (t := c.ready_at()) is not None)
            wake_at = min(wake_at, self._copies_at if self._copies_at > -_NEVER else min(ready, default=_NEVER))
        for departure in self._unplaced.values():
            wake_at = min(wake_at, departure.try_at)
        return wake_at

    @property
    def copying(self) -> bool:
        return bool(self._copies)

    @property
    def idle(self) -> bool:
        return not (self._out or self._copies or self._holds or len(self._target) or self._inbox or self._moves)

    @property
    def n_arriving(self) -> int:
        return len(self._target)

    def shut(self) -> None:
        self._puller.close()

    # ---- inside

    def _handle(self, peer: str, message: Message, now: float) -> None:
        if isinstance(message, _TO_SOURCE):
            if peer in self._cut and self.source.is_answered(peer, message):
                self._mend(peer)
            self._do(self.source.handle(peer, message, now), now)
            return
        if isinstance(message, Withdraw):
            self._scheduler.forget_blocked(message.key[0])
        self._do(self._target.handle(peer, message, now), now)

    def _do(self, effects: Iterable[Effect], now: float) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self._outbox.setdefault(peer, []).append(message)
                case HandedOver(request_id, peer):
                    seq = self._out.pop(request_id).seq
                    self._scheduler.cancel(request_id)  # forgets it; its blocks are not its own any more
                    self._moves.append(Left(request_id, peer, seq.hops + 1))
                case Retry(request_id, peer, error, cut):
                    if cut:
                        self._cut[peer] = now + self._timing.cut_s
                    departure = self._out.get(request_id)
                    if departure is not None:
                        self._retry(departure, peer, error, cut, now)
                case Free(hold):
                    lease = self._holds.pop(hold)
                    if lease is not None:
                        self._scheduler.room.caches.release(lease)
                case Land(key):
                    self._forget_pull(key)
                    self.n_landed += 1
                    cancelled = key[0] in self._cancelled
                    self._moves.append(Arrived(self._scheduler.land(key[0], now), cancelled))
                case Drop(key):
                    self._forget_pull(key)
                    self._scheduler.drop_arrival(key[0])

    def _mend(self, peer: str) -> None:
        """Note that the peer answers again, or is another one."""
        if self._cut.pop(peer, None) is not None:
            for departure in self._out.values():
                departure.n_cut = 0

    def _retry(self, d: _Departure, peer: str, error: ErrorInfo | None, cut: bool, now: float) -> None:
        """Prepare to offer a request to another peer. Its patience begins anew if `peer` has refused it, and only once
        if peers are out of reach one after the other."""
        if not cut:
            d.exclude.add(peer)
        if d.recalled and self._forsake(d, error, now):
            return
        d.error, d.try_at = error or d.error, now
        if not (cut and d.n_cut):
            d.give_up_at = now + self._timing.patience_s
        d.n_cut = d.n_cut + 1 if cut else 0
        self._unplaced[d.seq.id] = d

    def _place(self, d: _Departure, now: float) -> None:
        seq, cut, peer = d.seq, [peer for peer, until in self._cut.items() if now < until], None
        if not d.n_cut or now < d.give_up_at:
            peer = self._placement.choose(seq.request, seq.stage, {self.name, *d.exclude, *cut})
        d.stuck = peer is None and bool(cut) and not d.exclude
        if peer is not None:
            del self._unplaced[seq.id]
            abroad = self._link.is_abroad(peer)
            blocks = self._scheduler.offered(seq, again=d.offered, abroad=abroad)
            d.offered = True
            if peer in self._cut:  # this offer alone finds out whether the peer answers again
                self._cut[peer] = now + self._timing.lease_s + self._timing.resend_s
            exports = self._puller.offer(_offer_name((seq.id, seq.attempt)), self._link.host_of(peer))
            handoff = Handoff.of(seq, blocks, self.name, self.incarnation, exports, abroad)
            self._do(self.source.offer(handoff, peer, d.hold, now), now)
        elif d.error is not None:
            self._strand(d, d.error.exception())
        elif d.exclude:  # all have refused, but they may accept later
            d.exclude.clear()
            d.try_at, d.give_up_at = now + _ASK_AGAIN_S, now + self._timing.patience_s
        elif now >= d.give_up_at:
            self._strand(d, Unavailable(f"no instance can {seq.stage.value} now; retry later", retry_after_s=5.0))
        else:
            d.try_at = now + _ASK_AGAIN_S

    def _forsake(self, d: _Departure, error: ErrorInfo | None, now: float) -> bool:
        """Let a refused request go on without the KV that was kept for it here. The peer had no room at once, and a
        request that waits for that peer could keep others from leaving it. Returns whether the request stays, to encode
        its pictures here."""
        self._do(self.source.close(d.seq.id, d.hold, now), now)
        if self._scheduler.take_back(d.seq, now):
            del self._out[d.seq.id]
            self._moves.append(Returned(d.seq))
            return True
        self._n_holds += 1
        self._holds[self._n_holds] = None
        d.hold, d.recalled = self._n_holds, False
        if error is None:
            d.exclude.clear()
        return False

    def _strand(self, d: _Departure, error: HydraError) -> None:
        del self._unplaced[d.seq.id]
        self._moves.append(Stranded(d.seq.id, error))

    def _admit(self, now: float) -> None:
        """Reserve room for offers, best rank first. An offer waits if another arrival is bringing the same content;
        later offers of that content do not pass it (as in `Admission.to_encode`). An offer also waits if another
        request is computing the same content. An offer with the kept beginning of a prompt is refused if there is no
        room: it would keep room at its source while it waits."""
        waiting = self._target.waiting()
        offers = self._scheduler.fair.offers(waiting)
        if not waiting:
            return
        full: set[Stage] = set()  # stages whose best offer found no room
        n_stages = self._target.n_stages_waited_for
        wanted: set[bytes] = set()
        for stage, handoff in offers:
            recalled = stage is Stage.PREFILL and handoff.n_computed > 0
            if stage in full or len(full) == n_stages:
                if recalled:
                    self._refuse(handoff, None, now)
                continue
            brought = self._scheduler.room.finder.brought(handoff)
            if brought & self._being_pulled.keys() or brought & wanted:
                wanted |= brought
                continue
            if self._scheduler.repeats(handoff, now):
                continue
            try:
                pulls = self._scheduler.expect(handoff, now)
            except InvalidRequest as e:
                self._refuse(handoff, ErrorInfo.of(e), now)
                continue
            if pulls is None:
                if recalled:
                    self._refuse(handoff, None, now)
                else:
                    full.add(stage)
                continue
            self._begin(handoff, pulls, brought, now)

    def _refuse(self, handoff: Handoff, error: ErrorInfo | None, now: float) -> None:
        self._do(self._target.reject(handoff.key, error), now)
        self._scheduler.forget_blocked(handoff.request.id)

    def _begin(self, handoff: Handoff, pulls: Pulls, brought: set[bytes], now: float) -> None:
        key = handoff.key
        self._do(self._target.admit(key), now)
        if not pulls:
            self._do(self._target.pulled(key, True, now), now)
            return
        self._being_pulled.update(dict.fromkeys(brought, key))
        for spec, (_, into) in pulls.blocks.items():
            self.blocks_pulled[spec] += len(into)
        copy = self._copies[key] = self._puller.pull({spec: handoff.exports[spec] for spec in pulls.blocks}, pulls)
        self._copied[key] = handoff.source, now, self._scheduler.room.tokens_of(pulls)
        self._copies_at = min(self._copies_at, _done_at(copy))

    def _forget_pull(self, key: Key) -> None:
        for brought in [b for b, by in self._being_pulled.items() if by == key]:
            del self._being_pulled[brought]


def _offer_name(key: Key) -> str:
    """The name under which a peer reads the blocks of an offer."""
    return f"{key[0]}/{key[1]}"


def _done_at(copy: CopyTicket) -> float:
    at = copy.ready_at()
    return -_NEVER if at is None else at


__all__ = ["Arrived", "Left", "Move", "Moves", "Pulled", "Returned", "Stranded"]
