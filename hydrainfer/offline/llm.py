"""Offline use: many chats or prompts at once, and all answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hydrainfer import core
from hydrainfer.assemble import ServerParts
from hydrainfer.core import InvalidRequest
from hydrainfer.offline.outputs import RequestOutput
from hydrainfer.offline.running import (
    AnyPrompt,
    Chat,
    Job,
    RunningModel,
    chat_options,
    check_others,
    check_sampling,
    naming,
    output_of,
    prompt_of,
)


class LLM(RunningModel):
    """A model that runs in this process.

        with LLM("path/to/checkpoint", dtype="float32") as llm:  # LLM() for the built-in model
            (answer,) = llm.chat([{"role": "user", "content": [
                {"type": "image", "image": "cat.jpg"}, {"type": "text", "text": "What is this?"}]}])
            print(answer.outputs[0].text)

    Without a `with` block or `close`, it is closed when Python ends. Calls from several threads take turns.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """`options`: those of `hydrainfer serve` (see `hydrainfer.config.ServeConfig`), or vLLM's (docs/vllm.md).
        Raises `ConfigError` or `CheckpointError`."""
        super().__init__(model, **options)
        self._turn = threading.Lock()  # only one event loop at a time may use the sessions

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: core.SamplingParams | Sequence[core.SamplingParams] | None = None,
        use_tqdm: bool = True,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one chat or several, in order. Pictures are `image_url` parts (data:, and what `media_hosts` and
        `media_roots` let through) or `{"type": "image", "image": path | bytes | PIL.Image}`; videos, for models
        that take them, `video_url` parts or `{"type": "video", "video": path | bytes | frames, "fps": of frames}`.
        The other arguments are for all chats. `mm_processor_kwargs`: how pictures and videos are prepared; `tools` and
        `tool_choice`: OpenAI's; calls are in `CompletionOutput.tool_calls`; `chat_template_kwargs`: variables of the
        template; `others`: vLLM's, where they mean nothing. Raises the `HydraError` of the first request that
        fails."""
        self._running()
        check_others(others)
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
            raise InvalidRequest("messages must be a list of messages or of chats, and not empty", param="messages")
        chats: list[Any] = [messages] if isinstance(messages[0], Mapping) else list(messages)
        options = chat_options(tools, tool_choice, chat_template_kwargs, mm_processor_kwargs)
        return self._run(self._chat_jobs(chats, options), sampling_params, use_tqdm)

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt] | None = None,
        sampling_params: core.SamplingParams | Sequence[core.SamplingParams] | None = None,
        use_tqdm: bool = True,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Continue one prompt or several, in order: texts, token ids, or vLLM's dicts with `prompt` or
        `prompt_token_ids`. A dict's `multi_modal_data` holds pictures (`image`) and videos (`video`), one or a list, as
        `chat` takes them; the prompt has the model's own placeholder where each belongs. `others`: vLLM's, where they
        mean nothing. Raises the `HydraError` of the first request that fails."""
        check_others(others)
        return self._run(self._prompt_jobs(prompts, mm_processor_kwargs), sampling_params, use_tqdm)

    def reset_prefix_cache(self) -> bool:
        """Forget what a later request could reuse, as `POST /reset_prefix_cache` does. Returns True, as vLLM's. Raises
        `Unavailable`."""
        return self._forget()

    def _run(
        self, jobs: Sequence[Job], sampling: core.SamplingParams | Sequence[core.SamplingParams] | None, use_tqdm: bool
    ) -> list[RequestOutput]:
        instance = self._running()
        if sampling is None:
            sampling = self.get_default_sampling_params()
        params = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(jobs)
        for one in params:
            check_sampling(one)
        if len(params) != len(jobs):
            raise InvalidRequest(
                f"{len(params)} sampling parameters for {len(jobs)} prompts; give one, or one each",
                param="sampling_params",
            )
        with self._turn, tqdm(total=len(jobs), desc="requests", disable=not use_tqdm, dynamic_ncols=True) as bar:
            return _run_to_end(_gather(instance, zip(jobs, params), bar))

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


async def _gather(
    instance: ServerParts, work: Iterable[tuple[Job, core.SamplingParams]], bar: tqdm
) -> list[RequestOutput]:
    # limits the number of decoded pictures that wait for the engine
    ahead = asyncio.Semaphore(2 * instance.config.max_running)

    async def one(job: Job, sampling: core.SamplingParams) -> RequestOutput:
        async with ahead:
            with naming(job.place):
                stream = await job.start(sampling, None)
            choices = await stream.result()
        bar.update()
        prompt, calls = prompt_of(instance, job, stream), [job.calls(stream, one) for one in choices]
        return output_of(stream.prepared.id, stream, choices, prompt, sampling, calls)

    tasks = [asyncio.ensure_future(one(*item)) for item in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:  # also after a failure, leave no request of this call in the engine
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while instance.sessions.n_live:
            await asyncio.sleep(0.002)


def _run_to_end(work: Coroutine[Any, Any, list[RequestOutput]]) -> list[RequestOutput]:
    """The result of `asyncio.run`, on a thread of its own if a loop already runs here, as in notebooks."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
