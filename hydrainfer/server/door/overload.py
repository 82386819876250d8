"""Overload control: bounds on the seconds of waiting work and on the number of requests.

A request holds a `Place` from its headers to its last token. Its cost is guessed from the headers, estimated better
once its body has been read, and known exactly once it is prepared. It waits in one or two queues, and in an order to
be prepared:

    headers ── enter ──> place ── claim(work) ── line_up ── prepared(work) ── begun, per choice ── leave
                 │ 429    │        │ 429
                          └─ sort(work) ── line_up, in a crowd
                              │ 429
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeGuard

from hydrainfer.core import DeadlineExceeded, InvalidRequest, Overloaded, Share, shutting_down
from hydrainfer.core.request import ANYBODY, MAX_CHOICES, MAX_PRIORITY
from hydrainfer.metrics import QueueStats
from hydrainfer.processor import ChatMessage, Prepared, TextPart
from hydrainfer.scheduler import Policy
from hydrainfer.server.door.held import HeldPlaces
from hydrainfer.server.door.preparation import PreparationOrder, PreparationPlace
from hydrainfer.server.door.queues import Queue
from hydrainfer.server.door.returns import Mark, Returns

TEXT, PICTURES, DECODING = "text", "pictures", "decoding"
"""Kinds of waiting work: prompt tokens of requests without pictures and with pictures, until the first token; bytes of
pictures and videos, until they are decoded. Texts and pictures have separate queues, so a full one does not make the
other refuse."""
_SMALL_BODY = 2048
"""A smaller body, in bytes, is taken for a text: it has no room for a picture, except as a URL."""
_NEWEST = 0.05  # weight of the newest request in the mean
_REQUEST_TOKENS = 64.0  # fixed cost of a request, in tokens: a step costs something even for a tiny prompt
_PICTURE_TOKENS = 576.0  # tokens of a picture, until they are known
_PICTURE_BYTES = 65536.0  # fixed cost of a picture, in bytes; its whole cost if it is still to be fetched
_BYTES_PER_TOKEN = 4.0
_LEAST_AHEAD = {TEXT: 32, PICTURES: 16}
"""The least number of requests that are prepared ahead per instance: a few batches of its language or vision lane."""


class Work(NamedTuple):
    """The cost of `n` choices: `units` (tokens) for each, and `n_bytes` of pictures to decode for all."""

    kind: str
    units: float
    n: int = 1
    n_bytes: float = 0.0

    @classmethod
    def of_prompt(cls, prompt: object, n: int) -> Work:
        """The cost of a text completion. `prompt`: a text, token ids, or a list of either, as the client sent it; `n`:
        choices for each."""
        several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        prompts = prompt if several and isinstance(prompt, list) else [prompt]
        n_tokens = sum(len(p) / _BYTES_PER_TOKEN if isinstance(p, str) else len(p) for p in prompts if _is_text(p))
        return cls(TEXT, _REQUEST_TOKENS + n_tokens / len(prompts), min(n * len(prompts), MAX_CHOICES))

    @classmethod
    def of_chat(cls, messages: Sequence[ChatMessage], n: int) -> Work:
        media = [part.source for m in messages for part in m.media]
        n_characters = sum(len(part.text) for m in messages for part in m.parts if isinstance(part, TextPart))
        n_bytes = sum(_PICTURE_BYTES + (len(s) if isinstance(s, str | bytes) else 0) for s in media)
        n_tokens = n_characters / _BYTES_PER_TOKEN + _PICTURE_TOKENS * len(media)
        return cls(PICTURES if media else TEXT, _REQUEST_TOKENS + n_tokens, n, n_bytes)

    @classmethod
    def of_prepared(cls, prepared: Prepared) -> Work:
        n = len(prepared.requests)
        kind = PICTURES if prepared.pixels else TEXT
        return cls(kind, _REQUEST_TOKENS + prepared.n_prompt_tokens * prepared.sampling.n / n, n)


class Urgency(NamedTuple):
    """The urgency of a request. `priority`: the levels by which it goes before others. `within_s`: the seconds after
    its arrival in which it must be done. `share`: its tenant's share."""

    priority: int = 0
    within_s: float = math.inf
    share: Share = ANYBODY

    @classmethod
    def read(cls, priority: float | None, within_s: float | None) -> Urgency:
        """The urgency that a client asks for; None: not set. Raises `InvalidRequest`."""
        if priority is not None and not (abs(priority) <= MAX_PRIORITY and priority == int(priority)):
            rule = f"priority (or X-Priority) must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
            raise InvalidRequest(rule + _not(priority), param="priority")
        if within_s is not None and not within_s > 0:
            rule = "deadline_s (or X-Deadline-S) must be a number of seconds above 0"
            raise InvalidRequest(rule + _not(within_s), param="deadline_s")
        return cls(int(priority or 0), math.inf if within_s is None else within_s)

    def with_fields(self, priority: float | None, within_s: float | None) -> Urgency:
        """This urgency, which comes from the headers, combined with the body's fields: the body's priority comes first,
        and the shorter time counts. Raises `InvalidRequest`."""
        fields = Urgency.read(priority, within_s)
        chosen = self.priority if priority is None else fields.priority
        return Urgency(chosen, min(self.within_s, fields.within_s), self.share)


