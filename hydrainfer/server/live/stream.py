"""The outputs of one API request on their way to a consumer; they are merged while the consumer is busy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import msgspec

from hydrainfer.core import DeadlineExceeded, HydraError, InternalError, Output, TokenLogprobs, Unavailable
from hydrainfer.metrics import Timeline
from hydrainfer.processor import Prepared, TextStream, Vocabulary


class Delta(msgspec.Struct):
    """The new part of one choice since the consumer's last read. `stop_reason`: the stop string or stop token id that
    ended the choice (None for end of sequence), as in vLLM."""

    choice: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Completion(msgspec.Struct):
    """A whole choice."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str
    stop_reason: int | str | None


class TokenStream:
    """An async iterator over lists of `Delta`, at most one per choice in each list, until every choice has ended.

    Per choice, `n_tokens`: its tokens so far; `n_cached`: the tokens of its prompt that were found in the cache;
    `prompt_logprobs`: those of its prompt, from the second token on, complete with its first delta. Iteration raises
    the request's `HydraError` if a choice fails; the other choices are then ended. Call `close` when the consumer goes
    away; repeated calls, and calls after the end, do nothing. The buffered output is bounded by max_tokens.
    """

    def __init__(self, prepared: Prepared, vocabulary: Vocabulary, cancel: Callable[[list[str]], None]) -> None:
        sampling = prepared.sampling
        self.prepared = prepared
        self.n_tokens = [0] * len(prepared.requests)
        self.n_cached = [0] * len(prepared.requests)
        self.prompt_logprobs: list[tuple[TokenLogprobs, ...]] = [()] * len(prepared.requests)
        self.timelines: list[Timeline | None] = [None] * len(prepared.requests)
        self.timer: asyncio.TimerHandle | None = None
        self.trace_parent = ""  # the client's `traceparent`
        self.on_begun: Callable[[], None] = lambda: None  # called at the first token of each choice
        self.on_end: Callable[[], None] = lambda: None
        self.on_stop: Callable[[str], None] = lambda _: None  # called with the engine request that a stop string ends
        self.doing: Callable[[str], str] = lambda _: ""  # the interval that an engine request is in
        self._index = {r.id: i for i, r in enumerate(prepared.requests)}
        self._stop_tokens = frozenset(sampling.stop_token_ids)
        self._texts = [TextStream(vocabulary, sampling, continues=prepared.continues) for _ in prepared.requests]
        self._cancel = cancel
        self._unbegun = set(self._index)  # choices that have no token yet
        self._open = set(self._index)  # choices whose consumer wants more
        self._running = set(self._index)  # choices that the engine has not ended
        self._ending: set[str] = set()  # choices that the engine has ended or was told to end
        self._pending: dict[int, Delta] = {}
        self._error: HydraError | None = None
        self._whole = False  # the consumer wants whole choices only
        self._news = asyncio.Event()
        self._settled = asyncio.Event()

    # ---- the engine's side, on the event loop

    def push(self, output: Output) -> None:
        """Add new tokens of one choice, or its end."""
        last = output.finish_reason is not None
        if output.token_ids and output.request_id in self._unbegun:
            self._unbegun.discard(output.request_id)
            self.on_begun()
        if last:
            self._ending.add(output.request_id)
        if output.request_id not in self._open:
            return
        if output.error is not None:
            self.fail(output.error.exception())
            return
        if output.finish_reason == "abort":  # not cancelled from here
            self.fail(Unavailable("the request was ended by the server, which may be shutting down", retry_after_s=5.0))
            return
        choice = self._index[output.request_id]
        by_token = output.finish_reason == "stop"
        piece = self._texts[choice].push(output.token_ids, ended_by_token=by_token, last=last)
        delta = self._pending.get(choice)
        if delta is None:
            delta = self._pending[choice] = Delta(choice)
        delta.text += piece.text
        delta.token_ids += output.token_ids[: piece.n_tokens]
        delta.logprobs += output.logprobs[: piece.n_tokens]
        self.n_tokens[choice] += piece.n_tokens
        self.prompt_logprobs[choice] = output.prompt_logprobs or self.prompt_logprobs[choice]
        self.n_cached[choice] = max(self.n_cached[choice], output.n_cached)
        if piece.stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", piece.stop
            self.on_stop(output.request_id)
            self._end_early({output.request_id})
        elif last:
            delta.finish_reason = output.finish_reason
            delta.stop_reason = output.stop_token if output.stop_token in self._stop_tokens else None
        if delta.finish_reason is not None:
            self._open.discard(output.request_id)
        if delta.finish_reason is not None or not self._whole:
            self._news.set()

    def settle(self, request_id: str, timeline: Timeline | None = None) -> None:
        """Note that the engine has ended a choice. After the last one, `on_end` is called."""
        self.timelines[self._index[request_id]] = timeline
        self._running.discard(request_id)
        if request_id in self._open:  # it ended without a final output
            self.fail(InternalError("the engine ended the request without an answer"))
        if not self._running:
            on_end, self.on_end = self.on_end, lambda: None
            if self.timer is not None:
                self.timer.cancel()
            self._settled.set()
            on_end()

    def fail(self, error: HydraError) -> None:
        """End all choices with `error`, unless they have all ended."""
        if self._open:
            self._error = error
            self.close()

    def expire(self) -> None:
        self.fail(DeadlineExceeded("the request took longer than it may; ask for fewer tokens, or retry when idle"))

    # ---- the consumer's side

    def close(self) -> None:
        """Cancel the choices that the engine still runs, since the consumer wants no more."""
        self._open.clear()
        self._end_early(self._running)
        self._news.set()

    def _end_early(self, request_ids: set[str]) -> None:
        new = request_ids - self._ending
        self._ending |= new
        if new:
            self._cancel(sorted(new))

    async def ready(self, timeout_s: float) -> None:
        """Wait for the first output, but not longer than `timeout_s`. Raises the request's `HydraError` if it has
        failed, so that the response can still have an error status."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        if self._error is not None:
            raise self._error

    async def intervals(self, every_s: float) -> AsyncIterator[str]:
        """The interval that the first choice is in (one of `metrics.INTERVALS`), each time it has changed, until its
        first output. It is looked at every `every_s` seconds. Raises the request's `HydraError`."""
        last = ""
        while not self._news.is_set():
            now = self.doing(self.prepared.requests[0].id)
            if now != last:
                last = now
                yield now
            await self.ready(every_s)

    async def settled(self, timeout_s: float) -> None:
        """Wait until the engine has ended every choice, so that `timelines` are complete, but not longer than
        `timeout_s`. The engine ends a choice with its last delta, or a step later if a stop string ended the choice."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self

    async def __anext__(self) -> list[Delta]:
        if self._open or self._pending or self._error:
            await self._news.wait()
        self._news.clear()
        if self._error is not None:
            error, self._error = self._error, None
            self._pending.clear()
            raise error
        if not self._pending:
            raise StopAsyncIteration
        deltas = list(self._pending.values())
        self._pending.clear()
        return deltas

    async def result(self) -> list[Completion]:
        """All choices, whole and in order. Raises the request's `HydraError`. If cancelled, closes the stream."""
        done = [Completion("", [], [], "", None) for _ in self._texts]
        self._whole = True
        try:
            async for deltas in self:
                for delta in deltas:
                    one = done[delta.choice]
                    one.text += delta.text
                    one.token_ids += delta.token_ids
                    one.logprobs += delta.logprobs
                    if delta.finish_reason is not None:
                        one.finish_reason, one.stop_reason = delta.finish_reason, delta.stop_reason
        finally:
            self.close()
        return done
