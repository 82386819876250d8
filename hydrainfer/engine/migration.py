"""Both sides of a migration as pure state machines: who owns the request, and who may read its blocks.

Source, per (request, attempt):
    OFFERED ─Admit─> ADMITTED ─Landed─> RELEASED ─Release─> forgotten      the target's from RELEASED on
       └──────┬─────────┘
              ├─Reject, Release─> REJECTED, FAILED: choose again
              └─lease over─> EXPIRED: choose again; its blocks wait in quarantine for the peer's Release or death, or
                             until reads are refused and none is running, if the peer reads over a socket

Target:  OFFERED ─room─> ADMITTED ─copied─> LANDED ─Confirm(held)─> the scheduler's

The source decides, at the first `Landed` of a live offer. Whatever a late or repeated message starts ends in
Confirm(held=False) and is dropped. Each copy has a number, so that messages about an old copy do not count for a new
one. No clock, no sockets, no tensors: calls take the time and return what is to be done.
"""

from __future__ import annotations

import enum
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from hydrainfer.core import (
    Admit,
    Confirm,
    ErrorInfo,
    Handoff,
    Key,
    Landed,
    Message,
    Offer,
    Reject,
    Release,
    Renew,
    Stage,
    Withdraw,
)


class State(enum.StrEnum):
    OFFERED = "offered"
    ADMITTED = "admitted"
    LANDED = "landed"
    RELEASED = "released"
    EXPIRED = "expired"


_LIVE = (State.OFFERED, State.ADMITTED)


class Timing(NamedTuple):
    """`lease_s`: an offer whose target is silent this long has expired. `renew_s`: how often a target renews offers.
    `resend_s`: how long until an unanswered message is sent again. `patience_s`: how long a request waits for a stage
    that no instance runs now, or that no instance in reach runs. `cut_s`: how long a peer without a sign of life for a
    whole lease, or without a connection, gets no offers."""

    lease_s: float = 10.0
    renew_s: float = 2.0
    resend_s: float = 1.0
    patience_s: float = 20.0
    cut_s: float = 10.0


class Send(NamedTuple):
    peer: str
    message: Message


class HandedOver(NamedTuple):
    """The request is the peer's now."""

    request_id: str
    peer: str


class Retry(NamedTuple):
    """The request is still here: choose again, without `peer`. `error`: why it could never run there; `cut`: the peer
    is out of reach."""

    request_id: str
    peer: str
    error: ErrorInfo | None = None
    cut: bool = False


class Free(NamedTuple):
    """Nobody reads the blocks of this hold any more, and they belong to no request: give them back."""

    hold: int


class Land(NamedTuple):
    """The request is ours now: its blocks are written and the scheduler may see it."""

    key: Key


class Drop(NamedTuple):
    """The request will not come, and no copy writes to the blocks reserved for it: give them back."""

    key: Key


Effect = Send | HandedOver | Retry | Free | Land | Drop


@dataclass(slots=True)
class _Outgoing:
    key: Key
    peer: str
    hold: int
    message: Offer
    lease_until: float
    resend_at: float
    state: State = State.OFFERED
    pull: int = 0


