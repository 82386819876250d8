"""One conversation with a server: its turns, and the pictures that wait for the next question."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from hydrainfer.chatting.asking import Piece, Server
from hydrainfer.core import InvalidRequest


class Conversation:
    """The turns so far. Pictures and videos that are shown belong to the next question."""

    def __init__(self, server: Server, system: str = "", **fields: Any) -> None:
        """`system`: what the model is told first; `fields`: of each request, such as `max_tokens`."""
        self.server, self.system = server, system
        self.turns: list[dict[str, Any]] = []
        self.shown: list[dict[str, Any]] = []
        self._fields = {name: value for name, value in fields.items() if value is not None}

    @property
    def messages(self) -> list[dict[str, Any]]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns]

    def ask(self, question: str) -> Iterator[Piece]:
        """The parts of the answer. If the iterator is closed early, the conversation has what came until then; after an
        error, or before the first part, it is as it was. Raises `InvalidRequest`."""
        content: Any = [*self.shown, {"type": "text", "text": question}] if self.shown else question
        asked, answer = {"role": "user", "content": content}, ""
        pieces = self.server.ask([*self.messages, asked], **self._fields)
        try:
            for piece in pieces:
                answer += "" if piece.thought else piece.text
                yield piece
        except InvalidRequest:
            answer = ""
            raise
        finally:
            pieces.close()  # type: ignore[attr-defined]
            if answer:
                self.turns += [asked, {"role": "assistant", "content": answer}]
                self.shown = []

    def show(self, source: str) -> None:
        """Show a picture or video, by path or URL, with the next question. Raises `InvalidRequest`."""
        self.shown.append(media_part(source))

    def clear(self) -> None:
        """Forget all but what the model is told first."""
        self.turns, self.shown = [], []

    def save(self, path: Path) -> None:
        """Write the messages as a request's body, which can be sent again. Raises `InvalidRequest`."""
        body = {"model": self.server.model, "messages": self.messages, **self._fields}
        try:
            path.expanduser().write_bytes(orjson.dumps(body, option=orjson.OPT_INDENT_2))
        except (OSError, RuntimeError, ValueError) as e:
            raise InvalidRequest(f"cannot write {path}: {getattr(e, 'strerror', None) or e}", param="path") from None


def ask_about(server: Server, source: str, question: str, max_tokens: int) -> Iterator[str]:
    """The parts of the likeliest answer to one question about a picture. Raises `InvalidRequest`."""
    conversation = Conversation(server, max_tokens=max_tokens, temperature=0)
    conversation.show(source)
    return (piece.text for piece in conversation.ask(question))


def media_part(source: str) -> dict[str, Any]:
    """The part of a message for a picture or video, by path or URL. Raises `InvalidRequest`."""
    kind = mimetypes.guess_type(source)[0] or "image/jpeg"
    name = "video_url" if kind.startswith("video/") else "image_url"
    if not source.startswith(("http://", "https://", "data:")):
        path = Path(source.removeprefix("file://"))
        try:
            content = base64.b64encode(path.expanduser().read_bytes()).decode()
        except (OSError, RuntimeError, ValueError) as e:
            raise InvalidRequest(f"cannot read {path}: {getattr(e, 'strerror', None) or e}", param="image") from None
        source = f"data:{kind};base64,{content}"
    return {"type": name, name: {"url": source}}
