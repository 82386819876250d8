"""Offline use from an event loop: requests come at any time, and their answers are streamed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydrainfer import core
from hydrainfer.core import InvalidRequest
from hydrainfer.offline.outputs import RequestOutput, ToolCall
from hydrainfer.offline.params import RequestOutputKind, SamplingParams
from hydrainfer.offline.running import (
    AnyPrompt,
    Chat,
    Job,
    RunningModel,
    chat_options,
    check_others,
    check_sampling,
    choices_of,
    output_of,
    prompt_of,
)
from hydrainfer.server import Completion, Delta, TokenStream


class AsyncLLM(RunningModel):
    """A model that runs in this process, for one event loop.

        async with AsyncLLM("path/to/checkpoint") as llm:
            async for output in llm.chat([{"role": "user", "content": "Why?"}], SamplingParams(max_tokens=64)):
                print(output.outputs[0].text)

    Each output holds all so far, or what `SamplingParams.output_kind` says; the last one is `finished`. A request ends
    when its iterator is closed, with `abort`, or with the model. Raises as `LLM`.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """As `LLM`."""
        super().__init__(model, **options)
        self._live: dict[str, asyncio.Future[TokenStream]] = {}  # by the caller's id
        self._aborted = set[str]()  # of these
        self._loop: asyncio.AbstractEventLoop | None = None

    def generate(
        self,
        prompt: AnyPrompt,
        sampling_params: core.SamplingParams | None = None,
        request_id: str | None = None,
        *,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt, as `LLM.generate` takes one. Raises the request's `HydraError`."""
        check_others(others)
        (job,) = self._prompt_jobs([prompt], mm_processor_kwargs)
        return self._stream(job, sampling_params, request_id)

    def chat(
        self,
        messages: Chat,
        sampling_params: core.SamplingParams | None = None,
        request_id: str | None = None,
        *,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a chat; the arguments are those of `LLM.chat`. Raises the request's `HydraError`."""
        check_others(others)
        options = chat_options(tools, tool_choice, chat_template_kwargs, mm_processor_kwargs)
        (job,) = self._chat_jobs([messages], options)
        return self._stream(job, sampling_params, request_id)

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests. Their streams end with an output whose choices have the finish reason `abort`. Ids that are not
        live are ignored."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            started = self._live.get(one)
            if started is None:
                continue
            self._aborted.add(one)
            if started.done() and not started.cancelled() and started.exception() is None:
                started.result().close()
            else:
                started.cancel()

    async def reset_prefix_cache(self) -> bool:
        """As `LLM.reset_prefix_cache`."""
        return await asyncio.to_thread(self._forget)

    def shutdown(self) -> None:
        """`close`, under vLLM's name."""
        self.close()

    async def _stream(
        self, job: Job, sampling: core.SamplingParams | None, request_id: str | None
    ) -> AsyncIterator[RequestOutput]:
        instance = self._running()
        self._check_loop()
        sampling = self.get_default_sampling_params() if sampling is None else sampling
        check_sampling(sampling)
        id = request_id or uuid.uuid4().hex
        if id in self._live:
            raise InvalidRequest(f"a request with the id {id!r} is live", param="request_id")
        kind = sampling.output_kind if isinstance(sampling, SamplingParams) else RequestOutputKind.CUMULATIVE
        so_far = [_nothing() for _ in range(sampling.n)]
        # the engine may still end an earlier request of this id, so it is given one of its own
        started = self._live[id] = asyncio.ensure_future(job.start(sampling, f"{id}-{uuid.uuid4().hex[:12]}"))
        try:
            try:
                stream = await started
            except asyncio.CancelledError:
                if id not in self._aborted:
                    raise
                yield RequestOutput(id, job.prompt or "", (), choices_of(_ended(so_far), sampling, [()] * sampling.n))
                return
            prompt = prompt_of(instance, job, stream)
            calls: list[tuple[ToolCall, ...]] = [()] * sampling.n
            async for deltas in stream:
                new = _added(so_far, deltas)
                over = [delta.choice for delta in deltas if delta.finish_reason is not None]
                for i in over:
                    calls[i] = job.calls(stream, so_far[i])
                fresh = [calls[i] if i in over else () for i in range(sampling.n)]
                done = all(one.finish_reason for one in so_far)
                if kind is RequestOutputKind.FINAL_ONLY and not done:
                    continue
                if kind is RequestOutputKind.DELTA:
                    yield output_of(id, stream, new, prompt, sampling, fresh, done)
                else:
                    yield output_of(id, stream, so_far, prompt, sampling, calls, done)
            if not all(one.finish_reason for one in so_far):
                last = _ended(so_far)
                if kind is RequestOutputKind.DELTA:
                    last = [Completion("", [], [], one.finish_reason, one.stop_reason) for one in last]
                    calls = [()] * sampling.n
                yield output_of(id, stream, last, prompt, sampling, calls)
        finally:
            del self._live[id]
            self._aborted.discard(id)
            if not started.done():
                started.cancel()
            elif not started.cancelled() and started.exception() is None:
                started.result().close()

    def _check_loop(self) -> None:
        """Raise `InvalidRequest` if another event loop has live requests."""
        loop = asyncio.get_running_loop()
        if self._live and loop is not self._loop:
            raise InvalidRequest("an AsyncLLM answers one event loop at a time; make one for each", param="loop")
        self._loop = loop

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)


def _nothing() -> Completion:
    return Completion("", [], [], "", None)


def _ended(choices: list[Completion]) -> list[Completion]:
    """The choices, of which those that went on have been aborted."""
    for one in choices:
        one.finish_reason = one.finish_reason or "abort"
    return choices


def _added(so_far: list[Completion], deltas: Sequence[Delta]) -> list[Completion]:
    """Add these parts to the choices. Returns what is new of each choice."""
    new = [_nothing() for _ in so_far]
    for delta in deltas:
        for one in (so_far[delta.choice], new[delta.choice]):
            one.text += delta.text
            one.token_ids += delta.token_ids
            one.logprobs += delta.logprobs
            one.finish_reason, one.stop_reason = delta.finish_reason or "", delta.stop_reason
    return new
