"""The objects inside the bodies of chats, for descriptions only: `processor` and `structured` check them."""

from __future__ import annotations

from typing import Any, Literal

from hydrainfer.server.http import Described, field

_SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
_PICTURE = "https://example.com/stars.png"


class Url(Described):
    url: str = field(
        "A data: URL with the bytes in base64, or an http(s) URL if the server fetches.", _PICTURE, required=True
    )


class ContentPart(Described):
    """A text, a picture or a video. Only user messages may have pictures and videos."""

    type: str = field("The kind of the part.", choices=("text", "image_url", "video_url"), required=True)
    text: str | None = field("The text, of a text part.", "What is this?", unset="none")
    image_url: Url | None = field("The picture, of an image_url part.", {"url": _PICTURE}, unset="none")
    video_url: Url | None = field(
        "The video, of a video_url part, for models that take videos.",
        {"url": "https://example.com/walk.mp4"},
        unset="none",
    )


class CalledFunction(Described):
    name: str = field("The name of the function.", "get_weather", required=True)
    arguments: str | dict[str, Any] | None = field(
        "Its arguments: a JSON object, or the text of one.", '{"city": "Cologne"}', default="{}"
    )


class Call(Described):
    """A call that the assistant has made."""

    id: str = field("The id, which the tool's message repeats.", "call00000", required=True)
    type: Literal["function"] | None = field("The kind of the call.", "function", default="function")
    function: CalledFunction = field("What is called.", {"name": "get_weather", "arguments": "{}"}, required=True)


class Message(Described):
    """A message of a chat."""

    role: str = field("Who says it.", choices=("user", "assistant", "system", "developer", "tool"), required=True)
    content: str | list[ContentPart] | None = field(
        "The text, or a list of parts; an assistant's message with calls may have none.", "Hello", unset="an empty text"
    )
    name: str | None = field(
        "The name of the participant or the function, for templates that show it.", "Ada", unset="none"
    )
    tool_calls: list[Call] | None = field(
        "The calls of an assistant's message.",
        [{"id": "call00000", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}],
        default=[],
    )
    tool_call_id: str | None = field(
        "The id of the call that a tool's message answers, which it needs.", "call00000", unset="none"
    )
    reasoning_content: str | None = field(
        "The reasoning of an assistant's message, for templates that show it.", "3 + 4 is 7.", unset="none"
    )
    refusal: str | None = field("The text of an assistant's message that is a refusal.", "I cannot.", unset="none")


class Function(Described):
    name: str = field("The name: letters, digits and _ . : -, at most 128.", "get_weather", required=True)
    description: str | None = field("What it does, for the model.", "The weather of a city", unset="none")
    parameters: dict[str, Any] | None = field(
        "The JSON schema of its arguments.", {"type": "object", "properties": {}}, unset="none"
    )
    strict: bool | None = field("Has no effect: required calls always match the schema.", True, default=False)


class Tool(Described):
    """A function that an answer may call."""

    type: Literal["function"] = field("The kind of the tool.", "function", required=True)
    function: Function = field("The function.", {"name": "get_weather"}, required=True)


class FunctionName(Described):
    name: str = field("The name of a function among the tools.", "get_weather", required=True)


class ToolChoice(Described):
    """The function that the answer must call."""

    type: Literal["function"] = field("The kind of the choice.", "function", required=True)
    function: FunctionName = field("The function.", {"name": "get_weather"}, required=True)


class NamedSchema(Described):
    name: str | None = field("A name for the schema, which has no effect.", "sum", unset="none")
    schema_: dict[str, Any] = field("The JSON schema.", _SCHEMA, required=True, alias="schema")


class ResponseFormat(Described):
    """OpenAI's form of an answer."""

    type: str = field(
        "Any text, a JSON object, or JSON of json_schema.",
        choices=("text", "json_object", "json_schema"),
        required=True,
    )
    json_schema: NamedSchema | None = field(
        "The schema, if type is json_schema.", {"name": "sum", "schema": _SCHEMA}, unset="none"
    )
    schema_: dict[str, Any] | None = field(
        "The schema, if type is json_object, as llama.cpp takes it.", _SCHEMA, unset="any object", alias="schema"
    )


class StructuredOutputs(Described):
    """vLLM's form of an answer: one of these fields."""

    json_: dict[str, Any] | str | None = field(
        "The answer is JSON of this schema.", _SCHEMA, unset="none", alias="json"
    )
    regex: str | None = field("The answer matches this regular expression.", "[0-9]{1,3}", unset="none")
    choice: list[str] | None = field("The answer is one of these texts.", ["yes", "no"], unset="none")
    grammar: str | None = field("The answer is a text of this grammar.", 'start: "yes" | "no"', unset="none")
    json_object: bool | None = field("Whether the answer is any JSON object.", True, default=False)
