"""Bodies of chat and text completions, whole and in chunks. The cost per token is only a dict and orjson."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import orjson

from hydrainfer.core import HydraError, Prediction, TokenLogprobs
from hydrainfer.metrics import Timeline
from hydrainfer.processor import AnswerPiece, AnswerStream, Detokenizer, Vocabulary, answer_stream, together
from hydrainfer.server.live import DONE, Completion, Delta, TokenStream, error_event, event
from hydrainfer.server.openai.fields import ChatFields, CommonFields, CompletionFields
from hydrainfer.server.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs, prompt_logprobs
from hydrainfer.server.openai.timings import breakdown


class Reply(ABC):
    """One answer, whole or in chunks, in the format of one protocol. `model`: the name that the client used."""

    media_type = "text/event-stream"

    def __init__(self, stream: TokenStream, fields: CommonFields, model: str, created: int, words: Vocabulary) -> None:
        self.prepared = prepared = stream.prepared
        self._n_cached, self._prompt_logprobs = stream.n_cached, stream.prompt_logprobs
        self.model, self.created, self.vocabulary = model, created, words
        self.timings, self.progress = bool(fields.timings), bool(fields.progress)
        self.include_usage = fields.include_usage
        self.n_logprobs = prepared.sampling.logprobs

    def opening(self) -> bytes:
        """The bytes to send before the first token."""
        return b""

    @abstractmethod
    def events(self, deltas: Sequence[Delta], n_tokens: Sequence[int]) -> bytes:
        """The bytes of these deltas. `n_tokens`: the tokens produced so far, per choice."""

    def doing(self, interval: str) -> bytes:  # noqa: ARG002
        """The bytes that say which interval the request is in, for requests with `progress`."""
        return b""

    @abstractmethod
    def closing(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> bytes:
        """The bytes to send at the end. `timelines`: one per choice."""

    @abstractmethod
    def body(self, done: Sequence[Completion], timelines: Sequence[Timeline | None]) -> bytes:
        """The whole answer."""

    def error(self, error: HydraError) -> bytes:
        """The bytes of an error after the first output, and of the end of the stream."""
        return error_event(error)

    def _timed(self, usage: dict[str, Any], timelines: Sequence[Timeline | None]) -> dict[str, Any]:
        """The usage, with the latency breakdown if the request asked for it."""
        return {**usage, "hydrainfer": breakdown(timelines)} if self.timings else usage

    def _counts(self, n_tokens: Sequence[int]) -> tuple[int, int, int]:
        """The numbers of prompt tokens, of those that were cached for all choices of their prompt, and of answer
        tokens."""
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
        self._n_prompt_top = fields.prompt_logprobs
        self._predictions = [Prediction(r.predicted_ids) for r in self.prepared.requests if r.predicted_ids]
        self._head = {"id": self.prepared.id, "object": self.kind, "created": created, "model": model}

    @abstractmethod
    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """One entry of `choices` in a chunk, or None if it would be empty."""

    @abstractmethod
    def choice(self, index: int, done: Completion) -> dict[str, Any]:
        """One entry of `choices` in the whole answer."""

    def events(self, deltas: Sequence[Delta], n_tokens: Sequence[int]) -> bytes:
        """A chunk for each delta that is not empty."""
        self._follow((d.choice, d.token_ids) for d in deltas)
        usage = self._usage(n_tokens) if self.continuous_usage else None
        return b"".join(self._event([chunk], usage) for d in deltas if (chunk := self.chunk(d)) is not None)

    def doing(self, interval: str) -> bytes:
        """A chunk without choices."""
        return self._event([], None, progress={"interval": interval})

    def _tells(self, delta: Delta) -> bool:
        """Whether a delta is sent even without text."""
        return delta.finish_reason is not None or self.return_ids or self.n_logprobs is not None

    def closing(self, n_tokens: Sequence[int], timelines: Sequence[Timeline | None]) -> bytes:
        """The usage chunk, if the request asked for it, and `[DONE]`."""
        return (self._event([], self._timed(self._usage(n_tokens), timelines)) if self.include_usage else b"") + DONE

    def body(self, done: Sequence[Completion], timelines: Sequence[Timeline | None]) -> bytes:
        self._follow((i, one.token_ids) for i, one in enumerate(done))
        return orjson.dumps(
            {
                **self._head,
                "choices": [self.choice(i, one) for i, one in enumerate(done)],
                "usage": self._timed(self._usage([len(one.token_ids) for one in done]), timelines),
                **self._body_extras(),
            }
        )

    def _body_extras(self) -> dict[str, Any]:
        return {}

    def _likely_prompt(self, index: int) -> dict[str, Any]:
        """The field `prompt_logprobs` for a choice's prompt, if the request asked for it."""
        if self._n_prompt_top is None:
            return {}
        ids = self.prepared.requests[index].prompt_ids
        found = prompt_logprobs(self.vocabulary, ids, self._prompt_logprobs[index], self._n_prompt_top)
        return {"prompt_logprobs": found}

    def _event(self, choices: list[dict[str, Any]], usage: Mapping[str, Any] | None, **extra: Any) -> bytes:
        body = {**self._head, "choices": choices, **extra}
        if self.include_usage:
            body["usage"] = usage
        return event(orjson.dumps(body))

    def _usage(self, n_tokens: Sequence[int]) -> dict[str, Any]:
        n_prompt, n_cached, n_answer = self._counts(n_tokens)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_answer,
            "total_tokens": n_prompt + n_answer,
            "prompt_tokens_details": {"cached_tokens": n_cached},
            **self._predicted(),
        }

    def _follow(self, sampled: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Compare new tokens of these choices with what was predicted."""
        if self._predictions:
            for choice, token_ids in sampled:
                self._predictions[choice].follow(token_ids)

    def _predicted(self) -> dict[str, Any]:
        """How much of a prediction has come true. It depends on the answer alone, not on what was verified."""
        if not self._predictions:
            return {}
        n_right = sum(one.n_right for one in self._predictions)
        n_wrong = max(sum(map(len, self._predictions)) - n_right, 0)
        details = {"accepted_prediction_tokens": n_right, "rejected_prediction_tokens": n_wrong}
        return {"completion_tokens_details": details}


class ChatReply(Choices):
    """`chat.completion` and `chat.completion.chunk`."""

    kind = "chat.completion"

    def __init__(self, stream: TokenStream, fields: CommonFields, model: str, created: int, words: Vocabulary) -> None:
        super().__init__(stream, fields, model, created, words)
        self._streams = [self._reader() for _ in self.prepared.requests]
        self._shows_reasoning = not (isinstance(fields, ChatFields) and fields.include_reasoning is False)

    def _reader(self) -> AnswerStream:
        """A new reader of the text of one choice."""
        return answer_stream(self.prepared.thinking)

    def opening(self) -> bytes:
        """A chunk with the role for each choice. The first one also has the prompt's ids, if the request asked for
        ids."""
        self._head["object"] = "chat.completion.chunk"
        events = []
        for index in range(len(self.prepared.requests)):
            choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            extra = {"prompt_token_ids": self.prepared.prompts[0]} if self.return_ids and index == 0 else {}
            usage = self._usage([0]) if self.continuous_usage else None
            events.append(self._event([{**choice, "finish_reason": None}], usage, **extra))
        return b"".join(events)

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        piece = self._read(delta.choice, delta.text, delta.finish_reason)
        if not (piece or self._tells(delta)):
            return None
        choice: dict[str, Any] = {
            "index": delta.choice,
            "delta": self._delta(piece, last=delta.finish_reason is not None),
            "logprobs": self._logprobs(delta),
            "finish_reason": self._finish(delta.choice, delta),
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self.return_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def choice(self, index: int, done: Completion) -> dict[str, Any]:
        piece = self._read(index, done.text, done.finish_reason)
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "refusal": None, **self._message(piece)},
            "logprobs": self._logprobs(done),
            "finish_reason": self._finish(index, done),
            "stop_reason": done.stop_reason,
        }
        if self.return_ids:
            choice["token_ids"] = done.token_ids
        return choice

    def _read(self, index: int, text: str, finish_reason: str | None) -> AnswerPiece:
        """The reasoning, content and calls in a piece of a choice's text. `finish_reason`: of the last piece."""
        last, cut = finish_reason is not None, finish_reason == "length"
        piece = together(self._streams[index].push(text, last=last, cut=cut))
        return piece if self._shows_reasoning else msgspec.structs.replace(piece, reasoning="")

    def _delta(self, piece: AnswerPiece, *, last: bool) -> dict[str, Any]:
        content = {"content": piece.content} if piece.content or not (piece.reasoning or last) else {}
        return _reasoned(piece) | content

    def _message(self, piece: AnswerPiece) -> dict[str, Any]:
        return {"content": (piece.content or None) if piece.reasoning else piece.content, **_reasoned(piece)}

    def _finish(self, index: int, part: Delta | Completion) -> str | None:  # noqa: ARG002
        """The finish reason of choice `index`, of which `part` is the last that was read."""
        return part.finish_reason

    def _body_extras(self) -> dict[str, Any]:
        ids = {"prompt_token_ids": self.prepared.prompts[0]} if self.return_ids else {}
        return {**ids, **self._likely_prompt(0)}

    def _logprobs(self, part: Delta | Completion) -> dict[str, Any] | None:
        if self.n_logprobs is None:
            return None
        return chat_logprobs(self.vocabulary, part.token_ids, part.logprobs)


def _reasoned(piece: AnswerPiece) -> dict[str, str]:
    """The reasoning under both field names that clients know; empty if there is none."""
    return {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning} if piece.reasoning else {}


class CompletionReply(Choices):
    """`text_completion`, which is the same object whole and in chunks. With `echo`, the text of each choice begins with
    its prompt, decoded from the ids."""

    kind = "text_completion"

    def __init__(self, stream: TokenStream, fields: CommonFields, model: str, created: int, words: Vocabulary) -> None:
        super().__init__(stream, fields, model, created, words)
        n_choices = len(self.prepared.requests)
        echo = isinstance(fields, CompletionFields) and bool(fields.echo)
        self._only_echo = isinstance(fields, CompletionFields) and fields.only_echo
        self._to_echo = set(range(n_choices)) if echo else set()
        self._with_prompt = set(range(n_choices)) if self.return_ids else set()
        self._skip_special = self.prepared.sampling.skip_special_tokens
        self._offsets = [
            TextOffsets(words, skip_special=self._skip_special, continues=not echo) for _ in range(n_choices)
        ]

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        return self._choice(delta.choice, delta) if delta.text or self._tells(delta) else None

    def choice(self, index: int, done: Completion) -> dict[str, Any]:
        return {**self._choice(index, done), **self._likely_prompt(index)}

    def _counts(self, n_tokens: Sequence[int]) -> tuple[int, int, int]:
        return super()._counts([] if self._only_echo else n_tokens)

    def _choice(self, index: int, part: Delta | Completion) -> dict[str, Any]:
        text, ids, likely = ("", [], []) if self._only_echo else (part.text, part.token_ids, part.logprobs)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if self._only_echo else part.finish_reason,
            "stop_reason": None if self._only_echo else part.stop_reason,
        }
        if self.return_ids:
            choice["token_ids"] = ids
            if index in self._with_prompt:
                self._with_prompt.discard(index)
                choice["prompt_token_ids"] = self.prepared.requests[index].prompt_ids
        told: Sequence[TokenLogprobs | None] = likely
        if index in self._to_echo:
            self._to_echo.discard(index)
            prompt = self.prepared.requests[index].prompt_ids
            ids, told = [*prompt, *ids], [None, *self._prompt_logprobs[index], *likely]
            choice["text"] = self._spelt(prompt) + text
        if self.n_logprobs is not None:
            offsets = self._offsets[index].push(ids)
            choice["logprobs"] = completion_logprobs(self.vocabulary, ids, told, offsets, self.n_logprobs)
        return choice

    def _spelt(self, ids: Sequence[int]) -> str:
        words = Detokenizer(self.vocabulary, skip_special=self._skip_special)
        return words.push(ids) + words.flush()