class Source:
    """The offers of this instance. A *hold* is one sequence's blocks at this instance; several attempts may read it,
    one after the other, and it is freed when it is closed (the request has moved, ended or starts again) and no peer
    may still read. `end_reads`: see `PeerPuller.end_offer`; called with keys of offers whose handles are named."""

    def __init__(self, timing: Timing, end_reads: Callable[[Key], bool] = lambda _: True) -> None:
        self._timing, self._end_reads = timing, end_reads
        self._offers: dict[Key, _Outgoing] = {}
        self._live: dict[str, Key] = {}  # request id -> its present offer
        self._readers: dict[int, int] = {}  # hold -> attempts whose peer may still read
        self._closed: set[int] = set()
        self._due_at = float("inf")  # no message is resent and no lease ends before

    def offer(self, handoff: Handoff, peer: str, hold: int, now: float) -> list[Effect]:
        assert handoff.request.id not in self._live, f"{handoff.request.id} is offered already"
        message, t = Offer(handoff), self._timing
        self._offers[handoff.key] = _Outgoing(handoff.key, peer, hold, message, now + t.lease_s, now + t.resend_s)
        self._live[handoff.request.id] = handoff.key
        self._due_at = min(self._due_at, now + min(t.lease_s, t.resend_s))
        self._readers[hold] = self._readers.get(hold, 0) + 1
        return [Send(peer, message)]

    def close(self, request_id: str, hold: int, now: float) -> list[Effect]:
        """Note that the request needs `hold` no longer: it ended, or starts again without its blocks."""
        effects: list[Effect] = []
        key = self._live.get(request_id)
        if key is not None:
            effects += self._withdraw(self._offers[key], now)
        self._closed.add(hold)
        return effects + self._free(hold)

    def handle(self, peer: str, message: Message, now: float) -> list[Effect]:
        if isinstance(message, Renew):
            return [e for key in message.keys for e in self._renewed(peer, key, now)]
        assert isinstance(message, Admit | Reject | Landed | Release)
        key, o = message.key, self._offers.get(message.key)
        if o is not None and o.peer != peer:
            o = None
        match message:
            case Admit():
                if o is not None and o.state is State.OFFERED:
                    o.state = State.ADMITTED
                return self._renewed(peer, key, now)
            case Landed(pull=pull):
                return self._landed(o, peer, key, pull, now)
            case Reject(error=error):
                return self._over(o, error) if o is not None and o.state is not State.RELEASED else []
            case Release(pull=pull, cut=cut):
                if o is None or (o.state is State.RELEASED and o.pull != pull):
                    return []
                return self._over(o, None, cut)

    def is_answered(self, peer: str, message: Message) -> bool:
        """Whether the message is an answer to an open offer to that peer."""
        keys = message.keys if isinstance(message, Renew) else (message.key,)
        offers = (self._offers.get(key) for key in keys)
        return any(o is not None and o.peer == peer and o.state in _LIVE for o in offers)

    def tick(self, now: float) -> list[Effect]:
        if now < self._due_at:
            return []
        effects: list[Effect] = []
        for o in list(self._offers.values()):
            if o.state in _LIVE and o.lease_until <= now:
                effects += [*self._withdraw(o, now), Retry(o.key[0], o.peer, cut=True)]
                effects += self._reclaim(o) or ()
            elif o.lease_until <= now and o.state is State.RELEASED:
                self._forget(o)  # the server begins the request again unless the peer has told it that it has it
            elif o.resend_at <= now and o.state is not State.ADMITTED:
                if o.state is State.EXPIRED and o.lease_until <= now and (freed := self._reclaim(o)) is not None:
                    effects += freed
                    continue
                self._resend(o, now)
                effects.append(Send(o.peer, self._last_word(o)))
        self._due_at = min(map(self._next_at, self._offers.values()), default=float("inf"))
        return effects

    @staticmethod
    def _next_at(o: _Outgoing) -> float:
        if o.state is State.EXPIRED:
            return o.resend_at
        return o.lease_until if o.state is State.ADMITTED else min(o.lease_until, o.resend_at)

    def peer_dead(self, peer: str) -> list[Effect]:
        """Note that the peer's process is gone, so that it reads nothing any more."""
        return [e for o in list(self._offers.values()) if o.peer == peer for e in self._over(o, None)]

    def wake_at(self) -> float:
        """A time before which `tick` has nothing to do. Leases may be renewed meanwhile, so it may have nothing to do
        then."""
        return self._due_at

    @property
    def idle(self) -> bool:
        """Whether no offer is open and no block in quarantine."""
        return not self._offers and not self._readers and not self._closed

    def _landed(self, o: _Outgoing | None, peer: str, key: Key, pull: int, now: float) -> list[Effect]:
        if o is not None and o.state in _LIVE:
            o.state, o.pull, o.lease_until = State.RELEASED, pull, now + self._timing.lease_s
            self._resend(o, now)
            del self._live[key[0]]
            self._closed.add(o.hold)
            return [Send(peer, Confirm(key, pull, True)), HandedOver(key[0], peer), *self._reader_gone(o.hold)]
        held = o is not None and o.state is State.RELEASED and o.pull == pull
        return [Send(peer, Confirm(key, pull, held))]

    def _renewed(self, peer: str, key: Key, now: float) -> list[Effect]:
        o = self._offers.get(key)
        if o is not None and o.peer == peer and o.state in _LIVE:
            o.lease_until = now + self._timing.lease_s
            o.resend_at = o.lease_until  # it has arrived: no need to repeat it while it is renewed
            return []
        known = o is not None and o.peer == peer and o.state is State.RELEASED
        return [] if known else [Send(peer, Withdraw(key))]

    def _withdraw(self, o: _Outgoing, now: float) -> list[Effect]:
        o.state = State.EXPIRED
        self._resend(o, now)
        del self._live[o.key[0]]
        return [Send(o.peer, Withdraw(o.key))]

    def _resend(self, o: _Outgoing, now: float) -> None:
        o.resend_at = now + self._timing.resend_s
        if o.state is State.EXPIRED and now < o.lease_until:  # when the blocks may be taken back
            o.resend_at = min(o.resend_at, o.lease_until)
        self._due_at = min(self._due_at, o.resend_at)

    @staticmethod
    def _last_word(o: _Outgoing) -> Message:
        if o.state is State.OFFERED:
            return o.message
        return Confirm(o.key, o.pull, True) if o.state is State.RELEASED else Withdraw(o.key)

    def _reclaim(self, o: _Outgoing) -> list[Effect] | None:
        """Take the blocks of an expired offer back. Returns None if its reads cannot be refused, or one is running."""
        reclaims = _is_named(o.message.handoff) and self._end_reads(o.key)
        return self._over(o, None) if reclaims else None

    def _forget(self, o: _Outgoing) -> None:
        del self._offers[o.key]
        if _is_named(o.message.handoff):
            self._end_reads(o.key)

    def _over(self, o: _Outgoing, error: ErrorInfo | None, cut: bool = False) -> list[Effect]:
        """Note that the peer has no more to do with this attempt."""
        self._forget(o)
        if o.state is State.RELEASED:
            return []
        effects = self._reader_gone(o.hold)
        if o.state in _LIVE:
            del self._live[o.key[0]]
            effects.append(Retry(o.key[0], o.peer, error, cut))
        return effects

    def _reader_gone(self, hold: int) -> list[Effect]:
        self._readers[hold] -= 1
        return self._free(hold)

    def _free(self, hold: int) -> list[Effect]:
        if self._readers.get(hold, 0) or hold not in self._closed:
            return []
        self._readers.pop(hold, None)
        self._closed.remove(hold)
        return [Free(hold)]


