"""Grammars of gpt-oss's answers. The reasoning is free, and the message after it is constrained."""

from __future__ import annotations

from hydrainfer.core import Grammar
from hydrainfer.processor.messages import Tools
from hydrainfer.processor.text.lark import json_of, literal, rules_of

_THOUGHT = (
    'thought: <|channel|> "analysis" <|message|> FREE <|end|> <|start|> "assistant"',
    "FREE: /(.|\\n)*/",  # ordinary tokens only, so it ends at the first mark
)


def harmony_grammar(answer: Grammar | None, tools: Tools | None = None) -> Grammar:
    """The grammar of an answer that may reason first, and then calls one of `tools` or follows the grammar `answer`. At
    least one of the two must be given. Raises `InvalidRequest`."""
    ends: list[str] = []
    rules: list[str] = []
    for i, (name, schema) in enumerate(tools.schemas.items() if tools is not None else ()):
        ends.append(f"call_{i}")
        to = literal(f"commentary to=functions.{name} ")
        rules.append(f'call_{i}: <|channel|> {to} <|constrain|> "json" <|message|> args_{i}')
        rules.append(f"args_{i}: {json_of(schema)}")
    if answer is not None:
        ends.append("final")
        rules.append('final: <|channel|> "final" <|message|> form')
        rules += rules_of("form", answer)
    return Grammar("lark", "\n".join([f"start: thought? ({' | '.join(ends)})", *_THOUGHT, *rules]))
