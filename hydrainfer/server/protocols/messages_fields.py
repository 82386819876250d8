"""Anthropic's Messages: the fields of request bodies, as `messages_chat` reads them."""

from __future__ import annotations

from typing import Any, Literal

from hydrainfer.server.http import ChatExtensions, Described, Streamed, Temper, Whole, field

_SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
EFFORTS = ("low", "medium", "high", "xhigh", "max")
_WEATHER = {"name": "get_weather", "input_schema": {"type": "object", "properties": {}}}


class Source(Described):
    """The bytes of a picture, or where they are."""

    type: str = field("Bytes in the body, or a URL.", choices=("base64", "url"), required=True)
    media_type: str | None = field(
        "The format of the bytes; they say it themselves, too.", "image/png", default="image/png"
    )
    data: str | None = field("The bytes of the picture in base64.", "iVBORw0KGgo=", unset="none")
    url: str | None = field("The address of the picture.", "https://example.com/stars.png", unset="none")


class Block(Described):
    """A part of a message."""

    type: str = field(
        "The kind of the block.", choices=("text", "image", "tool_use", "tool_result", "thinking"), required=True
    )
    text: str | None = field("The text, of a text block.", "What is this?", unset="none")
    source: Source | None = field(
        "The picture, of an image block.", {"type": "url", "url": "https://example.com/stars.png"}, unset="none"
    )
    id: str | None = field("The id of a call.", "toolu_1", unset="none")
    name: str | None = field("The function of a call.", "get_weather", unset="none")
    input: dict[str, Any] | None = field("The arguments of a call.", {"city": "Cologne"}, default={})
    tool_use_id: str | None = field("The call that a tool_result answers.", "toolu_1", unset="none")
    content: str | list[dict[str, Any]] | None = field(
        "The result of a call: a text, or a list of text and image blocks.", "It rains.", unset="an empty result"
    )
    thinking: str | None = field("The reasoning, of a thinking block.", "3 + 4 is 7.", unset="none")


class Turn(Described):
    """A message of the chat."""

    role: str = field("Who says it.", choices=("user", "assistant"), required=True)
    content: str | list[Block] = field("The text, or a list of blocks.", "What is 3 + 4?", required=True)


class Text(Described):
    type: Literal["text"] = field("The kind of the block.", "text", required=True)
    text: str = field("The text.", "Be brief.", required=True)


class Tool(Described):
    """A function that the answer may call."""

    name: str = field("The name: letters, digits and _ . : -, at most 128.", "get_weather", required=True)
    description: str | None = field("What it does, for the model.", "The weather of a city", unset="none")
    input_schema: dict[str, Any] | None = field(
        "The JSON schema of its arguments.", {"type": "object", "properties": {}}, unset="none"
    )


class ToolChoice(Described):
    type: str = field(
        "The answer calls as it likes, at least once, the named tool, or never.",
        choices=("auto", "any", "tool", "none"),
        required=True,
    )
    name: str | None = field("The tool, if type is tool.", "get_weather", unset="none")
    disable_parallel_tool_use: bool | None = field("Whether there is at most one call.", True, default=False)


class Thinking(Described):
    type: str = field(
        "Whether the model reasons and shows it.", choices=("enabled", "adaptive", "disabled"), required=True
    )
    budget_tokens: Whole | None = field("Sets no limit here.", 1024, unset="none")


class Form(Described):
    type: Literal["json_schema"] = field("The kind of the form.", "json_schema", required=True)
    schema_: dict[str, Any] = field("The JSON schema of the answer.", _SCHEMA, required=True, alias="schema")


class Output(Described):
    effort: str | None = field(
        "How much the model reasons, if thinking is on.", choices=EFFORTS, unset="the chat template's"
    )
    format: Form | None = field("The form of the answer.", {"type": "json_schema", "schema": _SCHEMA}, unset="any text")


class PromptFields(ChatExtensions, Temper, Streamed):
    """What makes the prompt."""

    messages: list[Turn] = field(
        "The chat so far, which the user's message ends.",
        [{"role": "user", "content": "What is 3 + 4?"}],
        required=True,
    )
    system: str | list[Text] | None = field("What the model shall keep to.", "Be brief.", unset="none")
    tools: list[Tool] | None = field("The functions that the answer may call, at most 128.", [_WEATHER], default=[])
    tool_choice: ToolChoice | None = field(
        "Whether the answer calls functions; needs tools.", {"type": "auto"}, unset="auto, if there are tools"
    )
    thinking: Thinking | None = field(
        "Whether the model reasons, and shows it.", {"type": "disabled"}, unset="the chat template's, not shown"
    )
    stop_sequences: list[str] | None = field("The answer ends before the first of these texts.", ["\n\n"], default=[])
    output_config: Output | None = field(
        "The form of the answer.", {"format": {"type": "json_schema", "schema": _SCHEMA}}, unset="any text"
    )
    output_format: Form | None = field(
        "The older name of output_config.format.", {"type": "json_schema", "schema": _SCHEMA}, unset="output_config"
    )


class MessageFields(PromptFields):
    """`/v1/messages`."""

    max_tokens: Whole = field("The answer ends after this many tokens.", 64, required=True, bounds=(1, None))


class CountFields(PromptFields):
    """`/v1/messages/count_tokens`: takes the same fields; those that do not change the prompt change nothing."""

    max_tokens: Whole | None = field("Has no effect: nothing is answered.", 64, unset="none", bounds=(1, None))
