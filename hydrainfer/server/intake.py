"""The way in: a place, a turn, what URLs name, preparation in a thread, the engine; used by the HTTP routes and
offline."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import TypeVar

from hydrainfer.core import DeadlineExceeded, SamplingParams, shutting_down
from hydrainfer.processor import ChatMessage, ChatOptions, Fetcher, JobTicket, Prepared, Processor, RequestTerms
from hydrainfer.server.admission import Place, Urgency, Work
from hydrainfer.server.session import Sessions
from hydrainfer.server.stream import TokenStream

T = TypeVar("T")
Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class Intake:
    """Owns the preparation threads; texts and pictures have threads of their own, so that no text waits for pictures to
    be decoded. What no instance can use soon waits before it is fetched and prepared. Whatever fails or is cancelled on
    the way, no place and no picture stays behind."""

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
        """`n_threads` prepare texts, `n_media_threads` what has pictures. `timeout_s`: seconds from arrival to
        deadline; fetching counts."""
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
        """Fetch, prepare and start. `options`, `prompt`, `salt`: as of `Processor.chat`. `place`: the one that it has
        already. Raises as `Processor.chat`, `Fetcher.get` and `AdmissionControl.claim`."""
        id, ticket, options = id or f"chat-{uuid.uuid4().hex}", JobTicket(), options or ChatOptions()
        terms = self._terms(urgency, place, salt)
        try:
            return await self._start(
                self._claim(place, Work.of_chat(messages, sampling.n), urgency),
                terms,
                lambda fetched: self.processor.chat(id, fetched, sampling, terms, options, ticket, prompt),
                messages,
            )
        except BaseException:
            ticket.cancel()  # what is queued for it is for nobody
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
        """Prepare and start. Raises as `Processor.complete` and `AdmissionControl.claim`."""
        id, terms = id or f"cmpl-{uuid.uuid4().hex}", self._terms(urgency, place, salt)
        return await self._start(
            self._claim(place, Work.of_prompt(prompt, sampling.n), urgency),
            terms,
            lambda _: self.processor.complete(id, prompt, sampling, terms, add_special=add_special),
        )

    async def encode_chat(self, messages: Sequence[ChatMessage], options: ChatOptions) -> list[int]:
        """The prompt ids a chat would have; it holds a place meanwhile. Raises as `chat`."""
        place, ticket = self.sessions.admission.take(), JobTicket()
        try:
            media = self.processor.check_pictures(messages)
            async with asyncio.timeout(self.timeout_s), self._fetcher.fetched(messages) as fetched:
                return await asyncio.wrap_future(
                    self._submit(lambda: self.processor.encode_chat(fetched, options, ticket), media=media)
                )
        except TimeoutError:
            raise _too_late() from None
        finally:
            ticket.cancel()  # what is still queued for it is for nobody
            place.leave()

    async def run(self, work: Callable[[], T]) -> T:
        """Something else of the processor's, in one of its threads; it holds a place meanwhile."""
        place = self.sessions.admission.take()
        try:
            return await asyncio.wrap_future(self._submit(work))
        finally:
            place.leave()

    def close(self) -> None:
        """End the downloads, the workers and the threads; what is being prepared is finished or fails."""
        self._fetcher.close()
        self.processor.close()
        for threads in (self._threads, self._media_threads):
            threads.shutdown(cancel_futures=True)

    def _terms(self, urgency: Urgency | None, place: Place | None, salt: str) -> RequestTerms:
        now = self.sessions.clock() if place is None else place.arrived_s
        priority, within_s, share = urgency or Urgency()
        return RequestTerms(now, now + min(self.timeout_s, within_s), priority, share, salt)

    def _claim(self, place: Place | None, work: Work, urgency: Urgency | None) -> Place:
        return self.sessions.admission.claim(place, work, urgency or Urgency())

    async def _start(
        self,
        place: Place,
        terms: RequestTerms,
        prepare: Callable[[Sequence[ChatMessage]], Prepared],
        messages: Sequence[ChatMessage] = (),
    ) -> TokenStream:
        future: Future[Prepared] | None = None
        try:
            media = self.processor.check_pictures(messages)
            async with asyncio.timeout(terms.deadline_s - self.sessions.clock()), AsyncExitStack() as stack:
                await self._turn(place, terms.priority)
                fetched = await stack.enter_async_context(self._fetcher.fetched(messages))
                future = self._submit(lambda: prepare(fetched), media=media)
                prepared = await asyncio.wrap_future(future)
        except BaseException as e:
            place.leave()
            if future is not None:
                future.add_done_callback(self._discard_late)
            if isinstance(e, TimeoutError):
                raise _too_late() from None
            raise
        place.prepared(Work.of_prepared(prepared))
        place.on_tokens(prepared.n_prompt_tokens * prepared.sampling.n)
        return self.sessions.start(prepared, place)

    @staticmethod
    async def _turn(place: Place, priority: int) -> None:
        """Returns when it is to be prepared."""
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
