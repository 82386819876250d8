"""OpenAI's API: the fields of requests, and answers to chats and completions, whole and as events.

Called by the protocols, which are translated to its chats and back. Reaches the engine through `live` only.
"""

from hydrainfer.server.openai.answers import Answers, Shape
from hydrainfer.server.openai.fields import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    Effort,
    TokenizeFields,
    parse,
)
from hydrainfer.server.openai.known import CHAT, OPENAI_REFUSED, TEXT
from hydrainfer.server.openai.logprobs import chat_logprobs
from hydrainfer.server.openai.parts import Tool
from hydrainfer.server.openai.replies import Reply
from hydrainfer.server.openai.structured import grammar_of
from hydrainfer.server.openai.tool_reply import is_json, reader

__all__ = [
    "CHAT",
    "OPENAI_REFUSED",
    "TEXT",
    "Answers",
    "ChatFields",
    "CompletionFields",
    "DetokenizeFields",
    "Effort",
    "Reply",
    "Shape",
    "TokenizeFields",
    "Tool",
    "chat_logprobs",
    "grammar_of",
    "is_json",
    "parse",
    "reader",
]
