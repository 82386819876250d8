"""Ollama's API: the fields of request bodies, as `ollama_chat` reads them."""

from __future__ import annotations

from typing import Any

from hydrainfer.server.http import ChatExtensions, Described, Named, Penalties, Temper, Whole, field
from hydrainfer.server.openai import Tool

_SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
EFFORTS = ("low", "medium", "high")
_WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
"""A PNG of one red pixel, in base64."""


class CalledFunction(Described):
    name: str = field("The function.", "get_weather", required=True)
    arguments: dict[str, Any] | None = field("Its arguments.", {"city": "Cologne"}, default={})


class Call(Described):
    """A call that the assistant has made. It has no id: results answer calls in their order."""

    function: CalledFunction = field("What is called.", {"name": "get_weather", "arguments": {}}, required=True)


class Turn(Described):
    """A message of the chat."""

    role: str = field("Who says it.", choices=("user", "assistant", "system", "tool"), required=True)
    content: str | None = field("The text.", "What is 3 + 4?", default="")
    images: list[str] | None = field("The files of the pictures, in base64.", [PIXEL], default=[])
    tool_calls: list[Call] | None = field(
        "The calls of an assistant's message.", [{"function": {"name": "get_weather", "arguments": {}}}], default=[]
    )
    tool_name: str | None = field("The function whose result a tool's message is.", "get_weather", unset="none")
    thinking: str | None = field("The reasoning of an assistant's message.", "3 + 4 is 7.", unset="none")


class OptionFields(Penalties, Temper):
    """Those of Ollama's options that are honoured."""

    min_p: float | None = field(
        "Only tokens are drawn that have at least this share of the likeliest token's probability.",
        0.05,
        unset="that of the request",
        bounds=(0, 1),
    )
    seed: Whole | None = field("The same seed gives the same tokens.", 7, unset="that of the request")
    repeat_penalty: float | None = field(
        "Ollama's name of repetition_penalty; 0 is not allowed.", 1.1, unset="that of the request", bounds=(0, 10)
    )
    num_predict: Whole | None = field(
        "The answer ends after this many tokens; 0 and below mean no limit.", 64, default=-1
    )


class OllamaFields(ChatExtensions, Named):
    """The fields of both `/api/chat` and `/api/generate`."""

    stream: bool | None = field("Whether the answer comes as lines, token by token.", False, default=True)
    format: str | dict[str, Any] | None = field(
        "The form of the answer: json for any JSON object, or a JSON schema.", *("json", _SCHEMA), unset="any text"
    )
    options: OptionFields | None = field("How tokens are drawn.", {"temperature": 0, "num_predict": 64}, default={})
    think: bool | str | None = field(
        "Whether the model reasons, or how much: low, medium or high.", False, unset="the chat template's"
    )
    logprobs: bool | None = field("Whether the answer has the log-probabilities of its tokens.", True, default=False)
    top_logprobs: Whole | None = field(
        "Log-probabilities of this many of the likeliest tokens at each place, too; needs logprobs.",
        2,
        default=0,
        bounds=(0, 20),
    )


class OllamaChatFields(OllamaFields):
    """`/api/chat`. Without messages it only says that the model is loaded."""

    messages: list[Turn] | None = field(
        "The chat so far; the model writes the next message.",
        [{"role": "user", "content": "What is 3 + 4?"}],
        default=[],
    )
    tools: list[Tool] | None = field("The functions that the answer may call, at most 128.", [_WEATHER], default=[])


class GenerateFields(OllamaFields):
    """`/api/generate`. Without a prompt and pictures it only says that the model is loaded."""

    prompt: str | None = field("The question, or with raw the text to continue.", "What is 3 + 4?", default="")
    system: str | None = field("What the model shall keep to; not with raw.", "Be brief.", unset="none")
    images: list[str] | None = field("The files of the pictures, in base64; not with raw.", [PIXEL], default=[])
    raw: bool | None = field("Whether the prompt is a text to continue, without a template.", True, default=False)


class ShowFields(Named):
    """`/api/show`."""

    name: str | None = field("The older name of model.", "shapes-and-digits", unset="model")
