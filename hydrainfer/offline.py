"""Offline use: the same engine, scheduler and processor as the server, driven from Python."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from tqdm import tqdm

from hydrainfer.assemble import ServerParts, free_unused, start_instance
from hydrainfer.config import load
from hydrainfer.core import ConfigError, InvalidRequest, Request, SamplingParams, TokenLogprobs, Unavailable
from hydrainfer.processor import ChatMessage, ChatOptions, PythonPrompt, parse_messages, parse_prompts, parse_tools
from hydrainfer.server import TokenStream

_log = logging.getLogger(__name__)
_NO_LIMIT = 1 << 30
Chat = Sequence[Mapping[str, Any]]
AnyPrompt = str | Sequence[int] | Mapping[str, Any]
StreamStart = Callable[[SamplingParams], Awaitable[TokenStream]]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. `logprobs`: one entry per token if they were asked for, otherwise empty."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt or chat. `prompt`: the text that was given, or else the decoded ids, with one
    placeholder for each picture. `prompt_token_ids`: with the placeholders expanded. `prompt_logprobs`: one entry for
    each of these ids, None for the first; empty if not asked for."""

    request_id: str
    prompt: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


class LLM:
    """A model that runs in this process.

        with LLM("path/to/checkpoint", dtype="float32") as llm:  # LLM() for the built-in model
            (answer,) = llm.chat([{"role": "user", "content": [
                {"type": "image", "image": "cat.jpg"}, {"type": "text", "text": "What is this?"}]}])
            print(answer.outputs[0].text)

    `options` are those of `hydrainfer serve` (see `hydrainfer.config.ServeConfig`), or vLLM's (docs/vllm.md). Raises
    `ConfigError` or `CheckpointError`. Without a `with` block or `close`, it is closed when Python ends. Calls from
    several threads take turns. A process that was forked afterwards can neither use it nor make another one, for it has
    none of the threads."""

    _process: ClassVar[int | None] = None
    """The process in which one was first made, to recognise a fork of it."""

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        _check_process(LLM._process)
        LLM._process = os.getpid()
        named = {} if model is None else {"model": str(model)}
        # all requests are the caller's own: no limits, and no separate processes to decode pictures
        here = {"max_waiting": _NO_LIMIT, "max_queue_s": 1e9, "request_timeout_s": 1e9, "media_workers": 0}
        loaded = load({**here, **options, **named}, given="argument of LLM")
        for note in loaded.notes:
            _log.warning(note)
        self._instance: ServerParts | None = start_instance(loaded.config)
        self._turn = threading.Lock()  # only one event loop at a time may use the sessions
        self._at_exit = ExitStack()
        self._at_exit.callback(self._close)
        _before_threads_end(self._at_exit.close)

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one chat or several, in order. Pictures are `image_url` parts (data:, and what `media_hosts` and
        `media_roots` let through) or `{"type": "image", "image": path | bytes | PIL.Image}`; videos, for models
        that take them, `video_url` parts or `{"type": "video", "video": path | bytes | frames, "fps": of frames}`.
        The other arguments are for all chats. `mm_processor_kwargs`: how pictures and videos are prepared; `tools`: the
        tools that the template shows to the model, whose calls are returned as text; `chat_template_kwargs`: variables
        of the template. Raises the `HydraError` of the first request that fails."""
        instance = self._running()
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
            raise InvalidRequest("messages must be a list of messages or of chats, and not empty", param="messages")
        chats: list[Any] = [messages] if isinstance(messages[0], Mapping) else list(messages)
        parsed = [parse_messages(chat, local=True) for chat in chats]
        options = ChatOptions(parse_tools(tools), chat_template_kwargs, mm_processor_kwargs)
        intake = instance.intake

        def job(chat: Sequence[ChatMessage]) -> StreamStart:
            return lambda sampling: intake.chat(chat, sampling, options=options)

        return self._run(instance, [job(chat) for chat in parsed], [None] * len(parsed), sampling_params, use_tqdm)

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue one prompt or several, in order: texts, token ids, or vLLM's dicts with `prompt` or
        `prompt_token_ids`. A dict's `multi_modal_data` holds pictures (`image`) and videos (`video`), one or a list,
        as `chat` takes them; the prompt has the model's own placeholder where each belongs. Raises the `HydraError` of
        the first request that fails."""
        instance = self._running()
        intake = instance.intake

        def job(one: PythonPrompt) -> StreamStart:
            if one.message is None:
                return lambda sampling: intake.complete(one.prompt, sampling)
            of, options = (one.message,), ChatOptions(media=one.options)
            return lambda sampling: intake.chat(of, sampling, options=options, prompt=one.prompt)

        parsed = parse_prompts(prompts)
        texts = [one.prompt if isinstance(one.prompt, str) else None for one in parsed]
        return self._run(instance, [job(one) for one in parsed], texts, sampling_params, use_tqdm)

    def _running(self) -> ServerParts:
        """The parts of the running instance. Raises `Unavailable` if it is closed, `ConfigError` in a fork."""
        _check_process(LLM._process)
        if self._instance is None:
            raise Unavailable("this LLM has been closed; make another one")
        return self._instance

    def _run(
        self,
        instance: ServerParts,
        jobs: Sequence[StreamStart],
        texts: Sequence[str | None],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if sampling is None:
            sampling = self.get_default_sampling_params()
        params = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(jobs)
        if not all(isinstance(p, SamplingParams) for p in params):
            raise InvalidRequest("sampling_params must be a SamplingParams, or a list of them", param="sampling_params")
        if len(params) != len(jobs):
            raise InvalidRequest(
                f"{len(params)} sampling parameters for {len(jobs)} prompts; give one, or one each",
                param="sampling_params",
            )
        with self._turn, tqdm(total=len(jobs), desc="requests", disable=not use_tqdm, dynamic_ncols=True) as bar:
            return _run_to_end(_gather(instance, zip(jobs, params, texts), bar))

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that are used if none are given: the checkpoint's own, greedy if its `do_sample` is false."""
        return msgspec.structs.replace(SamplingParams(), **self._running().intake.processor.model.sampling_defaults)

    def close(self) -> None:
        """End the running requests and free the model, the caches and the graphs. Safe to repeat. Does nothing in a
        process that was forked."""
        self._close()
        self._at_exit.pop_all()
        free_unused()

    def _close(self) -> None:
        if os.getpid() == LLM._process and self._instance is not None:
            instance, self._instance = self._instance, None
            instance.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


async def _gather(
    instance: ServerParts, work: Iterable[tuple[StreamStart, SamplingParams, str | None]], bar: tqdm
) -> list[RequestOutput]:
    # limits the number of decoded pictures that wait for the engine
    ahead = asyncio.Semaphore(2 * instance.config.max_running)

    async def one(job: StreamStart, sampling: SamplingParams, text: str | None) -> RequestOutput:
        async with ahead:
            stream = await job(sampling)
            choices = await stream.result()
        bar.update()
        outputs = tuple(
            CompletionOutput(i, c.text, tuple(c.token_ids), tuple(c.logprobs), c.finish_reason, c.stop_reason)
            for i, c in enumerate(choices)
        )
        ids, asked = stream.prepared.prompts[0], stream.prepared.sampling.prompt_logprobs is not None
        likely = (None, *stream.prompt_logprobs[0]) if asked else ()
        prompt = _text_of(instance, stream.prepared.requests[0]) if text is None else text
        return RequestOutput(stream.prepared.id, prompt, ids, outputs, likely)

    tasks = [asyncio.ensure_future(one(*item)) for item in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:  # also after a failure, leave no request of this call in the engine
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while instance.sessions.n_live:
            await asyncio.sleep(0.002)


def _text_of(instance: ServerParts, request: Request) -> str:
    """The decoded text of a prompt, with one placeholder for each picture or video."""
    ids, at = list[int](), 0
    for span in request.media:
        ids += request.prompt_ids[at : span.start if span.joined else span.start + 1]
        at = span.end
    return instance.intake.processor.decode([*ids, *request.prompt_ids[at:]])


def _check_process(first: int | None) -> None:
    """Raise `ConfigError` if this process was forked from the process `first`, in which there has been an `LLM`. The
    threads that compute, of OpenMP and others, are missing here, and whoever needs them would wait for ever."""
    if first is not None and first != os.getpid():
        raise ConfigError(
            "this process was forked from one that has made an LLM, and its threads are missing here: use spawn "
            "(multiprocessing.get_context('spawn')), or make the first LLM after the fork"
        )


def _before_threads_end(close: Callable[[], None]) -> None:
    """Call `close` when Python ends, before the pools of `concurrent.futures` end their threads, which happens before
    `atexit`. Ray's daemons die with such a thread, and a cluster can no longer be closed then."""
    threading._register_atexit(close)  # type: ignore[attr-defined]


def _run_to_end(work: Coroutine[Any, Any, list[RequestOutput]]) -> list[RequestOutput]:
    """The result of `asyncio.run`, on a thread of its own if a loop already runs here, as in notebooks."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
