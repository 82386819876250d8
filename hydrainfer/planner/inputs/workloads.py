"""The conversion of workloads to traces for the simulator: token counts of prompts, pictures and answers, and
arrivals."""

from __future__ import annotations

import hashlib
import io
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
from PIL import Image

from hydrainfer.core import ConfigError, InvalidRequest
from hydrainfer.judging import at_quantile
from hydrainfer.planner.nouns import ANSWER, PromptPart, TraceRequest
from hydrainfer.processor import read_data_url
from hydrainfer.workload.sources import (
    TOKENS_PER_WORD,
    ChatRequest,
    DrawnPicture,
    EncodedPicture,
    FilePicture,
    OpenLoop,
    Poisson,
    Workload,
    due_times_s,
)

_TURNED = (5, 6, 7, 8)  # EXIF orientations that swap width and height
_ORIENTATION = 0x0112
_SHARED_TOKENS = 16  # one block: what is worth sharing


class PromptRules(NamedTuple):
    """A model's rules for counting tokens. `picture(width, height)`: embedding tokens, None for a model without vision;
    `text(text, n_pictures)`: all other tokens of a prompt, chat template included; `n_context`: most tokens of prompt
    and answer together. `whole`: see `TraceRequest`. `inner(width, height)`: tokens between the placeholders of a
    picture, which `text` does not count; None if no picture has any. `among(n_pictures)`: `picture` for a prompt with
    so many pictures; None if their number does not matter."""

    name: str
    picture: Callable[[int, int], int] | None
    text: Callable[[str, int], int]
    n_context: int
    whole: bool = False
    inner: Callable[[int, int], int] | None = None
    among: Callable[[int], Callable[[int, int], int]] | None = None


class _PictureSize(NamedTuple):
    """A picture's size in pixels. `name` identifies the picture; so does `content` if the picture may be seen again at
    any time, else it is ""."""

    width: int
    height: int
    name: str
    content: str = ""


class _Text(NamedTuple):
    """A piece of text; `answer`: whether the server wrote it."""

    text: str
    answer: bool = False


def words_to_tokens(text: str) -> int:
    """The approximate number of tokens that the tokenizers of Llama and Qwen make of English text."""
    return math.ceil(len(text.split()) * TOKENS_PER_WORD)


def trace_of(
    workload: Workload, prompts: PromptRules, n: int, seed: int = 0, arrivals: OpenLoop | None = None
) -> list[TraceRequest]:
    """`n` requests of the workload, with tokens as `prompts` counts them and answers as long as that model's. Without
    `arrivals`, they arrive at the times of the recording if it has any, else as a Poisson process at 1/s;
    `trace.at_rate` scales them to a rate. The same seed gives the same trace. Raises `ConfigError` if there are no
    requests, for pictures if the model has no vision, for pictures of unknown size, and for prompts beyond the model's
    context."""
    chats = workload.chats(n, seed, like=prompts.name)
    if not chats:
        raise ConfigError(
            f"workload {workload.dataset} has no requests: there is nothing to plan for", param="workload"
        )
    times = [chat.at_s for chat in chats]
    recorded = [t for t in times if t is not None]
    if arrivals is None and len(recorded) == len(chats) > 1 and max(recorded) > min(recorded):
        at_s = [t - min(recorded) for t in recorded]
    else:
        at_s = due_times_s(arrivals or Poisson(1.0), len(chats), seed)
    seen, inner = prompts.picture, prompts.inner
    prompts = prompts._replace(  # turns repeat earlier turns
        picture=seen and cache(seen), text=cache(prompts.text), inner=inner and cache(inner)
    )
    made = [_request(i, chat, t, prompts) for i, (chat, t) in enumerate(zip(chats, at_s))]
    if _repeats(made):
        return made
    return [msgspec.structs.replace(t, parts=()) for t in made]


def _repeats(trace: Iterable[TraceRequest]) -> bool:
    """Whether two prompts share a beginning that is long enough to be worth sharing."""
    seen = set()
    for t in trace:
        reached = accumulate(part.n_tokens for part in t.parts)
        names = tuple(part.name for part in t.parts[: 1 + sum(n < _SHARED_TOKENS for n in reached)])
        if names in seen:
            return True
        seen.add(names)
    return False


def summary(trace: Sequence[TraceRequest]) -> dict[str, float]:
    """Means and 90th percentiles of the lengths of prompts and answers, for reports."""

    def p90(numbers: Sequence[int]) -> float:
        return float(at_quantile(sorted(numbers), 0.9))

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


