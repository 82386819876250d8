"""Parsing of chat messages into a checked and typed form."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from PIL import Image

from hydrainfer.core import InvalidRequest
from hydrainfer.processor.messages.tools import ToolCall, parse_calls
from hydrainfer.processor.messages.video_part import VideoPart
from hydrainfer.processor.pictures import MediaLimits, Picture, ResizeTarget, decode_image, from_image, read_image_url

ROLES = ("system", "developer", "user", "assistant", "tool")


class TextPart(msgspec.Struct, frozen=True):
    text: str


class ImagePart(msgspec.Struct, frozen=True):
    """A picture of a message. `source`: a URL, the file's bytes or, from Python callers only, an opened picture or a
    path. Only `data:` URLs are read here; `Fetcher.fetched` has replaced other URLs by the bytes. `param`: the field of
    the request that holds the picture."""

    source: str | bytes | Path | Image.Image
    param: str

    def read(self, limits: MediaLimits) -> ImagePart:
        """The same part with the file's bytes, or the opened picture, as its source. Raises `InvalidRequest` or
        `RequestTooLarge`."""
        source = self.source
        if isinstance(source, str):
            source = read_image_url(source, limits, self.param)
        elif isinstance(source, Path):
            try:
                source = source.read_bytes()
            except OSError as e:
                raise InvalidRequest(f"cannot read the picture: {e}", param=self.param) from None
        return ImagePart(source, self.param)

    def load(self, limits: MediaLimits, wanted: Callable[[int, int], ResizeTarget] | None = None) -> Picture:
        """The decoded picture, as `decode_image` returns it. Raises `MediaError`, `InvalidRequest` or
        `RequestTooLarge`."""
        source = self.read(limits).source
        if isinstance(source, Image.Image):
            return from_image(source, limits, self.param)
        assert isinstance(source, bytes)
        return decode_image(source, limits, self.param, wanted)


ContentPart = TextPart | ImagePart | VideoPart


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a chat. `role`: one that chat templates know (`developer` has become `system`). `calls`: the tool
    calls of an assistant's message. `call_id`: the call that a tool's message answers; `name`: its function, or the
    participant's name, if the client gives it. `reasoning`: the reasoning of an assistant's message, for templates that
    show it. `plain`: the client sent one string, not parts."""

    role: str
    parts: tuple[ContentPart, ...]
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    plain: bool = False

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def images(self) -> tuple[ImagePart, ...]:
        return tuple(p for p in self.parts if isinstance(p, ImagePart))

    @property
    def media(self) -> tuple[ImagePart | VideoPart, ...]:
        """The pictures and videos, in order."""
        return tuple(p for p in self.parts if not isinstance(p, TextPart))


def parse_messages(messages: object, *, local: bool = False) -> tuple[ChatMessage, ...]:
    """Parse OpenAI's `messages`. `local=True`, for Python callers, also accepts `{"type": "image", "image": ...}` (or
    `image_pil`) with an opened picture, bytes, a path or an array, and `{"type": "video", "video": ...}` with bytes, a
    path or frames (and their "fps"). Raises `InvalidRequest` naming the field."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequest("messages must be a list of messages", param="messages")
    if not messages:
        raise InvalidRequest("messages must not be empty: send at least one user message", param="messages")
    return tuple(_parse_message(m, f"messages.{i}", local) for i, m in enumerate(messages))


def _parse_message(message: object, where: str, local: bool) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object with role and content", param=where)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    if message.get("function_call"):
        raise InvalidRequest("function_call is not supported; send tool_calls", param=f"{where}.function_call")
    if message.get("audio"):
        raise InvalidRequest(f"{where}.audio is not supported; send its text", param=f"{where}.audio")
    if message.get("tool_calls") or role == "tool":
        return _parse_tool_message(message, role, where, local)
    role = "system" if role == "developer" else role
    if role == "assistant" and not content:  # as in answers that are refusals or were cut off
        content = _refusal(message, where)
    parts, plain = _parse_content(content, role, where, local), isinstance(content, str)
    return ChatMessage(role, parts, name=_name(message, where), reasoning=_reasoning(message, role), plain=plain)


def _parse_tool_message(message: Mapping, role: str, where: str, local: bool) -> ChatMessage:
    """Parse an assistant's message with tool calls, or a tool's message with the result of one."""
    content = message.get("content")
    if role == "tool":
        call_id = message.get("tool_call_id")
        if not isinstance(call_id, str):
            raise InvalidRequest(
                f"{where}.tool_call_id must say which call this answers", param=f"{where}.tool_call_id"
            )
        parts = _parse_content(content, role, where, local)
        return ChatMessage(role, parts, call_id=call_id, name=_name(message, where), plain=isinstance(content, str))
    if role != "assistant":
        raise InvalidRequest(f"{where}: only the assistant calls tools", param=f"{where}.tool_calls")
    calls = parse_calls(message["tool_calls"], f"{where}.tool_calls")
    parts = _parse_content(content or _refusal(message, where), role, where, local)
    return ChatMessage(role, parts, calls, name=_name(message, where), reasoning=_reasoning(message, role), plain=True)


def _name(message: Mapping, where: str) -> str | None:
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise InvalidRequest(f"{where}.name must be a string", param=f"{where}.name")
    return name


def _refusal(message: Mapping, where: str) -> str:
    """The text of an assistant's refusal, which stands beside its content; empty if there is none."""
    refusal = message.get("refusal")
    if refusal is not None and not isinstance(refusal, str):
        raise InvalidRequest(f"{where}.refusal must be a string", param=f"{where}.refusal")
    return refusal or ""


