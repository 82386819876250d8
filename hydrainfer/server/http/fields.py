"""Descriptions of request fields: a sentence, a default, an example and bounds for each.

The OpenAPI description and the page at `/docs` show them.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from hydrainfer.core.request import MAX_PRIORITY

MODELS = "the checkpoint's own (generation_config.json), else {}"
"""What applies if a sampling field is not sent; with vLLM's default."""


class Described(BaseModel):
    """A JSON object of a request. Every field is made by `field`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    @classmethod
    def honoured(cls) -> frozenset[str]:
        """The names of the fields."""
        return frozenset(cls.model_fields)


class Shown(NamedTuple):
    """Metadata of a field whose values are checked elsewhere: the type that its description has."""

    type: Any

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(TypeAdapter(self.type).core_schema)


def field(
    about: str,
    *examples: Any,
    default: Any = None,
    unset: str = "",
    bounds: tuple[float | None, float | None] = (None, None),
    choices: tuple[Any, ...] = (),
    required: bool = False,
    alias: str | None = None,
    min_length: int | None = None,
) -> Any:
    """A field of a `Described`. `about`: a sentence. `default`: the value that means the same as leaving the field out;
    if that is no constant, `unset` says what applies. `bounds`: the least and the greatest number, or None. `choices`:
    all values. `alias`: the name of the field, where that of the attribute is another. Ranges are described here and
    checked elsewhere, except for `min_length`."""
    more: dict[str, Any] = {}
    if not required:
        more["default"] = default
    if unset:
        more["x-unset"] = unset
    if choices:
        more["enum"] = list(choices)
    more |= {name: bound for name, bound in zip(("minimum", "maximum"), bounds, strict=True) if bound is not None}
    return Field(
        ... if required else None,
        description=about,
        examples=list(examples or choices[:1]),
        json_schema_extra=more,
        alias=alias,
        min_length=min_length,
    )


def _whole(value: object) -> object:
    """`value`, with 16.0 turned into 16: JSON has one kind of number, and some clients always write a decimal point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]


class Named(Described):
    """What a body of any protocol may name."""

    model: str | None = field(
        "The name of the model, which must be one of this server's.",
        "shapes-and-digits",
        unset="the model that is served",
    )


class Streamed(Named):
    """A body that asks for an answer."""

    stream: bool | None = field("Whether the answer is sent token by token, as it is made.", True, default=False)


class Temper(Described):
    """The fields that say how freely tokens are drawn."""

    temperature: float | None = field(
        "How freely tokens are drawn: 0 always takes the likeliest one, higher values vary more.",
        *(0.7, 0),
        unset=MODELS.format(1),
        bounds=(0, 2),
    )
    top_p: float | None = field(
        "Only the likeliest tokens that together have this probability are drawn.",
        0.9,
        unset=MODELS.format(1),
        bounds=(0, 1),
    )
    top_k: Whole | None = field(
        "Only this many of the likeliest tokens are drawn; 0 and -1 mean all of them.",
        40,
        unset=MODELS.format(0),
        bounds=(-1, None),
    )


class Penalties(Described):
    """Texts that end an answer, and penalties of tokens that are in it already."""

    stop: str | list[str] | None = field(
        "The answer ends before the first of these texts: one text, or a list of up to 16.", ["\n\n"], default=[]
    )
    presence_penalty: float | None = field(
        "Taken off the score of every token that the answer has already; below 0 it favours them.",
        0.5,
        default=0,
        bounds=(-2, 2),
    )
    frequency_penalty: float | None = field(
        "Taken off the score of a token for each time that the answer has it already.",
        0.5,
        default=0,
        bounds=(-2, 2),
    )


class Extensions(Described):
    """Our and vLLM's extra fields, which mean the same in every protocol."""

    seed: Whole | None = field("The same seed gives the same tokens.", 7, unset="another one for every request")
    min_p: float | None = field(
        "Only tokens are drawn that have at least this share of the likeliest token's probability.",
        0.05,
        unset=MODELS.format(0),
        bounds=(0, 1),
    )
    repetition_penalty: float | None = field(
        "Above 1, tokens that are in the prompt or the answer become less likely; 0 is not allowed.",
        1.1,
        unset=MODELS.format(1),
        bounds=(0, 10),
    )
    timings: bool | None = field(
        "Whether the answer says how long each stage took (with the usage).", True, default=False
    )
    cache_salt: str | None = field(
        "Requests with different salts share neither KV nor embeddings of pictures.",
        "tenant-7",
        unset="shares with all requests that have none",
        min_length=1,
    )
    priority: Whole | None = field(
        "A request with a higher priority goes before others; the header X-Priority says the same.",
        1,
        default=0,
        bounds=(-MAX_PRIORITY, MAX_PRIORITY),
    )
    deadline_s: float | None = field(
        "The answer must be complete this many seconds after the request came, or the request ends with 504.",
        30,
        unset="the server's --request-timeout-s",
        bounds=(0, None),
    )


class Templated(Described):
    """Options of what makes the prompt of a chat."""

    mm_processor_kwargs: dict[str, Any] | None = field(
        "Options of the model's picture and video processor, such as max_pixels, num_frames and fps.",
        {},
        default={},
    )
    chat_template_kwargs: dict[str, Any] | None = field(
        "Variables of the chat template, such as enable_thinking; those that it does not know change nothing.",
        {"enable_thinking": False},
        default={},
    )


class ChatExtensions(Extensions, Templated):
    """The extra fields of chats, in every protocol."""


EXTENSIONS = tuple(ChatExtensions.model_fields)
"""The names of the extra fields that mean the same in every protocol."""
