"""One chat request: text, pictures and a fixed output length, and the HTTP body made of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import orjson

from hydrainfer.workload.sources.pictures import MANY, DrawnPicture, EncodedPicture, SentPicture, data_urls

QUESTIONS = (
    "What is shown in this picture?",
    "Which colours do you see, and where does each of them lie?",
    "How many boxes are there? Answer with a number.",
    "Tell a short story in which this picture hangs on a wall.",
    "Is the background lighter than what stands before it?",
    "Name everything in the picture, from the left to the right.",
)


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier turn of a conversation."""

    text: str
    pictures: tuple[SentPicture, ...] = ()
    answer: str


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One chat request. `pictures` come before `text`, as in OpenAI's content lists. The answer has exactly
    `max_tokens` tokens if the server honours `ignore_eos`. `system`, `before`: the system prompt and the turns before
    this one. `messages`: a whole conversation, sent unchanged in place of all of these. `at_s`: when the request
    arrived in its trace. `talk`: the conversation's number; 0 if the request stands alone. `apart_s`: seconds after the
    turn before, if these are fixed (`dialogues.in_turn`)."""

    text: str = ""
    pictures: tuple[SentPicture, ...] = ()
    max_tokens: int = 32
    messages: tuple[dict[str, Any], ...] = ()
    at_s: float | None = None
    system: str = ""
    before: tuple[Said, ...] = ()
    talk: int = 0
    apart_s: float = 0.0

    @property
    def shown(self) -> tuple[SentPicture, ...]:
        """The pictures of all turns."""
        return (*(p for said in self.before for p in said.pictures), *self.pictures)


class BodyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the body, among them fields that some servers refuse. `extra` is merged in last."""

    temperature: float = 0.0
    ignore_eos: bool = True
    return_token_ids: bool = True
    timings: bool = False
    include_usage: bool = True
    extra: dict[str, Any] = {}

    def body(self, chat: ChatRequest, model: str) -> bytes:
        """The streaming request as JSON. Raises `ConfigError` for a picture file that cannot be read."""
        body: dict[str, Any] = {
            "model": model,
            "messages": chat.messages or _messages(chat),
            "max_tokens": chat.max_tokens,
            "temperature": self.temperature,
            "stream": True,
        }
        if self.include_usage:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.return_token_ids:
            body["return_token_ids"] = True
        if self.timings:
            body["timings"] = True
        return orjson.dumps(body | self.extra)


def _messages(chat: ChatRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": chat.system}] if chat.system else []
    for said in chat.before:
        messages.append({"role": "user", "content": _content(said)})
        messages.append({"role": "assistant", "content": said.answer})
    return [*messages, {"role": "user", "content": _content(chat)}]


def _content(said: ChatRequest | Said) -> list[dict[str, Any]]:
    pictures = [{"type": "image_url", "image_url": {"url": picture.data_url()}} for picture in said.pictures]
    return [*pictures, {"type": "text", "text": said.text}]


def encoded(chats: Iterable[ChatRequest], given_up: Callable[[], bool] = lambda: False) -> list[ChatRequest]:
    """The same requests with their pictures drawn or read once, so that sending them again costs nothing more. Raises
    what `data_urls` raises."""
    chats = list(chats)
    shown: list[SentPicture] = list(dict.fromkeys(p for chat in chats for p in chat.shown))
    known = dict(zip(shown, map(EncodedPicture, data_urls(shown, given_up))))

    def of(pictures: Sequence[SentPicture]) -> tuple[SentPicture, ...]:
        return tuple(known[p] for p in pictures)

    def before(chat: ChatRequest) -> tuple[Said, ...]:
        return tuple(msgspec.structs.replace(said, pictures=of(said.pictures)) for said in chat.before)

    return [msgspec.structs.replace(c, pictures=of(c.pictures), before=before(c)) for c in chats]


async def encoded_aside(
    chats: Sequence[ChatRequest], given_up: Callable[[], bool], say: Callable[[int], None]
) -> list[ChatRequest]:
    """As `encoded`. If there are many pictures to draw, `say` gets their number, and a thread draws them while the
    event loop goes on. Raises what `data_urls` raises."""
    n_drawn = len({p for chat in chats for p in chat.shown if isinstance(p, DrawnPicture)})
    if n_drawn < MANY:
        return encoded(chats)
    say(n_drawn)
    return await asyncio.to_thread(encoded, chats, given_up)


def distinct_chats(
    n: int, *, seed: int, max_tokens: int = 32, n_pictures: int = 1, width: int = 336, height: int = 336
) -> list[ChatRequest]:
    """`n` requests with one question each. No other request, of this or another seed, has the same pictures."""
    draw = random.Random(seed)
    seeds = iter(range(seed << 32, (seed << 32) + n * n_pictures))
    return [
        ChatRequest(
            text=draw.choice(QUESTIONS),
            pictures=tuple(DrawnPicture(next(seeds), width, height) for _ in range(n_pictures)),
            max_tokens=max_tokens,
        )
        for _ in range(n)
    ]
