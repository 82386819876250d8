"""The formats in which the supported families write tool calls: recognised from the chat template, and as a grammar
where calls are required."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from hydrainfer.core import Grammar, InvalidRequest
from hydrainfer.processor.messages import Tools
from hydrainfer.processor.text.harmony_form import harmony_grammar
from hydrainfer.processor.text.lark import json_of, literal, rules_of

HARMONY = "harmony"
"""The name of gpt-oss's format, for calls and reasoning. It has a reader of its own (harmony.py)."""


class ToolFormat(NamedTuple):
    """A format of tool calls. `trigger`: text that begins calls anywhere in an answer; `bare`: text that begins calls
    at the start of an answer; `bare_if_forced`: `bare` applies only if a grammar has left the trigger out. `glue`:
    separators that may stand around calls; `closing`: text that ends a call. `key`: the JSON key of the arguments.
    `before`, `between` and `after`: what a grammar puts around the calls; `around`: what it puts around each.
    `id_chars`: length of the ids, 0 for OpenAI's form. `held_as`: the JSON format that a grammar uses if the family's
    own is not JSON (as in vLLM)."""

    name: str
    trigger: str
    bare: str
    glue: tuple[str, ...]
    closing: str
    key: str
    around: tuple[str, str] = ("", "")
    before: str = ""
    between: str = ""
    after: str = ""
    bare_if_forced: bool = False
    id_chars: int = 0
    held_as: str = ""

    @property
    def held(self) -> ToolFormat:
        """The format that a grammar constrains calls to."""
        return FORMATS[self.held_as] if self.held_as else self


FORMATS: Mapping[str, ToolFormat] = {
    f.name: f
    for f in (
        ToolFormat(
            "hermes", "<tool_call>", "", (" ", "\n"), "</tool_call>", "arguments",
            around=("<tool_call>\n", "\n</tool_call>"), between="\n",
        ),
        ToolFormat("llama3_json", "<|python_tag|>", "{", (" ", "\n", ";"), "", "parameters", between="; "),
        ToolFormat(
            "mistral", "[TOOL_CALLS]", "[", (" ", "\n", "[", ",", "]"), "", "arguments",
            before="[", between=", ", after="]", bare_if_forced=True, id_chars=9,
        ),
        ToolFormat("mistral_args", "[TOOL_CALLS]", "", (), "", "", id_chars=9, held_as="mistral"),
        ToolFormat("qwen3_coder", "<tool_call>", "", (), "</tool_call>", "", held_as="hermes"),
        ToolFormat("functiongemma", "<start_function_call>", "", (), "<end_function_call>", "", held_as="hermes"),
        ToolFormat(HARMONY, "<|channel|>", "", (), "", ""),
        ToolFormat("pythonic", "```tool_code", "[", (), "```", "", held_as="hermes"),
    )
}  # fmt: skip


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template describes; None if it is none of `FORMATS`."""
    if "<tool_call>" in template:
        return FORMATS["qwen3_coder" if "<function=" in template else "hermes"]
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral_args" if "[ARGS]" in template else "mistral"]
    if "<|channel|>" in template:
        return FORMATS[HARMONY]
    if "<start_function_call>" in template:
        return FORMATS["functiongemma"]
    if "tool_code" in template or "[func_name1(" in template:
        return FORMATS["pythonic"]
    if "<|python_tag|>" in template or '"parameters"' in template:
        return FORMATS["llama3_json"]
    return None


def calls_grammar(tools: Tools, how: ToolFormat, answer: Grammar | None = None) -> Grammar:
    """The grammar of an answer that is calls or, if calls can be told from other answers, follows the grammar `answer`.
    Raises `InvalidRequest`."""
    how = how.held
    tellable = how.name == HARMONY or (answer is not None and answer.kind == "json" and how.around[0])
    if answer is not None and (tools.required or not tellable):
        raise InvalidRequest(
            "with this model and these tools the answer has no other form; leave tools or response_format out",
            param="response_format",
        )
    try:
        if how.name == HARMONY:
            return harmony_grammar(answer, tools)
        return Grammar("lark", "\n".join(_rules(tools, how, answer)))
    except InvalidRequest as e:
        raise InvalidRequest(e.message.replace("grammar", "tools with their schemas", 1), param="tools") from None


def _rules(tools: Tools, how: ToolFormat, answer: Grammar | None) -> list[str]:
    more = f"({literal(how.between)} call)*" if tools.parallel else ""
    rules = [
        "start: calls" if answer is None else "start: calls | answer",
        f"calls: {literal(how.before)} call {more} {literal(how.after)}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(tools.schemas))),
    ]
    if answer is not None:
        rules += rules_of("answer", answer)
    for i, (name, schema) in enumerate(tools.schemas.items()):
        head = f'{how.around[0]}{{"name": {json.dumps(name)}, "{how.key}": '
        rules.append(f"call_{i}: {literal(head)} args_{i} {literal('}' + how.around[1])}")
        rules.append(f"args_{i}: {json_of(schema)}")
    return rules
