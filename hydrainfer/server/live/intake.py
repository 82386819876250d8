"""The intake of requests: a place, a turn, downloads, preparation in a thread, the engine. The HTTP routes and the
offline API use it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import TypeVar

from hydrainfer.core import DeadlineExceeded, Grammar, InvalidRequest, MediaError, SamplingParams, shutting_down
from hydrainfer.processor import ChatMessage, ChatOptions, Fetcher, JobTicket, Prepared, Processor, RequestTerms
from hydrainfer.server.door import Place, Urgency, Work
from hydrainfer.server.live.session import Sessions
from hydrainfer.server.live.stream import TokenStream

T = TypeVar("T")
Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class Intake:
    """The way of a request into the engine; owns the preparation threads. Texts and pictures have separate threads, so
    that no text waits for pictures to be decoded. A request that no instance can use soon waits before it is fetched
    and prepared. If a step fails or is cancelled, the place and the pictures are released."""

    def __init__(
        self,
        processor: Processor,
        sessions: Sessions,
        *,
        fetcher: Fetcher | None = None,
        n_threads: int = 2,
        n_media_threads: int = 2,
        timeout_s: float = float("inf"),
    ) -> None:
        """`n_threads` prepare texts, `n_media_threads` requests with pictures. `timeout_s`: the seconds from arrival to
        the deadline, downloads included."""
        self.processor = processor
        self.sessions = sessions
        self.timeout_s = timeout_s
        self._fetcher = fetcher or Fetcher()
        self._threads = ThreadPoolExecutor(n_threads, "hydra-prepare")
        self._media_threads = ThreadPoolExecutor(n_media_threads, "hydra-prepare-media")

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        *,
        id: str | None = None,
        options: ChatOptions | None = None,
        prompt: str | Sequence[int] | None = None,
        place: Place | None = None,
        salt: str = "",
        urgency: Urgency | None = None,
    ) -> TokenStream:
        """Fetch, prepare and start a chat. `options`, `prompt`, `salt`: as in `Processor.chat`. `place`: the place that
        the request already has. Raises as `Processor.chat`, `Fetcher.get` and `OverloadControl.claim`."""
        id, ticket, options = id or f"chat-{uuid.uuid4().hex}", JobTicket(), options or ChatOptions()
        terms = self._terms(urgency, place, salt)
        try:
            return await self._start(
                self._claim(place, Work.of_chat(messages, sampling.n), urgency),
                terms,
                lambda fetched: self.processor.chat(id, fetched, sampling, terms, options, ticket, prompt),
                self.processor.grammars_of(sampling, options.tools),
                messages,
            )
        except BaseException:
            ticket.cancel()  # nobody needs the work that is still queued
            raise

    async def complete(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        id: str | None = None,
        add_special: bool | None = None,
        place: Place | None = None,
        salt: str = "",
        urgency: Urgency | None = None,
    ) -> TokenStream:
        """Prepare and start a text completion. Raises as `Processor.complete` and `OverloadControl.claim`."""
        id, terms = id or f"cmpl-{uuid.uuid4().hex}", self._terms(urgency, place, salt)
        return await self._start(
            self._claim(place, Work.of_prompt(prompt, sampling.n), urgency),
            terms,
            lambda _: self.processor.complete(id, prompt, sampling, terms, add_special=add_special),
            self.processor.grammars_of(sampling),
        )

    async def encode_chat(self, messages: Sequence[ChatMessage], options: ChatOptions, salt: str = "") -> list[int]:
        """The prompt ids of a chat. Holds a place meanwhile. Raises as `chat`."""
        place, ticket = self.sessions.overload.take(), JobTicket()
        try:
            media = self.processor.check_pictures(messages)
            async with asyncio.timeout(self.timeout_s), self._fetcher.fetched(messages) as fetched:
                return await asyncio.wrap_future(
                    self._submit(lambda: self.processor.encode_chat(fetched, options, ticket, salt), media=media)
                )
        except TimeoutError:
            raise _too_late() from None
        finally:
            ticket.cancel()  # nobody needs the work that is still queued
            place.leave()

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, which runs in a preparation thread. Holds a place meanwhile."""
        place = self.sessions.overload.take()
        try:
            return await asyncio.wrap_future(self._submit(work))
        finally:
            place.leave()

    def close(self) -> None:
        """End the downloads, the workers and the threads. Requests that are being prepared finish or fail."""
        self._fetcher.close()
        self.processor.close()
        for threads in (self._threads, self._media_threads):
            threads.shutdown(cancel_futures=True)

    def _terms(self, urgency: Urgency | None, place: Place | None, salt: str) -> RequestTerms:
        now = self.sessions.clock() if place is None else place.arrived_s
        priority, within_s, share = urgency or Urgency()
        return RequestTerms(now, now + min(self.timeout_s, within_s), priority, share, salt)

    def _claim(self, place: Place | None, work: Work, urgency: Urgency | None) -> Place:
        return self.sessions.overload.claim(place, work, urgency or Urgency())

    async def _start(
        self,
        place: Place,
        terms: RequestTerms,
        prepare: Callable[[Sequence[ChatMessage]], Prepared],
        grammars: Sequence[Grammar],
        messages: Sequence[ChatMessage] = (),
    ) -> TokenStream:
        future: Future[Prepared] | None = None
        try:
            media = self.processor.check_pictures(messages)
            async with asyncio.timeout(terms.deadline_s - self.sessions.clock()), AsyncExitStack() as stack:
                await self._turn(place, terms.priority)
                await self._check(grammars)
                fetched = await stack.enter_async_context(self._fetcher.fetched(messages))
                future = self._submit(lambda: prepare(fetched), media=media)
                prepared = await asyncio.wrap_future(future)
        except BaseException as e:
            place.leave(answered=future is not None and isinstance(e, InvalidRequest | MediaError))
            if future is not None:
                future.add_done_callback(self._discard_late)
            if isinstance(e, TimeoutError):
                raise _too_late() from None
            task = asyncio.current_task()
            if isinstance(e, asyncio.CancelledError) and task is not None and not task.cancelling():
                raise shutting_down() from None  # the threads end, and nobody has cancelled this task
            raise
        place.prepared(Work.of_prepared(prepared))
        stream = self.sessions.start(prepared, place)
        place.on_tokens(prepared.n_prompt_tokens * prepared.sampling.n)
        return stream

    async def _check(self, grammars: Sequence[Grammar]) -> None:
        """Compile these grammars, within bounds and without a preparation thread. Raises as `Grammars.check`."""
        if self.processor.grammars is not None:
            for grammar in grammars:
                await self.processor.grammars.check(grammar)

    @staticmethod
    async def _turn(place: Place, priority: int) -> None:
        """Wait until it is the request's turn to be prepared."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def go() -> None:
            if not turn.done():
                turn.set_result(None)

        place.line_up(priority, go)
        await turn

    def _submit(self, work: Callable[[], T], *, media: bool = False) -> Future[T]:
        try:
            return (self._media_threads if media else self._threads).submit(work)
        except RuntimeError:  # the pool has been shut down
            raise shutting_down() from None

    def _discard_late(self, future: Future[Prepared]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.sessions.discard(future.result())


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed before the request was prepared; allow more time, or retry later")
