"""OpenAI's Responses: the fields of request bodies, as `responses_chat` reads them."""

from __future__ import annotations

from typing import Any, Literal

from hydrainfer.server.http import ChatExtensions, Described, Penalties, Streamed, Temper, Whole, field
from hydrainfer.server.openai import Effort

_SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
_WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}


class Part(Described):
    """A part of a message."""

    type: str = field(
        "The kind of the part.", choices=("input_text", "output_text", "input_image", "refusal"), required=True
    )
    text: str | None = field("The text, of a text part.", "What is this?", unset="none")
    refusal: str | None = field("The text of a refusal.", "I cannot.", unset="none")
    image_url: str | None = field(
        "The picture, of an input_image: a data: URL, or an http(s) URL if the server fetches.",
        "https://example.com/stars.png",
        unset="none",
    )


class Item(Described):
    """A message, a call, its result, or a reasoning."""

    type: str | None = field(
        "The kind of the item.",
        choices=("message", "function_call", "function_call_output", "reasoning"),
        default="message",
    )
    role: str | None = field("Who says a message.", choices=("user", "assistant", "system", "developer"), unset="none")
    content: str | list[Part] | None = field(
        "The text of a message, or a list of its parts; or the parts of a reasoning.", "What is 3 + 4?", unset="none"
    )
    call_id: str | None = field("The id of a call, which its result repeats.", "call_1", unset="none")
    name: str | None = field("The function of a call.", "get_weather", unset="none")
    arguments: str | None = field("The arguments of a call, as the text of a JSON object.", "{}", default="{}")
    output: str | list[Part] | None = field(
        "The result of a call: a text, or a list of parts.", "It rains.", unset="none"
    )


class Tool(Described):
    """A function that the answer may call."""

    type: Literal["function"] = field("The kind of the tool.", "function", required=True)
    name: str = field("The name: letters, digits and _ . : -, at most 128.", "get_weather", required=True)
    description: str | None = field("What it does, for the model.", "The weather of a city", unset="none")
    parameters: dict[str, Any] | None = field(
        "The JSON schema of its arguments.", {"type": "object", "properties": {}}, unset="none"
    )
    strict: bool | None = field("Has no effect: required calls always match the schema.", True, default=False)


class ToolChoice(Described):
    """The function that the answer must call."""

    type: Literal["function"] = field("The kind of the choice.", "function", required=True)
    name: str = field("The function.", "get_weather", required=True)


class Format(Described):
    type: str = field(
        "Any text, a JSON object, or JSON of a schema.", choices=("text", "json_object", "json_schema"), required=True
    )
    name: str | None = field("A name for the schema, which has no effect.", "sum", unset="none")
    schema_: dict[str, Any] | None = field(
        "The JSON schema, if type is json_schema.", _SCHEMA, unset="none", alias="schema"
    )


class Text(Described):
    format: Format | None = field("The form of the answer.", {"type": "json_object"}, default={"type": "text"})
    verbosity: str | None = field(
        "Must be medium: say in the prompt how long an answer should be.", "medium", default="medium"
    )


class Reasoning(Described):
    effort: Effort | None = field(
        "How much the model reasons: none turns it off; templates that know the others get these.",
        "none",
        unset="the chat template's",
    )


class ResponseFields(ChatExtensions, Penalties, Temper, Streamed):
    """`/v1/responses`. Nothing is stored: every request has the whole conversation."""

    input: str | list[Item] = field(
        "The question, or the conversation as a list of items.", "What is 3 + 4?", required=True
    )
    instructions: str | None = field("What the model shall keep to.", "Be brief.", unset="none")
    max_output_tokens: Whole | None = field(
        "The answer ends after this many tokens.", 64, unset="up to the model's context", bounds=(1, None)
    )
    tools: list[Tool] | None = field("The functions that the answer may call, at most 128.", [_WEATHER], default=[])
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = field(
        "Whether the answer calls functions: as it likes (auto), never (none), always (required), or this one.",
        *("auto", {"type": "function", "name": "get_weather"}),
        default="auto",
    )
    parallel_tool_calls: bool | None = field("Whether an answer may have several calls.", False, default=True)
    text: Text | None = field(
        "The form of the answer.", {"format": {"type": "json_object"}}, default={"format": {"type": "text"}}
    )
    reasoning: Reasoning | None = field("How much the model reasons.", {"effort": "none"}, unset="the chat template's")
    include: list[str] | None = field(
        "Must be empty or reasoning.encrypted_content, which no answer has.",
        ["reasoning.encrypted_content"],
        default=[],
    )
    truncation: str | None = field("Must be disabled: shorten the input.", "disabled", default="disabled")