_NOT_URGENT = Urgency()


def _not(value: float) -> str:
    return "" if math.isnan(value) else f", not {value:g}"  # a header that is not a number


class OverloadControl:
    """The queues and the places. Used on one thread; every method takes constant time.

    `clock`: in seconds. `longest_s`: the most seconds of waiting work, per kind. `max_requests`: the most choices that
    wait, are prepared, queued or run at once, which bounds their memory. `pictures`: whether the model takes pictures.
    `policy`: the order of requests at the instances; they are prepared in the same order. `n_instances`: the number of
    instances that encode or prefill."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        longest_s: float = 10.0,
        max_requests: int = 4096,
        pictures: bool = True,
        policy: Policy | None = None,
        n_instances: int = 1,
    ) -> None:
        self.clock = clock
        self.max_requests = max_requests
        self.held = HeldPlaces(max_requests)
        self.n_requests = 0
        self.refused: Counter[str] = Counter()  # by kind of work, "requests" or "deadline"
        self.closed = False  # whether requests without a place are refused
        self._pictures = pictures
        self._returns = Returns()
        self.queues = {kind: Queue(longest_s) for kind in (TEXT, PICTURES, DECODING)}
        self.orders = {
            kind: PreparationOrder(self.queues[kind], n * n_instances, policy or Policy())
            for kind, n in _LEAST_AHEAD.items()
        }
        self._mean_units = _REQUEST_TOKENS

    @property
    def n_live(self) -> int:
        """The choices that wait, are prepared, queued or run."""
        return self.held.n

    def check_entry(
        self, n_bytes: int | None = None, *, returning: bool = False, urgency: Urgency = _NOT_URGENT
    ) -> bool:
        """Whether there is room for a text. `n_bytes`: the length of the body, if known; `returning`: the request was
        refused before and comes back at the time it was told. Raises `Overloaded` if no kind of work that the request
        can be has room, `DeadlineExceeded` if the waiting work takes longer than the request may, or `Unavailable`
        while the server shuts down."""
        self._check(1)
        now = self.clock()
        favoured, text_only = returning or urgency.priority > 0, self.is_text(n_bytes)
        checked = self.queues[TEXT].has_room(now, urgency.share, favoured=favoured)
        if text_only:
            self._check_deadline(TEXT, urgency, now)
        if not checked and (text_only or not self.queues[PICTURES].has_room(now, urgency.share, favoured=favoured)):
            raise self._refusal(TEXT, now)
        return checked

    def has_only_reserve(self, n_bytes: int | None, urgency: Urgency) -> bool:
        """Whether the only room left is reserved for returning requests, and this request may be one of them."""
        if not self._returns.n or urgency.priority > 0:
            return False
        now, kinds = self.clock(), (TEXT,) if self.is_text(n_bytes) else (TEXT, PICTURES)
        return not any(self.queues[k].has_room(now, urgency.share, favoured=False) for k in kinds) and any(
            self.queues[k].has_room(now, urgency.share, favoured=True) for k in kinds
        )

    def expect(self, mark: Mark, retry_after_s: float | None) -> None:
        """Note that a request was refused. A part of the queue is kept free for requests that come back at the time
        they were told."""
        if retry_after_s is not None:
            now = self.clock()
            self._returns.expect(mark, now + retry_after_s, now)

    def comes(self, mark: Mark) -> bool:
        """Whether this request was told to come back about now."""
        return self._returns.comes(mark, self.clock())

    def enter(self, n_bytes: int | None = None, *, returning: bool = False, urgency: Urgency = _NOT_URGENT) -> Place:
        """A place for a request of which only the headers are known. Arguments and errors as in `check_entry`."""
        checked = self.check_entry(n_bytes, returning=returning, urgency=urgency)
        place = Place(self, returning, urgency)
        place.checked = checked
        place.wait(TEXT, self._mean_units, 1)  # most requests are texts
        return place

    def crowded(self, n_bytes: int | None) -> bool:
        """Whether the line of a request with a body of `n_bytes` is not empty. The request may be of several kinds."""
        kinds = (TEXT,) if self.is_text(n_bytes) else (TEXT, PICTURES)
        return any(self.orders[kind].n_waiting for kind in kinds)

    def work_of(self, n_bytes: int | None, *, media: bool) -> Work:
        """The likely cost of a request, from the length of its body. `media`: it seems to have pictures or videos."""
        if media and self._pictures:
            return Work(PICTURES, _REQUEST_TOKENS + _PICTURE_TOKENS, 1, _PICTURE_BYTES + (n_bytes or 0))
        return Work(TEXT, _REQUEST_TOKENS + (n_bytes or 0) / _BYTES_PER_TOKEN)

    def sort(self, place: Place, work: Work, urgency: Urgency) -> None:
        """Move a place to the queue of its kind. The request is not refused later. Raises as `check_entry`."""
        self._check(1, place)
        self._check_kinds(place, work.kind, urgency)
        place.sorted = True
        place.count(1)
        place.wait(work.kind, work.units, 1)
        if work.n_bytes:
            place.decode(work.n_bytes)

    def claim(self, place: Place | None, work: Work, urgency: Urgency = _NOT_URGENT) -> Place:
        """A place for a request whose body has been read: `place`, if it has one, with the new estimate. Raises as
        `check_entry` and `Place.on_claim`; `place` is then unchanged. The caller gives the place back with `leave`."""
        self._check(work.n, place)
        self._check_kinds(place, work.kind, urgency)
        place = place or Place(self, False, urgency)
        place.on_claim(work.n)
        place.hold(work.n)
        place.wait(work.kind, work.units, work.n)
        if work.n_bytes:
            place.decode(work.n_bytes)
        self._mean_units += _NEWEST * (work.units - self._mean_units)
        return place

    def take(self) -> Place:
        """A place for a short task, which waits in no queue. Raises `Overloaded` or `Unavailable`."""
        self._check(1)
        place = Place(self, returning=False)
        place.hold(1)
        return place

    def seconds(self) -> Mapping[str, float]:
        """The seconds of waiting work, by kind."""
        now = self.clock()
        return {kind: queue.seconds(now) for kind, queue in self.queues.items()}

    def waiting(self) -> QueueStats:
        """The statistics of waiting requests, for the metrics."""
        return QueueStats(self.seconds(), self.refused, {kind: line.n_waiting for kind, line in self.orders.items()})

    def check(self, idle: bool = False) -> None:
        """Check the counts and, with `idle`, that no place is held. Raises `AssertionError`."""
        waiting = {kind: queue.n_waiting for kind, queue in self.queues.items()}
        assert self.n_live >= 0 and min(waiting.values()) >= 0, "a place was given back twice"
        assert not (idle and (self.n_live or self.n_requests)), f"{self.n_live} places not given back"
        assert not (idle and any(waiting.values())), f"waiting: {waiting}"
        for line in self.orders.values():
            line.check(idle)

    def _check_kinds(self, place: Place | None, kind: str, urgency: Urgency) -> None:
        """Refuse work of a kind that has no room. Raises as `check_entry`."""
        if place is not None and place.sorted:
            return
        checked = place is not None and place.checked
        returning = place is not None and (place.returning or (place.mark is not None and self.comes(place.mark)))
        favoured, now = returning or urgency.priority > 0, self.clock()
        for each in (TEXT,) if kind == TEXT else (DECODING, PICTURES):
            self._check_deadline(each, urgency, now)
            if not (checked and each == TEXT) and not self.queues[each].has_room(now, urgency.share, favoured=favoured):
                error = self._refusal(each, now)
                if place is not None and place.mark is not None:
                    self.expect(place.mark, error.retry_after_s)
                raise error

    def is_text(self, n_bytes: int | None) -> bool:
        """Whether a request with such a body is taken for a text: pictures in it can only be URLs."""
        return not self._pictures or (n_bytes is not None and n_bytes < _SMALL_BODY)

    def _check(self, n: int, place: Place | None = None) -> None:
        """Refuse `n` choices that would exceed `max_requests`. They are added to the others, or replace those of
        `place`. Raises `Unavailable` or `Overloaded`."""
        if self.closed and place is None:
            raise shutting_down()
        n_others = self.n_live - (place.n if place is not None else 0)
        if n_others and n_others + n > self.max_requests:
            self.refused["requests"] += 1
            raise Overloaded(
                f"the server already has {n_others} of at most {self.max_requests} requests; retry later",
                retry_after_s=self.held.promise(n, self.clock()),
            )

    def _check_deadline(self, kind: str, urgency: Urgency, now: float) -> None:
        """Refuse a request that cannot meet its deadline, before it costs anything. Not checked for a priority above 0,
        which may pass waiting requests, and while the queue is not crowded, since its rate is then unknown. Raises
        `DeadlineExceeded`."""
        queue = self.queues[kind]
        if urgency.priority <= 0 and queue.crowded and queue.seconds(now) > urgency.within_s:
            self.refused["deadline"] += 1
            raise DeadlineExceeded(f"{queue.seconds(now):.1f} s of work ({kind}) wait already, longer than deadline_s")

    def _refusal(self, kind: str, now: float) -> Overloaded:
        self.refused[kind] += 1
        queue = self.queues[kind]
        return Overloaded(
            f"{queue.seconds(now):.1f} s of work ({kind}) wait already; retry when Retry-After says",
            retry_after_s=queue.promise(now),
        )


class Place:
    """Room for the `n` choices of a request, from when its body is known (`claimed`) until the engine has ended the
    last one. Before that, the permission to send the body. `checked`: there was room for a text. `sorted`: it is in the
    queue of its kind and cannot be refused any more. `urgency`: as in the headers."""

    def __init__(self, overload: OverloadControl, returning: bool, urgency: Urgency = _NOT_URGENT) -> None:
        self.returning, self.urgency = returning, urgency
        self.arrived_s = overload.clock()
        self.checked = self.claimed = self.sorted = False
        self.mark: Mark | None = None
        self.on_tokens: Callable[[int], None] = lambda _: None  # called with numbers of tokens once they are known
        self.on_claim: Callable[[int], None] = lambda _: None  # called with the choices; may raise `HydraError`
        self.on_leave: Callable[[], None] = lambda: None
        self.n = 0
        self._held_s = 0.0  # since when it holds room for choices
        self._answered = False
        self._overload = overload
        self._kind, self._units, self._n_waiting = TEXT, 0.0, 0
        self._n_bytes = 0.0
        self._turn: PreparationPlace | None = None
        self._line = overload.orders[TEXT]

    def hold(self, n: int) -> None:
        """Claim the place for `n` choices."""
        self.claimed = True
        self.count(n)

    def count(self, n: int) -> None:
        """Set the number of choices, whether the place is claimed or not."""
        if not self.n:
            self._held_s = self._overload.clock()
        self._overload.n_requests += bool(n) - bool(self.n)
        self._overload.held.change(n - self.n, self._held_s)
        self.n = n

    def wait(self, kind: str, units: float, n: int) -> None:
        """Wait in the queue of `kind` with `n` choices of `units` each. Replaces what waited before."""
        self.stop_waiting()
        self._n_waiting = n
        self._kind, self._units = kind, units
        now = self._overload.clock()
        for _ in range(n):
            self._queue.enter(units, now, self.urgency.share)

    def stop_waiting(self) -> None:
        """Leave the queue."""
        for _ in range(self._n_waiting):
            self._queue.leave(self._units, self._overload.clock(), self.urgency.share, done=False)
        self._n_waiting = 0

    def decode(self, n_bytes: float) -> None:
        """Also wait for `n_bytes` of pictures to be decoded."""
        self._stop_decoding(done=False)
        self._n_bytes = n_bytes
        self._overload.queues[DECODING].enter(n_bytes, self._overload.clock(), self.urgency.share)

    def line_up(self, priority: int, go: Callable[[], None]) -> None:
        """Wait to be prepared. `go` is called when it is this request's turn, perhaps at once. The place must be
        claimed or sorted. A second call does not wait again."""
        units = self._units * self._n_waiting
        if self._turn is not None:
            self._turn.units = units
            go()
            return
        self._line = self._overload.orders[self._kind]
        self._turn = self._line.join(self.urgency.share, self.arrived_s, units, priority, go)

    def prepared(self, work: Work) -> None:
        """Note that the pictures are decoded and the work is known exactly."""
        self._stop_decoding(done=True)
        self._queue.correct((work.units - self._units) * self._n_waiting, self.urgency.share)
        self._units = work.units
        if self._turn is not None:
            self._turn.units = work.units * self._n_waiting

    def begun(self) -> None:
        """Note that one more choice has its first token."""
        self._answered = True
        if self._n_waiting:
            self._n_waiting -= 1
            self._queue.leave(self._units, self._overload.clock(), self.urgency.share, done=True)
            if not self._n_waiting:
                self._leave_line()

    def leave(self) -> None:
        """Give the place back. Safe to repeat."""
        self._stop_decoding(done=False)
        self.stop_waiting()
        self._leave_line()
        if self._answered and self.n:
            self._overload.held.served(self._overload.clock() - self._held_s)
        self.count(0)
        self.on_claim = lambda _: None  # it may refer to this place: requests leave no cycles
        on_leave, self.on_leave = self.on_leave, lambda: None
        on_leave()

    @property
    def _queue(self) -> Queue:
        return self._overload.queues[self._kind]

    def _leave_line(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._line.leave(turn)

    def _stop_decoding(self, *, done: bool) -> None:
        if self._n_bytes:
            self._overload.queues[DECODING].leave(self._n_bytes, self._overload.clock(), self.urgency.share, done=done)
        self._n_bytes = 0.0


def _is_text(prompt: object) -> TypeGuard[str | list[int]]:
    return isinstance(prompt, str | list)