def _is_named(handoff: Handoff) -> bool:
    """Whether every read of the offered blocks names the offer, so that it can be refused."""
    return all(handle.offer for handle in handoff.exports.values())


@dataclass(slots=True)
class _Incoming:
    handoff: Handoff
    peer: str
    state: State = State.OFFERED
    pull: int = 0
    withdrawn: bool = False
    resend_at: float = 0.0
    lease_until: float = 0.0  # once it is LANDED


def _order(handoff: Handoff) -> tuple[float, int]:
    return handoff.order


class Target:
    """The offers made to this instance. They wait for room in the order of `rank`, smallest first; by default, by
    age."""

    def __init__(self, timing: Timing, rank: Callable[[Handoff], tuple[float, ...]] = _order) -> None:
        self._timing, self._rank = timing, rank
        self._offers: dict[Key, _Incoming] = {}
        self._waiting: dict[Stage, list[Handoff]] = {}  # those that are OFFERED, best rank first
        self._landed: dict[Key, _Incoming] = {}  # those that are LANDED
        self._n_pulls = 0
        self._renew_at = float("inf")

    def waiting(self) -> list[tuple[Stage, Handoff]]:
        """Offers that wait for room, the best rank first."""
        queues = [[(stage, handoff) for handoff in queue] for stage, queue in self._waiting.items() if queue]
        return queues[0] if len(queues) == 1 else sorted(chain(*queues), key=lambda pair: self._rank(pair[1]))

    def reorder(self) -> None:
        """Sort the offers again, because the ranks have changed."""
        for queue in self._waiting.values():
            queue.sort(key=self._rank)

    @property
    def n_stages_waited_for(self) -> int:
        return sum(bool(queue) for queue in self._waiting.values())

    def handle(self, peer: str, message: Message, now: float) -> list[Effect]:
        assert isinstance(message, Offer | Confirm | Withdraw)
        i = self._offers.get(message.key)
        match message:
            case Offer(handoff=handoff):
                if i is None:
                    self._offers[handoff.key] = _Incoming(handoff, peer)
                    insort(self._waiting.setdefault(handoff.stage, []), handoff, key=self._rank)
                    self._renew_at = min(self._renew_at, now + self._timing.renew_s)
                    return [Send(peer, Renew((handoff.key,)))]
                if i.state is State.LANDED:
                    return [Send(peer, Landed(handoff.key, i.pull))]
                return [Send(peer, Renew((handoff.key,)))]
            case Confirm(key=key, pull=pull, held=held):
                if i is None or i.pull != pull:
                    return [Send(peer, Release(key, pull))]
                if not held:
                    return self._call_off(key, i)
                assert i.state is State.LANDED, f"{key} confirmed before it landed"
                del self._offers[key], self._landed[key]
                return [Land(key), Send(peer, Release(key, pull))]
            case Withdraw(key=key):
                return self._call_off(key, i) if i is not None else [Send(peer, Release(key, 0))]

    def admit(self, key: Key) -> list[Effect]:
        """Note that room for a request is reserved."""
        i = self._offers[key]
        assert i.state is State.OFFERED
        self._waiting[i.handoff.stage].remove(i.handoff)
        self._n_pulls += 1
        i.state, i.pull = State.ADMITTED, self._n_pulls
        return [Send(i.peer, Admit(key))]

    def reject(self, key: Key, error: ErrorInfo | None) -> list[Effect]:
        i = self._offers.pop(key)
        self._waiting[i.handoff.stage].remove(i.handoff)
        return [Send(i.peer, Reject(key, error))]

    def pulled(self, key: Key, ok: bool, now: float, cut: bool = False) -> list[Effect]:
        """Note that a request's copy is complete (`ok`) or has failed. `cut`: for want of a connection."""
        i = self._offers[key]
        if i.withdrawn or not ok:
            del self._offers[key]
            return [Drop(key), Send(i.peer, Release(key, i.pull, cut))]
        i.state, i.resend_at, i.lease_until = State.LANDED, now + self._timing.resend_s, now + self._timing.lease_s
        self._landed[key] = i
        return [Send(i.peer, Landed(key, i.pull))]

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for key, i in list(self._landed.items()) if self._landed else ():
            if i.lease_until <= now:  # the source is out of reach; if it let go, the server begins the request again
                effects += self._call_off(key, i)
            elif i.resend_at <= now:
                i.resend_at = now + self._timing.resend_s
                effects.append(Send(i.peer, Landed(key, i.pull)))
        if self._renew_at <= now:
            known: dict[str, list[Key]] = {}
            for key, i in self._offers.items():
                known.setdefault(i.peer, []).append(key)
            effects += [Send(peer, Renew(tuple(keys))) for peer, keys in known.items()]
            self._renew_at = now + self._timing.renew_s if known else float("inf")
        return effects

    def peer_dead(self, peer: str) -> list[Effect]:
        """Note that the peer's process is gone, so that it will confirm nothing any more."""
        gone = [(key, i) for key, i in self._offers.items() if i.peer == peer]
        return [e for key, i in gone for e in self._call_off(key, i)]

    def wake_at(self) -> float:
        if not self._landed:
            return self._renew_at
        return min([self._renew_at, *(min(i.resend_at, i.lease_until) for i in self._landed.values())])

    def __len__(self) -> int:
        return len(self._offers)

    def _call_off(self, key: Key, i: _Incoming) -> list[Effect]:
        if i.state is State.ADMITTED:
            i.withdrawn = True  # until the copy is terminal
            return []
        del self._offers[key]
        if i.state is State.OFFERED:
            self._waiting[i.handoff.stage].remove(i.handoff)
        dropped = [Drop(key)] if self._landed.pop(key, None) is not None else []
        return [*dropped, Send(i.peer, Release(key, i.pull))]
