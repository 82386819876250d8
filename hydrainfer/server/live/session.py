"""Sessions: the table of live requests, which turns engine outputs into text per choice. The engine's thread feeds it.

    start ──submit──> engine ──sink, one call_soon_threadsafe per step──> dispatch ──> TokenStream ──> consumer
                         ^                                                   │ stop string, error
                         └────────────── cancel ─────────────────────────────┴──< consumer goes away, deadline

A request leaves the table, and releases its pictures, when the engine has ended its last choice. It does not do so
earlier, because a lost encode may be repeated until then.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from hydrainfer.core import HydraError, InternalError, InvalidRequest, Output, shutting_down
from hydrainfer.engine.ports import EngineHandle
from hydrainfer.metrics import Timeline
from hydrainfer.processor import PixelStore, Prepared, Vocabulary
from hydrainfer.server.door import OverloadControl, Place, Work
from hydrainfer.server.live.stream import TokenStream

logger = logging.getLogger("hydrainfer.server.session")

Timings = Callable[[str], Timeline | None]
DEADLINE_GRACE_S = 2.0
"""How long after a deadline the session waits for the engine to end the request, before it ends the request itself."""
_ENDS_AT_ONCE = 4
"""Ended requests that are handled per turn of the event loop. Requests that began together end together, and each
answer takes a millisecond to write, so other events get their turn in between."""


class Sessions:
    """The owner of every live API request. All methods but `sink` and `discard` run on one event loop, the one that
    calls `start`. `clock` is the engine's, in seconds. `overload`: default: one with its defaults."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        pixels: PixelStore,
        clock: Callable[[], float],
        overload: OverloadControl | None = None,
    ) -> None:
        self.clock = clock
        self.overload = overload or OverloadControl(clock)
        self._vocabulary = vocabulary
        self._pixels = pixels
        self._handle: EngineHandle | None = None
        self._timings: Timings = lambda _: None
        self._doing: Callable[[str], str] = lambda _: ""
        self._stopped: Callable[[str], None] = lambda _: None
        self.on_ended: Callable[[TokenStream], None] = lambda _: None  # called once all choices have ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: deque[list[Output]] = deque()  # filled by the engine's thread, emptied by the loop's
        self._goes_on = False  # a callback for the rest of the inbox is scheduled
        self._streams: dict[str, TokenStream] = {}  # by engine request id
        self._closing = False

    @property
    def handle(self) -> EngineHandle:
        assert self._handle is not None, "Sessions.attach was not called"
        return self._handle

    @property
    def n_live(self) -> int:
        """The number of choices that hold a place: being prepared, queued or running."""
        return self.overload.n_live

    def attach(
        self,
        handle: EngineHandle,
        timings: Timings = lambda _: None,
        stopped: Callable[[str], None] = lambda _: None,
        doing: Callable[[str], str] = lambda _: "",
    ) -> None:
        """Set the engine whose outputs come to `sink`. Called once, before the first `start`. `timings` returns the
        timeline of an engine request after its final output; `stopped` is called with the id of one that a stop string
        has ended; `doing` returns the interval that a live one is in."""
        self._handle, self._timings, self._stopped, self._doing = handle, timings, stopped, doing

    def sink(self, outputs: list[Output]) -> None:
        """The engine's `OutputSink`: called on its thread once per step; passes the outputs on and returns."""
        self._inbox.append(outputs)
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed; the next one finds the outputs in the inbox
                loop.call_soon_threadsafe(self._take_turn)

    def start(self, prepared: Prepared, place: Place | None = None) -> TokenStream:
        """Run a request. The stream takes over `place` and the pictures, also if an error is raised. Raises as `submit`
        and `OverloadControl.claim`, and `InvalidRequest` if its id is that of a live one."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._goes_on = loop, False
            self._dispatch()  # outputs that a closed loop left
        if self._closing and place is not None:  # the sessions were closed while the request was prepared
            place.leave()
            place = None
        live = next((r.id for r in prepared.requests if r.id in self._streams), None)
        if live is not None:
            self.discard(prepared)
            if place is not None:
                place.leave()
            raise InvalidRequest(f"a request with the id {live!r} is live; take another one", param="request_id")
        try:
            place = place or self.overload.claim(None, Work.of_prepared(prepared))
        except HydraError:
            self.discard(prepared)
            raise
        stream = TokenStream(prepared, self._vocabulary, self._cancel)
        stream.on_stop, stream.doing = self._stopped, self._doing
        stream.on_begun, stream.on_end = place.begun, lambda: self._end(stream, place)
        for request in prepared.requests:
            self._streams[request.id] = stream
        n_submitted = 0
        try:
            for request in prepared.requests:
                self.handle.submit(request)
                n_submitted += 1
        except BaseException:
            stream.close()
            for request in prepared.requests[n_submitted:]:  # the engine will not speak of these
                self._settle(request.id)
            raise
        if prepared.requests[0].deadline_s != float("inf"):
            wait_s = max(0.0, prepared.requests[0].deadline_s - self.clock()) + DEADLINE_GRACE_S
            stream.timer = loop.call_later(wait_s, stream.expire)
        return stream

    def discard(self, prepared: Prepared) -> None:
        """Release the pictures of a request. May be called from any thread."""
        for ref in prepared.pixels:
            self._pixels.release(ref)

    def drain(self) -> None:
        """Refuse new requests with `Unavailable`. Requests that have a place go on."""
        self.overload.closed = True

    def close(self) -> None:
        """Refuse new requests and end the live ones with `Unavailable`. The engine itself is closed by its owner."""
        self.drain()
        self._closing = True
        for stream in set(self._streams.values()):
            stream.fail(shutting_down())

    def settle_all(self) -> None:
        """End the requests that the engine had not ended when it was closed."""
        self._dispatch()
        for request_id in list(self._streams):
            self._settle(request_id)

    def check(self, idle: bool = False) -> None:
        """Check that the live streams have places and, with `idle`, that no request is live. Raises
        `AssertionError`."""
        if self._loop is not None and self._loop.is_closed():
            self._dispatch()
        self.overload.check(idle)
        assert self.n_live >= len(self._streams), "a stream without a place"
        assert not (idle and self._streams), f"live: {sorted(self._streams)}"

    def _take_turn(self, again: bool = False) -> None:
        """Hand over outputs, but let the loop do other work after `_ENDS_AT_ONCE` ends. `again`: this is the callback
        that continues afterwards."""
        if self._loop is not None and (again or not self._goes_on):
            self._goes_on = False  # set before `_dispatch`, which may raise
            if not self._dispatch(_ENDS_AT_ONCE):
                self._goes_on = True
                self._loop.call_soon(self._take_turn, True)

    def _dispatch(self, most_ends: float = math.inf) -> bool:
        """Hand over the outputs in the inbox, up to `most_ends` ends. Returns whether the inbox is empty."""
        n_ends = 0
        while self._inbox:
            outputs = self._inbox.popleft()
            for i, output in enumerate(outputs):
                if n_ends >= most_ends:
                    self._inbox.appendleft(outputs[i:])
                    return False
                self._hand_over(output)
                n_ends += output.finish_reason is not None
        return True

    def _hand_over(self, output: Output) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        try:
            stream.push(output)
        except Exception:  # the other outputs of this step must still be handed over
            logger.exception("request %s failed while its tokens became text", output.request_id)
            stream.fail(InternalError("the answer could not be made into text; see the server's log"))
        if output.finish_reason is not None:
            self._settle(output.request_id)

    def _settle(self, request_id: str) -> None:
        """Note that the engine is done with one choice."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        try:
            stream.settle(request_id, self._timings(request_id))
        except Exception:  # the other outputs of this step must still be handed over
            logger.exception("request %s has ended, but not all that it held was given back", request_id)

    def _cancel(self, request_ids: list[str]) -> None:
        self.handle.cancel(request_ids)

    def _end(self, stream: TokenStream, place: Place) -> None:
        place.on_tokens(sum(stream.n_tokens))
        place.leave()
        self.discard(stream.prepared)
        self.on_ended(stream)
