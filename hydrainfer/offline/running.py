"""What is common to the ways of using a model from Python: its instance runs in this process."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec

from hydrainfer import core
from hydrainfer.assemble import ServerParts, free_unused, start_instance
from hydrainfer.config import load
from hydrainfer.core import ConfigError, InvalidRequest, MediaError, RequestTooLarge, Unavailable
from hydrainfer.offline.calls import CallReader, call_reader
from hydrainfer.offline.outputs import CompletionOutput, RequestOutput, ToolCall
from hydrainfer.offline.params import SamplingParams, plain
from hydrainfer.processor import (
    ChatMessage,
    ChatOptions,
    PythonPrompt,
    load_tokenizer,
    parse_messages,
    parse_prompts,
    parse_tools,
)
from hydrainfer.server import Completion, TokenStream

_log = logging.getLogger(__name__)
_NO_LIMIT = 1 << 30
_WAIT_S = 5.0
_ANSWER_S = 30.0  # how long instances may take to answer
Chat = Sequence[Mapping[str, Any]]
AnyPrompt = str | Sequence[int] | Mapping[str, Any]
_EMBEDS = "models generate text; embeddings and scores are not served"
_STARTS = "it is not supported; close it and start another one"
_NOT_HERE = {
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), _EMBEDS),
    **dict.fromkeys(("sleep", "wake_up", "release_kv_cache_memory"), _STARTS),
    **dict.fromkeys(("collective_rpc", "apply_model"), "no code of a caller runs in the engine"),
    **dict.fromkeys(("start_profile", "stop_profile"), "run `python -m benchmarks.b06_engine_cpu`"),
    "beam_search": "it is not supported; sample several choices (n)",
    "get_metrics": "`hydrainfer serve` has /metrics",
}
_OF_CALLS: Mapping[str, tuple[Any, str]] = {
    "lora_request": (None, "adapters (LoRA) are not supported; merge them into the checkpoint"),
    "chat_template": (None, "give it to LLM(...), as the name of a file"),
    "chat_template_content_format": ("auto", "a template is shown the parts of a message"),
    "add_generation_prompt": (True, "generate continues a prompt as it is"),
    "continue_final_message": (False, "generate continues a prompt as it is"),
    "priority": (0, "requests are equal here; `hydrainfer serve` has priorities"),
    "tokenization_kwargs": (None, "the tokenizer is the checkpoint's"),
    **dict.fromkeys(("trace_headers", "data_parallel_rank", "reasoning_ended"), (None, "leave it out")),
    "prompt_token_ids": (None, "give {'prompt_token_ids': ids} as the prompt"),
}
"""Arguments of vLLM's `chat` and `generate`, the values that mean nothing, and what comes nearest to the others."""


class Job(NamedTuple):
    """One request to make: `start` it, with an id or None. `prompt`: its text, if it was given as a text. `reader`:
    finds calls in the answer. `place`: what errors name it by among several."""

    start: Callable[[core.SamplingParams, str | None], Awaitable[TokenStream]]
    prompt: str | None
    reader: CallReader | None = None
    place: str = ""

    def calls(self, stream: TokenStream, choice: Completion) -> tuple[ToolCall, ...]:
        """The calls in a choice that has ended. Their ids are new each time."""
        return () if self.reader is None else self.reader.calls(stream.prepared, choice)


