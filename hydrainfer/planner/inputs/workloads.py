"""Traces for the simulator from workloads: prompts, pictures and answers as numbers of tokens, and arrivals."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from PIL import Image

from hydrainfer.core import ConfigError
from hydrainfer.planner.simulation import TraceRequest
from hydrainfer.workload.sources import (
    DEFAULT,
    TOKENS_PER_WORD,
    ChatRequest,
    DrawnPicture,
    EncodedPicture,
    FilePicture,
    Poisson,
    Workload,
    due_times_s,
)

_TURNED = (5, 6, 7, 8)  # EXIF orientations that swap width and height
_ORIENTATION = 0x0112


class Prompts(NamedTuple):
    """A model's rules for counting tokens. `picture(width, height)`: embedding tokens, None for a model without eyes;
    `text(text, n_pictures)`: all other tokens of a prompt, chat template included; `n_context`: prompt and answer at
    most."""

    name: str
    picture: Callable[[int, int], int] | None
    text: Callable[[str, int], int]
    n_context: int


class _Size(NamedTuple):
    """A picture's size in pixels, and a name if the picture may be seen twice."""

    width: int
    height: int
    content: str = ""


def words_to_tokens(text: str) -> int:
    """Roughly the number of tokens that tokenizers of Llama and Qwen make of English."""
    return math.ceil(len(text.split()) * TOKENS_PER_WORD)


def trace_of(workload: Workload, prompts: Prompts, n: int, seed: int = 0) -> list[TraceRequest]:
    """`n` requests of the workload as `prompts` counts them, with answers as long as that model's. Arrivals are Poisson
    at 1/s, or those of the recording if it has times; `trace.at_rate` brings them to a rate. The same for the same
    seed. Raises `ConfigError`: pictures for a model without eyes, or of unknown size, or prompts beyond its context."""
    chats = workload.chats(n, seed, like=_like(workload, prompts.name))
    if not chats:
        raise ConfigError(
            f"workload {workload.dataset} has no requests: there is nothing to plan for", param="workload"
        )
    times = [chat.at_s for chat in chats]
    recorded = [t for t in times if t is not None]
    if len(recorded) == len(chats) > 1 and max(recorded) > min(recorded):
        at_s = [t - min(recorded) for t in recorded]
    else:
        at_s = due_times_s(Poisson(1.0), len(chats), seed)
    return [_request(i, chat, t, prompts) for i, (chat, t) in enumerate(zip(chats, at_s))]


def summary(trace: Sequence[TraceRequest]) -> dict[str, float]:
    """Means and the 90th percentile of prompts and answers, for reports."""

    def p90(numbers: Sequence[int]) -> float:
        return float(sorted(numbers)[min(len(numbers) - 1, math.ceil(0.9 * len(numbers)) - 1)])

    text, pictures, outputs = ([f(t) for t in trace] for f in (lambda t: t.n_text, lambda t: sum(t.pictures), _output))
    prompts = [t.n_prompt for t in trace]
    return {
        "requests": float(len(trace)),
        "text_mean": statistics.fmean(text),
        "picture_mean": statistics.fmean(pictures),
        "prompt_mean": statistics.fmean(prompts),
        "prompt_p90": p90(prompts),
        "output_mean": statistics.fmean(outputs),
        "output_p90": p90(outputs),
    }


def _output(t: TraceRequest) -> int:
    return t.n_output


def _like(workload: Workload, model: str) -> str:
    """The name under which the workload knows the answers of this model: its own, or the one that it begins with."""
    names = [n for n in workload.output_tokens if n != DEFAULT and model.lower().startswith(n.lower())]
    return max(names, key=len, default=model)


def _request(i: int, chat: ChatRequest, at_s: float, prompts: Prompts) -> TraceRequest:
    text, pictures = chat.text, [_size_of(p) for p in chat.pictures]
    if chat.messages:
        text, pictures = _conversation(chat.messages)
    if pictures and prompts.picture is None:
        raise ConfigError(
            f"request {i} has pictures, but {prompts.name} cannot see; use a workload without", param="model"
        )
    tokens = tuple(prompts.picture(p.width, p.height) for p in pictures) if prompts.picture is not None else ()
    n_text = max(1, prompts.text(text, len(pictures)))
    if (n := n_text + sum(tokens) + chat.max_tokens) > prompts.n_context:
        raise ConfigError(
            f"request {i} has {n} tokens with its answer, but {prompts.name} takes {prompts.n_context}",
            param="workload",
        )
    content = ";".join(p.content for p in pictures) if any(p.content for p in pictures) else ""
    return TraceRequest(arrival_s=at_s, n_text=n_text, pictures=tokens, n_output=chat.max_tokens, content=content)


def _conversation(messages: Sequence[dict[str, Any]]) -> tuple[str, list[_Size]]:
    """The text of all messages, and the sizes of their pictures."""
    texts: list[str] = []
    pictures: list[_Size] = []
    for part in _parts(messages):
        if isinstance(part, str):
            texts.append(part)
        elif part.get("type") == "text":
            texts.append(str(part.get("text", "")))
        elif part.get("type") == "image_url":
            url = part.get("image_url")
            pictures.append(_size_of(EncodedPicture(str(url.get("url") if isinstance(url, dict) else url))))
        else:
            raise ConfigError(f"cannot plan for parts of type {part.get('type')!r}; known are text and image_url")
    return "\n".join(texts), pictures


def _parts(messages: Sequence[dict[str, Any]]) -> Iterator[Any]:
    for message in messages:
        content = message.get("content") or ""
        yield from [content] if isinstance(content, str) else content


def _size_of(picture: DrawnPicture | FilePicture | EncodedPicture) -> _Size:
    """A picture's size, without decoding it. Raises `ConfigError`."""
    if isinstance(picture, DrawnPicture):
        return _Size(picture.width, picture.height)  # each has its own seed
    if isinstance(picture, FilePicture):
        return _header(picture.path, picture.path, picture.path)
    head, comma, data = picture.url.partition(",")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        raise ConfigError(f"the size of {picture.url[:60]!r} is not known; planning needs data: URLs or picture files")
    try:
        content = base64.b64decode(data, validate=True)
    except binascii.Error:
        raise ConfigError("a data: URL is not valid base64") from None
    return _header(io.BytesIO(content), "a data: URL", hashlib.sha256(content).hexdigest())


def _header(file: Any, name: str, content: str) -> _Size:
    try:
        with Image.open(file) as image:
            width, height = image.size
            turned = image.getexif().get(_ORIENTATION) in _TURNED
    except (OSError, ValueError) as e:
        raise ConfigError(f"{name}: no picture that can be read ({type(e).__name__})", param="path") from None
    return _Size(*((height, width) if turned else (width, height)), content)
