"""The checkpoint's chat template, rendered in transformers' sandboxed environment."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta

from hydrainfer.core import CheckpointError, InvalidRequest
from hydrainfer.processor.messages import ChatMessage, ImagePart, TextPart, Tools, VideoPart
from hydrainfer.processor.text.reasoning import REASONING, ReasoningFormat
from hydrainfer.processor.text.tool_format import HARMONY, ToolFormat, format_of
from hydrainfer.processor.text.watchdog import TooSlow, Watchdog

_PROBE = "zqprobe"
_RENDER_CPU_S = 1.0
"""CPU time for a prompt. Templates take milliseconds; some of them go through all messages for each message."""
_TRACKED = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # tags that only transformers supports
_GIVEN = ("messages", "raise_exception", "strftime_now")  # variables that transformers sets besides its own parameters


class ChatTemplate:
    """A chat template, compiled and probed once, with the template for chats with tools, if that is another one.
    `takes_parts`: a user's content may be a list of parts; otherwise pictures and text are joined into one string.
    `takes_tools`: the template shows tools to the model. `tools`: the format in which the model then writes calls, if
    known. `reasoning`: the format of its reasoning, None if it has none."""

    def __init__(
        self,
        tokenizer: Any,
        source: str,
        image: str | None,
        video: str | None = None,
        tool_format: ToolFormat | None = None,
        reasoning: str = "auto",
        name: str = "the chat template",
        tool_source: str | None = None,
        video_as_text: bool = False,
    ) -> None:
        """`tokenizer`: the tokenizer of transformers, for its sandbox and special tokens. `image`, `video`: the
        placeholders. `tool_format`, `reasoning` (a name of `REASONING` or "none"): replace what the template shows.
        `name`: of the template, for messages. `tool_source`: replaces `source` in chats with tools or calls.
        `video_as_text`: the template is given a video's placeholder as a text. Raises `CheckpointError`."""
        self._tokenizer = tokenizer
        self._watchdog = Watchdog(_RENDER_CPU_S)
        self._source, self._tool_source = source, tool_source or source
        self._ours = {
            *_GIVEN,
            *inspect.signature(tokenizer.apply_chat_template).parameters,
            *tokenizer.special_tokens_map,
        }
        used = _variables(source, name) | _variables(self._tool_source, f"{name} (tool_use)")
        self._variables = used - self._ours
        self._placeholders = {ImagePart: image or "", VideoPart: video or ""}
        self._video_as_text = video_as_text
        failures: list[str] = []
        self.takes_parts = False  # until it is known
        self.takes_parts = self._echoes([{"type": "text", "text": _PROBE}], failures)
        if not self.takes_parts and not self._echoes(_PROBE, failures):
            message = f"{name} renders neither text nor parts of a user message"
            raise CheckpointError("; ".join([message, *failures[-1:]]))
        self._forms = {role: self._forms_of(role) for role in ("system", "user", "assistant")}
        self.takes_tools = self._shows_tools()
        self.tools = tool_format or format_of(self._tool_source)
        named = (f for f in REASONING.values() if f.closing in source)
        self.reasoning: ReasoningFormat | None = next(named, None) if reasoning == "auto" else REASONING.get(reasoning)

    def render(
        self, messages: Sequence[ChatMessage], tools: Tools | None = None, own: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt text, which ends where the model's turn begins. `own`: values of the template's own variables;
        other names have no effect. Raises `InvalidRequest` if the template refuses the messages or does not show tools,
        or if `own` sets a variable that a request may not set."""
        forbidden = self._ours.intersection(own or ())
        if forbidden:
            raise InvalidRequest(f"chat_template_kwargs may not set {min(forbidden)}", param="chat_template_kwargs")
        own = {name: value for name, value in (own or {}).items() if name in self._variables}
        with_tools = tools is not None or any(m.calls or m.call_id for m in messages)
        if with_tools and not self.takes_tools:
            raise InvalidRequest(
                "this model's chat template has no tools; leave tools out, and messages that call them",
                param="messages" if tools is None else "tools",
                code="unsupported_parameter",
            )
        given = list(tools.given) if tools else None
        if with_tools and given is None and self._tool_source != self._source:
            given = []  # Hermes's template goes through them without asking whether there are any
        try:
            return self._render_joined(messages, given, own)
        except TooSlow:
            raise InvalidRequest(
                f"the model's chat template takes more than {self._watchdog.limit_s:g} s for these messages",
                param="messages",
            ) from None
        except TemplateError as e:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {str(e)[:200]}", param="messages"
            ) from None
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError):
            what = "chat_template_kwargs" if own else "messages" if tools is None else "tools"
            raise InvalidRequest(f"the model's chat template cannot render these {what}", param=what) from None

    def _render_joined(
        self, messages: Sequence[ChatMessage], tools: list[dict[str, Any]] | None, own: Mapping[str, Any]
    ) -> str:
        """The text of the messages as they are. If the template refuses them, as some do where a system message is not
        the first, with the leading system messages as one, else with all of them as one. Raises what the template
        raised first."""
        n_leading = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
        n_system = sum(m.role == "system" for m in messages)
        refusal: TemplateError | None = None
        for n in dict.fromkeys((0, n_leading, n_system)):
            try:
                return self._render([self._message(m) for m in _with_joined(messages, n)], tools, own)
            except TemplateError as e:
                refusal = refusal or e
        assert refusal is not None
        raise refusal

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        """The message in the form that transformers' templates read. Arguments of calls are objects."""
        thought = {} if message.reasoning is None else {"reasoning_content": message.reasoning}
        named = {} if message.name is None else {"name": message.name}
        if not message.calls and message.call_id is None:
            return {"role": message.role, **named, "content": self._content(message), **thought}
        text = message.text
        if message.call_id is not None:
            return {"role": message.role, "content": text, "tool_call_id": message.call_id, **named}
        if text and self.reasoning is REASONING[HARMONY]:
            thought = {}  # in a message with calls its templates take text or reasoning, not both
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.calls
        ]
        return {"role": message.role, **named, "content": text, "tool_calls": calls, **thought}

    def _content(self, message: ChatMessage) -> str | list[dict[str, str]]:
        """The content as the client sent it, if the template renders that for this role, else in the other form."""
        takes_strings, takes_parts = self._forms[message.role]
        if takes_parts and not (message.plain and takes_strings):
            return [self._part(part) for part in message.parts]
        media = [self._placeholders.get(type(part), "") for part in message.media]
        return "\n".join([*media, *([message.text] if len(message.parts) > len(media) else [])])

    def _part(self, part: TextPart | ImagePart | VideoPart) -> dict[str, str]:
        if isinstance(part, TextPart):
            return {"type": "text", "text": part.text}
        if isinstance(part, ImagePart):
            return {"type": "image"}
        if self._video_as_text:
            return {"type": "text", "text": self._placeholders[VideoPart]}
        return {"type": "video"}

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> str:
        source = self._source if tools is None else self._tool_source
        return self._watchdog.run(
            lambda: self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=source, add_generation_prompt=True, tokenize=False, **(own or {})
            )
        )

    def _shows_tools(self) -> bool:
        content: Any = [{"type": "text", "text": "x"}] if self.takes_parts else "x"
        function = {"name": _PROBE, "description": "x", "parameters": {"type": "object", "properties": {}}}
        try:
            text = self._render([{"role": "user", "content": content}], [{"type": "function", "function": function}])
        except Exception:
            return False
        return _PROBE in text

    def _forms_of(self, role: str) -> tuple[bool, bool]:
        """Whether the template renders content of this role that is a string, and content that is parts. If neither can
        be found out, as for a role that it refuses, the content has the form of a user's."""
        forms = (self._echoes(_PROBE, [], role), self._echoes([{"type": "text", "text": _PROBE}], [], role))
        return forms if any(forms) else (not self.takes_parts, self.takes_parts)

    def _echoes(self, content: Any, failures: list[str], role: str = "user") -> bool:
        """Whether the text of this content is rendered. If rendering fails, `failures` gets the reason."""
        question = {"role": "user", "content": [{"type": "text", "text": "x"}] if self.takes_parts else "x"}
        around = {"user": ([], []), "system": ([], [question]), "assistant": ([question], [question])}
        before, after = around[role]
        try:
            text = self._render([*before, {"role": role, "content": content}, *after])
        except Exception as e:
            failures.append(f"line {_line(e)}: {_short(e)}")
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text


def _with_joined(messages: Sequence[ChatMessage], n: int) -> Sequence[ChatMessage]:
    """The messages, with the first `n` of the system's as one at their head."""
    if not n:
        return messages
    parts = [m for m in messages if m.role == "system"][:n]
    text = "\n\n".join(m.text for m in parts)
    rest = [m for m in messages if not any(m is part for part in parts)]
    return [ChatMessage("system", (TextPart(text),), plain=True), *rest]


def _line(e: Exception) -> int | str:
    """The template's line in which the exception was raised."""
    frames = traceback.extract_tb(e.__traceback__)
    return next((f.lineno or "?" for f in reversed(frames) if f.filename == "<template>"), "?")


def _short(e: Exception) -> str:
    return " ".join(str(e).split())[:200] or type(e).__name__


def _variables(source: str, name: str) -> set[str]:
    """The names of variables that a template reads and does not set. Raises `CheckpointError` for a syntax error."""
    try:
        environment = Environment(extensions=["jinja2.ext.loopcontrols"])
        return meta.find_undeclared_variables(environment.parse(_TRACKED.sub("", source)))
    except TemplateSyntaxError as e:
        raise CheckpointError(f"{name}, line {e.lineno}: {_short(e)}") from None