class RunningModel:
    """A model that runs in this process until `close`. A process that was forked afterwards can neither use it nor make
    another one, for it has none of the threads."""

    _process: ClassVar[int | None] = None
    """The process in which one was first made, to recognise a fork of it."""
    _open: ClassVar[weakref.WeakSet[RunningModel]] = weakref.WeakSet()

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """`options`: those of `hydrainfer serve` (see `hydrainfer.config.ServeConfig`), or vLLM's (docs/vllm.md).
        Raises `ConfigError` or `CheckpointError`."""
        _check_process(RunningModel._process)
        if RunningModel._process is None:
            _before_threads_end(_close_all)
        RunningModel._process = os.getpid()
        named = {} if model is None else {"model": str(model)}
        # all requests are the caller's own: no limits, and no separate processes to decode pictures
        here = {"max_waiting": _NO_LIMIT, "max_queue_s": 1e9, "request_timeout_s": 1e9, "media_workers": 0}
        given = load({**options, **named}, given="argument of LLM")
        for note in given.notes:
            _log.warning(note)
        unset = {name: value for name, value in here.items() if given.provenance[name] == "default"}
        self._instance: ServerParts | None = start_instance(msgspec.structs.replace(given.config, **unset))
        self._collected = weakref.finalize(self, _collect, self._instance)
        self._collected.atexit = False
        RunningModel._open.add(self)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters that are used if none are given: the checkpoint's own, greedy if its `do_sample` is false."""
        return msgspec.structs.replace(SamplingParams(), **self._running().intake.processor.model.sampling_defaults)

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer, one of `transformers`."""
        return load_tokenizer(self._running().intake.processor.model.path)

    def close(self) -> None:
        """End the running requests and free the model, the caches and the graphs, as the end of its last reference
        does. Safe to repeat. Does nothing in a process that was forked."""
        if os.getpid() == RunningModel._process and self._collected.detach() is not None:
            assert self._instance is not None
            try:
                self._instance.close()
            finally:
                self._instance = None
            free_unused()

    def _forget(self) -> bool:
        """Forget what a later request could reuse. Returns True. Raises `Unavailable`."""
        try:
            self._running().sessions.handle.forget_cached().result(_ANSWER_S)
        except TimeoutError:
            raise Unavailable("an instance does not answer") from None
        return True

    def _running(self) -> ServerParts:
        """The parts of the running instance. Raises `Unavailable` if it is closed, `ConfigError` in a fork."""
        _check_process(RunningModel._process)
        if self._instance is None:
            raise Unavailable("this LLM has been closed; make another one")
        return self._instance

    def _chat_jobs(self, chats: Sequence[Any], options: ChatOptions) -> list[Job]:
        """The jobs for these chats, which are checked here. Raises `InvalidRequest`."""
        intake = self._running().intake
        reader = call_reader(intake.processor.model, options.tools)

        def carried(sampling: core.SamplingParams) -> core.SamplingParams:
            sampling = plain(sampling)
            return sampling if reader is None else reader.constrained(sampling)

        def job(chat: Sequence[ChatMessage], place: str) -> Job:
            def start(sampling: core.SamplingParams, id: str | None) -> Awaitable[TokenStream]:
                return intake.chat(chat, carried(sampling), options=options, id=id)

            return Job(start, None, reader, place)

        jobs = []
        for i, chat in enumerate(chats):
            place = place_of("chats", i, len(chats))
            with naming(place):
                jobs.append(job(parse_messages(chat, local=True), place))
        return jobs

    def _prompt_jobs(self, prompts: Any, media: Mapping[str, Any] | None = None) -> list[Job]:
        """The jobs for one prompt or several, which are checked here. `media`: how pictures and videos are prepared, if
        a prompt does not say. Raises `InvalidRequest`."""
        intake = self._running().intake

        def job(one: PythonPrompt) -> Job:
            text = one.prompt if isinstance(one.prompt, str) else None
            if one.message is None:
                return Job(lambda sampling, id: intake.complete(one.prompt, plain(sampling), id=id), text)
            of, options = (one.message,), chat_options(None, None, None, one.options or media)
            return Job(
                lambda sampling, id: intake.chat(of, plain(sampling), options=options, prompt=one.prompt, id=id), text
            )

        parsed = parse_prompts(prompts)
        return [job(one)._replace(place=place_of("prompts", i, len(parsed))) for i, one in enumerate(parsed)]

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        if name in _NOT_HERE:
            raise AttributeError(f"{kind}.{name} is vLLM's and not to be had here: {_NOT_HERE[name]}")
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")


def place_of(noun: str, i: int, n: int) -> str:
    """What errors name request number `i` of `n` by; "" if there is only one."""
    if n == 1:
        return ""
    return f"{noun}.{i}"


@contextmanager
def naming(place: str) -> Iterator[None]:
    """A context whose errors of bad input begin with the `place` of the request, unless that is empty."""
    try:
        yield
    except (InvalidRequest, MediaError, RequestTooLarge) as e:
        if place:
            e.message = f"{place}: {e.message}"
            e.args = (e.message,)
        raise


def chat_options(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: Any,
    chat_template_kwargs: Mapping[str, Any] | None,
    mm_processor_kwargs: Mapping[str, Any] | None,
) -> ChatOptions:
    """The options of a chat. Raises `InvalidRequest`."""
    for name, value in (("chat_template_kwargs", chat_template_kwargs), ("mm_processor_kwargs", mm_processor_kwargs)):
        if value is not None and not isinstance(value, Mapping):
            raise InvalidRequest(f"{name} must be a dict", param=name)
    return ChatOptions(parse_tools(tools, tool_choice), chat_template_kwargs, mm_processor_kwargs)


def output_of(
    id: str,
    stream: TokenStream,
    choices: Sequence[Completion],
    prompt: str,
    sampling: core.SamplingParams,
    calls: Sequence[tuple[ToolCall, ...]],
    finished: bool = True,
) -> RequestOutput:
    """What the caller gets of a request whose choices are, or are so far, `choices`, with these calls."""
    ids, asked = stream.prepared.prompts[0], stream.prepared.sampling.prompt_logprobs is not None
    likely = (None, *stream.prompt_logprobs[0]) if asked else ()
    return RequestOutput(id, prompt, ids, choices_of(choices, sampling, calls), likely, finished, stream.n_cached[0])


def choices_of(
    choices: Sequence[Completion], sampling: core.SamplingParams, calls: Sequence[tuple[ToolCall, ...]]
) -> tuple[CompletionOutput, ...]:
    texts = sampling.detokenize if isinstance(sampling, SamplingParams) else True
    return tuple(
        CompletionOutput(
            i,
            c.text if texts else "",
            tuple(c.token_ids),
            tuple(c.logprobs),
            c.finish_reason or None,
            c.stop_reason,
            called,
        )
        for i, (c, called) in enumerate(zip(choices, calls))
    )


def prompt_of(instance: ServerParts, job: Job, stream: TokenStream) -> str:
    """The text of a prompt as it was given, or else decoded, with one placeholder for each picture or video."""
    if job.prompt is not None:
        return job.prompt
    request, ids, at = stream.prepared.requests[0], list[int](), 0
    for span in request.media:
        ids += request.prompt_ids[at : span.start if span.joined else span.start + 1]
        at = span.end
    return instance.intake.processor.decode([*ids, *request.prompt_ids[at:]])


def check_sampling(params: Any) -> None:
    """Raises `InvalidRequest` for anything but sampling parameters."""
    if not isinstance(params, core.SamplingParams):
        raise InvalidRequest("sampling_params must be a SamplingParams, or a list of them", param="sampling_params")


def check_others(others: Mapping[str, Any]) -> None:
    """Check further arguments of a call. Raises `InvalidRequest` for what vLLM has and we lack, `TypeError` for what
    nobody has."""
    for name, value in others.items():
        if name not in _OF_CALLS:
            raise TypeError(f"unexpected keyword argument {name!r}")
        harmless, instead = _OF_CALLS[name]
        if value is not None and value != harmless:
            raise InvalidRequest(f"{name} is vLLM's and not to be had here: {instead}", param=name)


def _close_all() -> None:
    """Close what is open when Python ends."""
    for model in list(RunningModel._open):
        model.close()


def _collect(instance: ServerParts) -> None:
    """Close an instance whose `LLM` nobody has any more. The thread that finds this may be one of the instance's own,
    or hold a lock that those need, so another one closes it, and this one waits only for a while."""
    if os.getpid() == RunningModel._process:
        closing = threading.Thread(target=instance.close, name="close LLM")
        closing.start()
        closing.join(_WAIT_S)


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
