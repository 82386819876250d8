"""The answers that Python callers get."""

from __future__ import annotations

from dataclasses import dataclass

from hydrainfer.core import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function. `arguments`: JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. `logprobs`: one entry per token if they were asked for, otherwise empty. `finish_reason`: None while
    it goes on. `tool_calls`: the calls in it once it has ended, if the chat had tools; `text` holds them, too."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of its tokens together; None if it was not asked for."""
        return sum(one.logprob for one in self.logprobs) if self.logprobs else None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt or chat. `prompt`: the text that was given, or else the decoded ids, with one
    placeholder for each picture. `prompt_token_ids`: with the placeholders expanded. `prompt_logprobs`: one entry for
    each of these ids, None for the first; empty if not asked for. `finished`: no choice goes on. `num_cached_tokens`:
    the tokens of the prompt that were found in the cache."""

    request_id: str
    prompt: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finished: bool = True
    num_cached_tokens: int = 0