def _request(i: int, chat: ChatRequest, at_s: float, prompts: PromptRules) -> TraceRequest:
    pieces = list(_pieces(chat))
    pictures = [p for p in pieces if isinstance(p, _PictureSize)]
    if pictures and prompts.picture is None:
        raise ConfigError(
            f"request {i} has pictures, but {prompts.name} cannot see; use a workload without", param="model"
        )
    parts = tuple(_parts_of(pieces, prompts))
    tokens = tuple(part.n_tokens for part in parts if part.picture)
    n_text = sum(part.n_tokens for part in parts if not part.picture)
    if (n := n_text + sum(tokens) + chat.max_tokens) > prompts.n_context:
        raise ConfigError(
            f"request {i} has {n} tokens with its answer, but {prompts.name} takes {prompts.n_context}",
            param="workload",
        )
    content = ";".join(p.content for p in pictures) if any(p.content for p in pictures) else ""
    return TraceRequest(
        arrival_s=at_s,
        n_text=n_text,
        pictures=tokens,
        n_output=chat.max_tokens,
        content=content,
        parts=parts,
        megapixels=sum(p.width * p.height for p in pictures) / 1e6,
        whole=prompts.whole,
        talk=chat.talk,
        apart_s=chat.apart_s,
    )


def _parts_of(pieces: Sequence[_Text | _PictureSize], prompts: PromptRules) -> Iterator[PromptPart]:
    """The parts of a prompt. Template tokens between two texts count to the second text."""
    texts: list[str] = []
    n_pictures = n_before = 0
    last = max(i for i, piece in enumerate(pieces) if isinstance(piece, _Text))
    n_all = sum(isinstance(piece, _PictureSize) for piece in pieces)
    picture = prompts.picture if prompts.among is None else prompts.among(n_all)
    for i, piece in enumerate(pieces):
        if isinstance(piece, _PictureSize):
            assert picture is not None
            n_pictures += 1
            n_tokens = picture(piece.width, piece.height)
            yield PromptPart(f"picture {piece.name} {n_tokens}", n_tokens, True)
            n_inner = 0 if prompts.inner is None else prompts.inner(piece.width, piece.height)
            if n_inner:
                yield PromptPart(f"inside {piece.name}", n_inner)
            continue
        texts.append(piece.text)
        n_shown = n_pictures
        if i == last:
            n_shown = n_all
        n_tokens = max(n_before, int(i == last), prompts.text("\n".join(texts), n_shown))
        if n_tokens > n_before:
            yield PromptPart(ANSWER if piece.answer else f"text {piece.text}", n_tokens - n_before)
        n_before = n_tokens


def _pieces(chat: ChatRequest) -> Iterator[_Text | _PictureSize]:
    """The texts and pictures of a request, in order; at least one text."""
    if chat.messages:
        pieces = list(_conversation(chat.messages))
        yield from pieces if any(isinstance(p, _Text) for p in pieces) else (*pieces, _Text(""))
        return
    if chat.system:
        yield _Text(chat.system)
    for said in chat.before:
        yield from map(_size_of, said.pictures)
        yield _Text(said.text)
        yield _Text(said.answer, True)
    yield from map(_size_of, chat.pictures)
    yield _Text(chat.text)


def _conversation(messages: Sequence[dict[str, Any]]) -> Iterator[_Text | _PictureSize]:
    for message in messages:
        content = message.get("content") or ""
        for part in [content] if isinstance(content, str) else content:
            if isinstance(part, str) or part.get("type") == "text":
                text = part if isinstance(part, str) else str(part.get("text", ""))
                yield _Text(text, message.get("role") == "assistant")
            elif part.get("type") == "image_url":
                url = part.get("image_url")
                yield _size_of(EncodedPicture(str(url.get("url") if isinstance(url, dict) else url)))
            else:
                raise ConfigError(f"cannot plan for parts of type {part.get('type')!r}; known are text and image_url")


def _size_of(picture: DrawnPicture | FilePicture | EncodedPicture) -> _PictureSize:
    """A picture's size, read without decoding the picture. Raises `ConfigError`."""
    if isinstance(picture, DrawnPicture):
        return _PictureSize(picture.width, picture.height, f"{picture.seed} {picture.width} {picture.height}")
    if isinstance(picture, FilePicture):
        return _header(picture.path, picture.path, picture.path)
    if picture.url[:5].lower() != "data:":
        raise ConfigError(f"the size of {picture.url[:60]!r} is not known; planning needs data: URLs or picture files")
    try:
        content = read_data_url(picture.url, "picture", "image/jpeg", len(picture.url), "path")
    except InvalidRequest as e:
        raise ConfigError(e.message) from None
    return _header(io.BytesIO(content), "a data: URL", hashlib.sha256(content).hexdigest())


def _header(file: Any, name: str, content: str) -> _PictureSize:
    try:
        with Image.open(file) as image:
            width, height = image.size
            turned = image.getexif().get(_ORIENTATION) in _TURNED
    except (OSError, ValueError) as e:
        raise ConfigError(f"{name}: no picture that can be read ({type(e).__name__})", param="path") from None
    return _PictureSize(*((height, width) if turned else (width, height)), content, content)