def _reasoning(message: Mapping, role: str) -> str | None:
    """The reasoning of an assistant's message, under either of the names that clients use; None for other roles."""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return reasoning if role == "assistant" and isinstance(reasoning, str) else None


def _parse_content(content: object, role: str, where: str, local: bool) -> tuple[ContentPart, ...]:
    where = f"{where}.content"
    if isinstance(content, str):
        return (TextPart(content),)
    if content is None or not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(f"{where} must be a string or a list of parts", param=where)
    if not content:
        raise InvalidRequest(f"{where} must not be empty", param=where)
    parts = tuple(_parse_part(p, f"{where}.{i}", local) for i, p in enumerate(content))
    if role != "user" and any(not isinstance(p, TextPart) for p in parts):
        raise InvalidRequest(f"{where}: only user messages may hold pictures or videos", param=where)
    return parts


def _parse_part(part: object, where: str, local: bool) -> ContentPart:
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"{where} must be an object with a type", param=where)
    kind = part.get("type")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}.text must be a string", param=f"{where}.text")
        return TextPart(part["text"])
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return TextPart(part["refusal"])
    if kind in ("image_url", "video_url"):
        url = part.get(kind)
        url = url.get("url") if isinstance(url, Mapping) else url
        if not isinstance(url, str):
            raise InvalidRequest(f"{where}.{kind}.url must be a string", param=f"{where}.{kind}.url")
        return (ImagePart if kind == "image_url" else VideoPart)(url, f"{where}.{kind}")
    if kind == "image" and local:
        return ImagePart(local_image(part.get("image"), where), where)
    if kind == "image_pil" and local:  # vLLM's name
        return ImagePart(local_image(part.get("image_pil"), where), where)
    if kind == "video" and local:
        return local_video(part, where)
    raise InvalidRequest(
        f"{where}: parts of type {repr(kind)[:40]} are not supported; send text, image_url or video_url",
        param=f"{where}.type",
    )


def check_path(source: str, where: str, instead: str) -> None:
    """Raises `InvalidRequest` if `source` is a URL rather than a path."""
    if source.startswith(("http://", "https://", "data:", "file://")):
        hint = f'send a URL as {{"type": "{instead}", "{instead}": {{"url": …}}}}'
        raise InvalidRequest(f"{where}: this is taken for a path; {hint}", param=where)


def local_image(source: object, where: str) -> bytes | Path | Image.Image:
    """A picture given by a Python caller. Raises `InvalidRequest`."""
    if isinstance(source, bytes | Path | Image.Image):
        return source
    if isinstance(source, str):
        check_path(source, where, "image_url")
        return Path(source)
    if isinstance(source, io.IOBase):
        return source.read()
    if isinstance(source, np.ndarray) and source.dtype == np.uint8 and source.ndim == 3 and source.shape[2] == 3:
        return Image.fromarray(source)
    raise InvalidRequest(
        f"{where}.image must be a PIL image, bytes, a path or a uint8 array [height, width, 3]", param=where
    )


def local_video(part: Mapping, where: str) -> VideoPart:
    """A video given by a Python caller. `part` has `video` and, for frames, their `fps`. Raises `InvalidRequest`."""
    source, fps = part.get("video"), part.get("fps", 2.0)
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= 1000:
        raise InvalidRequest(f"{where}.fps must be a number over 0 and at most 1000", param=f"{where}.fps")
    if isinstance(source, str):
        check_path(source, where, "video_url")
        source = Path(source)
    if isinstance(source, io.IOBase):
        source = source.read()
    if not isinstance(source, bytes | Path | np.ndarray):
        raise InvalidRequest(f"{where}.video must be bytes, a path or an array of frames", param=where)
    return VideoPart(source, where, float(fps))
