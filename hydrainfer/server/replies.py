"""What an answer is; bodies of chat and text completions, whole and in chunks; per token only a dict and orjson."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from hydrainfer.core import HydraError
from hydrainfer.metrics import Timeline
from hydrainfer.processor import Vocabulary
from hydrainfer.server.fields import CommonFields
from hydrainfer.server.logprobs import chat_logprobs, completion_logprobs
from hydrainfer.server.sse import DONE, error_event, event
from hydrainfer.server.stream import Completion, Delta, TokenStream
from hydrainfer.server.timings import breakdown


class Reply(ABC):
    """One answer, whole or in chunks, in the words of one protocol. `model`: the name as the client wrote it."""

    media_type = "text/event-stream"

    def __init__(self, stream: TokenStream, fields: CommonFields, model: str, created: int, words: Vocabulary) -> None:
        self.prepared = prepared = stream.prepared
        self._n_cached = stream.n_cached
        self.model, self.created, self.vocabulary = model, created, words
        self.timings = bool(fields.timings)
        self.include_usage = fields.include_usage
        self.n_logprobs = prepared.sampling.logprobs

    def opening(self) -> bytes:
        """What is sent before the first token."""
        return b""

    @abstractmethod
    def events(self, deltas: Sequence[Delta], n_tokens: Sequence[int]) -> bytes:
        """What these deltas add. `n_tokens`: produced so far, per choice."""

    @abstractmethod
    def closing(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> bytes:
        """What is sent at the end. `timelines`: per choice."""

    @abstractmethod
    def body(self, done: Sequence[Completion], timelines: Sequence[Timeline | None]) -> bytes:
        """The whole answer."""

    def error(self, error: HydraError) -> bytes:
        """An error after the first word, and the end."""
        return error_event(error)

    def _counts(self, n_tokens: Sequence[int]) -> tuple[int, int, int]:
        """Tokens of the prompts, those of them that none of a prompt's choices had to compute, and of the answer."""
        n = self.prepared.sampling.n
        n_cached = sum(min(self._n_cached[i : i + n]) for i in range(0, len(self._n_cached), n))
        return self.prepared.n_prompt_tokens, n_cached, sum(n_tokens)


class Choices(Reply):
    """The bodies of OpenAI's chat and text completions."""

    kind: str

    def __init__(self, stream: TokenStream, fields: CommonFields, model: str, created: int, words: Vocabulary) -> None:
        super().__init__(stream, fields, model, created, words)
        self.return_ids = bool(fields.return_token_ids)
        self.continuous_usage = fields.continuous_usage
        self._head = {"id": self.prepared.id, "object": self.kind, "created": created, "model": model}

    @abstractmethod
    def chunk(self, delta: Delta) -> dict[str, Any]:
        """One entry of `choices` in a chunk."""

    @abstractmethod
    def choice(self, index: int, done: Completion) -> dict[str, Any]:
        """One entry of `choices` in the whole answer."""

    def events(self, deltas: Sequence[Delta], n_tokens: Sequence[int]) -> bytes:
        """A chunk per delta that says something."""
        sent = [d for d in deltas if d.text or d.finish_reason or self.return_ids or self.n_logprobs is not None]
        usage = self._usage(n_tokens) if self.continuous_usage else None
        return b"".join(self._event([self.chunk(d)], usage) for d in sent)

    def closing(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> bytes:
        """The usage chunk, if it was asked for, and the last word."""
        return (self._event([], self._final_usage(n_tokens, timelines)) if self.include_usage else b"") + DONE

    def body(self, done: Sequence[Completion], timelines: Sequence[Timeline | None]) -> bytes:
        return orjson.dumps(
            {
                **self._head,
                "choices": [self.choice(i, one) for i, one in enumerate(done)],
                "usage": self._final_usage([len(one.token_ids) for one in done], timelines),
                **self._body_extras(),
            }
        )

    def _body_extras(self) -> dict[str, Any]:
        return {}

    def _event(self, choices: list[dict[str, Any]], usage: Mapping[str, Any] | None, **extra: Any) -> bytes:
        body = {**self._head, "choices": choices, **extra}
        if self.include_usage:
            body["usage"] = usage
        return event(orjson.dumps(body))

    def _final_usage(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> dict[str, Any]:
        usage = self._usage(n_tokens)
        return {**usage, "hydrainfer": breakdown(timelines)} if self.timings else usage

    def _usage(self, n_tokens: Sequence[int]) -> dict[str, Any]:
        n_prompt, n_cached, n_answer = self._counts(n_tokens)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_answer,
            "total_tokens": n_prompt + n_answer,
            "prompt_tokens_details": {"cached_tokens": n_cached},
        }


class ChatReply(Choices):
    """`chat.completion` and `chat.completion.chunk`."""

    kind = "chat.completion"

    def opening(self) -> bytes:
        """The role, once per choice, and with the first the prompt's ids."""
        self._head["object"] = "chat.completion.chunk"
        events = []
        for index in range(len(self.prepared.requests)):
            choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            extra = {"prompt_token_ids": self.prepared.prompts[0]} if self.return_ids and index == 0 else {}
            usage = self._usage([0]) if self.continuous_usage else None
            events.append(self._event([{**choice, "finish_reason": None}], usage, **extra))
        return b"".join(events)

    def chunk(self, delta: Delta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.choice,
            "delta": {"content": delta.text} if delta.text or not delta.finish_reason else {},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self.return_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def choice(self, index: int, done: Completion) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": done.text, "refusal": None},
            "logprobs": self._logprobs(done),
            "finish_reason": done.finish_reason,
            "stop_reason": done.stop_reason,
        }
        if self.return_ids:
            choice["token_ids"] = done.token_ids
        return choice

    def _body_extras(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prepared.prompts[0]} if self.return_ids else {}

    def _logprobs(self, part: Delta | Completion) -> dict[str, Any] | None:
        if self.n_logprobs is None:
            return None
        return chat_logprobs(self.vocabulary, part.token_ids, part.logprobs)


class CompletionReply(Choices):
    """`text_completion`, the same object whole and in chunks."""

    kind = "text_completion"

    def __init__(self, stream: TokenStream, fields: CommonFields, model: str, created: int, words: Vocabulary) -> None:
        super().__init__(stream, fields, model, created, words)
        n_choices = len(self.prepared.requests)
        self._offsets = [0] * n_choices
        self._with_prompt = set(range(n_choices)) if self.return_ids else set()

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._choice(delta.choice, delta)

    def choice(self, index: int, done: Completion) -> dict[str, Any]:
        return self._choice(index, done)

    def _choice(self, index: int, part: Delta | Completion) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": part.text,
            "logprobs": None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self.n_logprobs is not None:
            logprobs = completion_logprobs(
                self.vocabulary, part.token_ids, part.logprobs, self._offsets[index], self.n_logprobs
            )
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
            choice["logprobs"] = logprobs
        if self.return_ids:
            choice["token_ids"] = part.token_ids
            if index in self._with_prompt:
                self._with_prompt.discard(index)
                choice["prompt_token_ids"] = self.prepared.requests[index].prompt_ids
        return choice
