"""Request bodies of chats and completions: the types of the fields that are honoured (`known` has all of them)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from hydrainfer.core import InvalidRequest, SamplingParams
from hydrainfer.server.openai.structured import grammar_of


def _whole(value: object) -> object:
    """`value`, with 16.0 turned into 16: JSON has one kind of number, and some clients always write a decimal point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonFields(BaseModel):
    """The fields of both chat and text completions. `SamplingParams` checks ranges; `known` says which other fields are
    refused."""

    model_config = ConfigDict(extra="ignore", strict=True)
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Whole | None = None
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    min_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    drafts: bool | None = None
    return_token_ids: bool | None = None
    timings: bool | None = None
    progress: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    priority: Whole | None = None
    deadline_s: float | None = None
    best_of: Whole | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    modalities: list[str] | None = None
    prompt_logprobs: Whole | None = None
    length_penalty: float | None = None

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
    def limit(self) -> int | None:
        """The length of the answer that is asked for, under either of its names."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats and self.include_usage)


class TextPart(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    type: Literal["text"]
    text: str


class PredictedContent(BaseModel):
    """The answer as the client expects it, or most of it."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatFields(CommonFields):
    """`/v1/chat/completions`. `messages` is checked by `processor.parse_messages`."""

    messages: Any
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    add_generation_prompt: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    prediction: PredictedContent | None = None

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


class CompletionFields(CommonFields):
    """`/v1/completions`. `prompt` is checked by `Processor.complete`."""

    prompt: Any
    echo: bool | None = None
    logprobs: Whole | None = None
    add_special_tokens: bool | None = None

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


class TokenizeFields(BaseModel):
    """`/tokenize`: a `prompt` or `messages`."""

    model_config = ConfigDict(extra="ignore", strict=True)
    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    tools: Any = None
    mm_processor_kwargs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(BaseModel):
    """`/detokenize`."""

    model_config = ConfigDict(extra="ignore", strict=True)
    model: str | None = None
    tokens: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer"}})]


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
