"""Request bodies of chats and completions: the fields that are honoured (`known` has those that are not)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from hydrainfer.core import InvalidRequest, SamplingParams
from hydrainfer.server.http import (
    ChatExtensions,
    Described,
    Extensions,
    Named,
    Penalties,
    Shown,
    Streamed,
    Temper,
    Templated,
    Whole,
    field,
)
from hydrainfer.server.openai.parts import Message, ResponseFormat, StructuredOutputs, Tool, ToolChoice
from hydrainfer.server.openai.structured import grammar_of

_QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]
_WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model reasons, in OpenAI's words. What each of them does is up to the chat template."""


class StreamOptions(Described):
    include_usage: bool | None = field("Whether a last event says how many tokens there were.", True, default=False)
    continuous_usage_stats: bool | None = field(
        "Whether every event says how many tokens there are so far; needs include_usage.", True, default=False
    )


class CommonFields(Extensions, Penalties, Temper, Streamed):
    """The fields of both chat and text completions. `SamplingParams` checks ranges; `known` says which other fields are
    refused."""

    stream_options: StreamOptions | None = field("Options of a stream.", {"include_usage": True}, default={})
    n: Whole | None = field("How many answers are made.", 2, default=1, bounds=(1, 128))
    max_tokens: Whole | None = field(
        "The answer ends after this many tokens.", 64, unset="up to the model's context", bounds=(1, None)
    )
    max_completion_tokens: Whole | None = field(
        "OpenAI's newer name of max_tokens, which wins over it.", 64, unset="max_tokens", bounds=(1, None)
    )
    min_tokens: Whole | None = field(
        "The answer does not end before it has this many tokens.", 8, default=0, bounds=(0, None)
    )
    stop_token_ids: list[Whole] | None = field("The answer ends with the first of these tokens.", [2], default=[])
    include_stop_str_in_output: bool | None = field(
        "Whether the text that ended the answer is part of it.", True, default=False
    )
    ignore_eos: bool | None = field(
        "Whether the answer goes on after the model's end token, up to max_tokens.", True, default=False
    )
    logit_bias: dict[str, float] | None = field(
        "Added to the scores of these tokens, by token id; -100 forbids a token.", {"42": -100}, default={}
    )
    skip_special_tokens: bool | None = field("Whether special tokens are left out of the text.", False, default=True)
    bad_words: list[str] | None = field("Words that the answer does not hold.", ["zebra"], default=[])
    drafts: bool | None = field(
        "Whether tokens may be drafted and then verified, which changes none of them.", False, default=True
    )
    return_token_ids: bool | None = field(
        "Whether the answer has the ids of its tokens and of the prompt's.", True, default=False
    )
    progress: bool | None = field(
        "Whether a stream says which stage the request is in until the first token; needs stream.", True, default=False
    )
    best_of: Whole | None = field("Must not be more than n: this server does not choose among answers.", 1, unset="n")
    response_format: Annotated[dict[str, Any] | None, Shown(ResponseFormat | None)] = field(
        "The form of the answer: any text, JSON, or JSON of a schema.", {"type": "json_object"}, unset="any text"
    )
    structured_outputs: Annotated[dict[str, Any] | None, Shown(StructuredOutputs | None)] = field(
        "vLLM's way to say the form of the answer: one of its fields.", {"choice": ["yes", "no"]}, unset="any text"
    )
    guided_json: dict[str, Any] | str | bool | None = field(
        "The answer is JSON of this schema (vLLM's older name).", {"type": "object"}, unset="any text"
    )
    guided_regex: str | None = field(
        "The whole answer matches this regular expression (vLLM's older name).", "[0-9]{1,3}", unset="any text"
    )
    guided_choice: list[str] | None = field(
        "The answer is one of these texts (vLLM's older name).", ["yes", "no"], unset="any text"
    )
    guided_grammar: str | None = field(
        "The answer is a text of this grammar, in Lark or GBNF (vLLM's older name).",
        'start: "yes" | "no"',
        unset="any text",
    )
    modalities: list[str] | None = field("What the answer is made of: text.", ["text"], default=["text"])
    prompt_logprobs: Whole | None = field(
        "Log-probabilities of the prompt's tokens, with this many of the likeliest; not in a stream.",
        2,
        unset="none",
        bounds=(0, 20),
    )
    length_penalty: float | None = field("Must be 1: there is no beam search.", 1, default=1)

    _copied: ClassVar[tuple[str, ...]] = (
        "n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "include_stop_str_in_output",
        "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "skip_special_tokens",
        "drafts", "prompt_logprobs",
    )  # fmt: skip

    def check_supported(self) -> None:
        """Raises `InvalidRequest` naming the first field whose value is not supported."""
        more = self.best_of is not None and self.best_of > (1 if self.n is None else self.n)
        self._refuse("best_of", more, "best_of is not supported by this server; use n")
        self._refuse("modalities", self.modalities not in (None, [], ["text"]), "only the modality text is supported")
        why = "prompt_logprobs is only allowed when stream is false; /v1/completions streams them with echo"
        self._refuse("prompt_logprobs", self.prompt_logprobs is not None and bool(self.stream), why)
        why = "beam search is not supported by this server"
        self._refuse("length_penalty", self.length_penalty not in (None, 1.0), why)
        self._refuse(
            "progress", bool(self.progress and not self.stream), "progress is only allowed when stream is true"
        )
        why = "stream_options is only allowed when stream is true"
        self._refuse("stream_options", self.stream_options is not None and not self.stream, why)

    @staticmethod
    def _refuse(name: str, wrong: bool, why: str) -> None:
        if wrong:
            raise InvalidRequest(why, param=name, code="unsupported_parameter")

    def sampling_fields(self, defaults: Mapping[str, float]) -> dict[str, Any]:
        """The arguments of `SamplingParams`: the checkpoint's defaults, overridden by the request's fields."""
        fields: dict[str, Any] = dict(defaults)
        fields |= {name: value for name in self._copied if (value := getattr(self, name)) is not None}
        stop = self.stop or ()
        fields["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        fields["stop_token_ids"] = tuple(self.stop_token_ids or ())
        fields["logit_bias"] = _biases(self.logit_bias or {})
        fields["bad_words"] = tuple(self.bad_words or ())
        guided = {name: getattr(self, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
        fields["grammar"] = grammar_of(self.response_format, self.structured_outputs, guided)
        return fields

    @property
    def own_names(self) -> dict[str, str]:
        """The names that the client has sent of fields that have several, by the names that errors have."""
        names = {}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.response_format is None or self.response_format.get("type") == "text":
            forms = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
            sent = [name for name in forms if getattr(self, name) is not None]
            if sent:
                names["response_format"] = sent[0]
        return names

    @property
    def limit(self) -> int | None:
        """The length of the answer that is asked for, under either of its names."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats and self.include_usage)


class TextPart(Described):
    type: Literal["text"] = field("The kind of the part.", "text", required=True)
    text: str = field("The text.", "The answer is 7.", required=True)


class PredictedContent(Described):
    """The answer as the client expects it, or most of it."""

    type: Literal["content"] = field("The kind of the prediction.", "content", required=True)
    content: str | list[TextPart] = field("The text, or a list of text parts.", "The answer is 7.", required=True)

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatFields(ChatExtensions, CommonFields):
    """`/v1/chat/completions`. `messages` is checked by `processor.parse_messages`."""

    messages: Annotated[Any, Shown(list[Message])] = field(
        "The chat so far; the model writes the next message.", _QUESTION, required=True
    )
    tools: Annotated[Any, Shown(list[Tool] | None)] = field(
        "The functions that the answer may call, at most 128.", [_WEATHER], default=[]
    )
    tool_choice: Annotated[Any, Shown(Literal["none", "auto", "required"] | ToolChoice | None)] = field(
        "Whether the answer calls functions: as it likes (auto), never (none), always (required), or this one.",
        *("auto", {"type": "function", "function": {"name": "get_weather"}}),
        unset="auto, if there are tools",
    )
    parallel_tool_calls: bool | None = field("Whether an answer may have several calls.", False, default=True)
    logprobs: bool | None = field("Whether the answer has the log-probabilities of its tokens.", True, default=False)
    top_logprobs: Whole | None = field(
        "Log-probabilities of this many of the likeliest tokens at each place, too; needs logprobs.",
        2,
        default=0,
        bounds=(0, 20),
    )
    add_generation_prompt: bool | None = field(
        "Must be true: the prompt always ends where the answer begins.", True, default=True
    )
    include_reasoning: bool | None = field(
        "Whether the answer has the model's reasoning, if it reasons.", False, default=True
    )
    reasoning_effort: Effort | None = field(
        "How much the model reasons: none turns it off; templates that know the others get these.",
        "none",
        unset="the chat template's",
    )
    prediction: PredictedContent | None = field(
        "The answer as you expect it, which makes it faster where it is right and changes no token.",
        {"type": "content", "content": "The answer is 7."},
        unset="none",
    )

    @property
    def template_variables(self) -> dict[str, Any] | None:
        """The values of the chat template's own variables. `chat_template_kwargs` override those that follow from
        `reasoning_effort`."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        thinks = self.reasoning_effort != "none"
        effort = {"reasoning_effort": self.reasoning_effort} if thinks else {}
        return {"enable_thinking": thinks, "thinking": thinks, **effort, **(self.chat_template_kwargs or {})}

    def sampling(self, defaults: Mapping[str, float]) -> SamplingParams:
        """Raises `InvalidRequest` naming the field."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.add_generation_prompt is False:
            raise InvalidRequest("add_generation_prompt=false is not supported", param="add_generation_prompt")
        fields = self.sampling_fields(defaults)
        fields["max_tokens"] = self.limit
        fields["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        if self.prediction is not None:
            fields["prediction"] = self.prediction.text
        try:
            return SamplingParams(**fields)
        except InvalidRequest as e:
            if e.param == "logprobs":
                raise InvalidRequest(e.message.replace("logprobs", "top_logprobs", 1), param="top_logprobs") from None
            raise


class SpecialTokens(Described):
    add_special_tokens: bool | None = field(
        "Whether the tokenizer's special tokens are put before the prompt.", False, unset="as the tokenizer does it"
    )


class CompletionFields(SpecialTokens, CommonFields):
    """`/v1/completions`. `prompt` is checked by `Processor.complete`."""

    prompt: Annotated[Any, Shown(str | list[str] | list[int] | list[list[int]])] = field(
        "The text to continue, or a list of texts; token ids may stand for a text.", "Once upon a time", required=True
    )
    max_tokens: Whole | None = field(
        "The answer ends after this many tokens; 0 goes with echo.", 64, default=16, bounds=(0, None)
    )
    echo: bool | None = field("Whether the prompt stands before each answer.", True, default=False)
    logprobs: Whole | None = field(
        "Log-probabilities of the tokens, with this many of the likeliest at each place.",
        2,
        unset="none",
        bounds=(0, 20),
    )

    def sampling(self, defaults: Mapping[str, float]) -> SamplingParams:
        """Raises `InvalidRequest` naming the field."""
        fields = self.sampling_fields(defaults)
        if self.limit is not None:
            fields["max_tokens"] = self.limit + self.only_echo  # `only_echo`: one hidden token
        if self.echo and self.logprobs is not None:
            fields["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return SamplingParams(**fields, logprobs=self.logprobs)

    @property
    def only_echo(self) -> bool:
        """Whether the answer is the prompt and nothing else."""
        return bool(self.echo) and self.limit == 0


class TokenizeFields(Templated, SpecialTokens, Named):
    """`/tokenize`: a `prompt` or `messages`."""

    prompt: str | None = field("A text; either this or messages is needed.", "Once upon a time", unset="messages")
    messages: Annotated[Any, Shown(list[Message] | None)] = field(
        "A chat, whose prompt is made as for an answer; either this or prompt is needed.", _QUESTION, unset="prompt"
    )
    tools: Annotated[Any, Shown(list[Tool] | None)] = field(
        "The functions that are in the chat's prompt.", [_WEATHER], default=[]
    )
    return_token_strs: bool | None = field("Whether the answer has the tokens' texts, too.", True, default=False)


class DetokenizeFields(Named):
    """`/detokenize`."""

    tokens: Annotated[Any, Shown(list[int])] = field("The token ids.", [300, 301, 302], required=True)


Fields = TypeVar("Fields", bound=BaseModel)


def parse(kind: type[Fields], body: object) -> Fields:
    """The fields of a JSON body. Raises `InvalidRequest` naming the first wrong field; the message never contains its
    value."""
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"][:1])
        plain = {"missing": "is required", "model_type": "should be an object"}
        message = plain.get(first["type"]) or first["msg"].lower().replace("input ", "")
        raise InvalidRequest(f"{where}: {message}", param=where) from None


def _biases(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(token), bias) for token, bias in biases.items())
    except ValueError:
        raise InvalidRequest("logit_bias: keys must be token ids", param="logit_bias") from None
