"""The checkpoint's chat template: messages to text, in transformers' sandboxed environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from hydrainfer.core import CheckpointError, InvalidRequest
from hydrainfer.processor.messages import ChatMessage, ImagePart, TextPart, VideoPart

_PROBE = "zqprobe"


class ChatTemplate:
    """A chat template, compiled and probed once. `takes_parts`: content may be a list of parts; else pictures and text
    are joined into one string."""

    def __init__(self, tokenizer: Any, source: str, image: str | None, video: str | None = None) -> None:
        """`tokenizer`: the transformers one; it lends its sandbox and its special tokens. `image`, `video`: their
        placeholders. Raises `CheckpointError`."""
        self._tokenizer = tokenizer
        self._source = source
        self._placeholders = {ImagePart: image or "", VideoPart: video or ""}
        self.takes_parts = self._echoes([{"type": "text", "text": _PROBE}])
        if not self.takes_parts and not self._echoes(_PROBE):
            raise CheckpointError("the chat template renders neither text nor parts of a user message")

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt text, with the model's turn opened. Raises `InvalidRequest` with the template's complaint."""
        try:
            return self._render([{"role": m.role, "content": self._content(m)} for m in messages])
        except TemplateError as e:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {str(e)[:200]}", param="messages"
            ) from None

    def _content(self, message: ChatMessage) -> str | list[dict[str, str]]:
        if self.takes_parts:
            return [
                {"type": "text", "text": part.text}
                if isinstance(part, TextPart)
                else {"type": "image" if isinstance(part, ImagePart) else "video"}
                for part in message.parts
            ]
        media = [self._placeholders.get(type(part), "") for part in message.media]
        return "\n".join([*media, *(part.text for part in message.parts if isinstance(part, TextPart))])

    def _render(self, messages: list[dict[str, Any]]) -> str:
        return self._tokenizer.apply_chat_template(
            messages, chat_template=self._source, add_generation_prompt=True, tokenize=False
        )

    def _echoes(self, content: Any) -> bool:
        try:
            text = self._render([{"role": "user", "content": content}])
        except Exception:
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text
