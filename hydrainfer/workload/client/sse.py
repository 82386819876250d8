"""The parser from bytes to tokens: server-sent events, and the part of OpenAI's chat chunks that a measurement
needs."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from hydrainfer.workload.client.failures import FailureKind, RequestFailed

MAX_EVENT_BYTES = 16 << 20


class EventSplitter:
    """A splitter of a byte stream into the data of its events. A piece may end anywhere, even within a character."""

    __slots__ = ("_data", "_held", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._held = 0  # bytes in `_data`

    def feed(self, piece: bytes) -> list[bytes]:
        """The events completed by `piece`. Raises `RequestFailed` for an unfinished event over
        `MAX_EVENT_BYTES`."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip(b" \r"))
                self._held += len(line)
            elif line in (b"", b"\r") and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
                self._held = 0
        if self._held + len(self._rest) > MAX_EVENT_BYTES:
            raise RequestFailed(FailureKind.MALFORMED, f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return events

    @property
    def cut(self) -> bool:
        """Whether the stream stopped within an event."""
        return bool(self._rest.strip() or self._data)


class _ChunkDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _ChunkChoice(msgspec.Struct):
    delta: _ChunkDelta = msgspec.field(default_factory=_ChunkDelta)
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct, frozen=True):
    """The server's own token counts. `hydrainfer`: where the time of the answer went, if the server says so."""

    prompt_tokens: int
    completion_tokens: int
    hydrainfer: dict[str, Any] | None = None


class _Chunk(msgspec.Struct):
    choices: tuple[_ChunkChoice, ...] | None = None
    usage: Usage | None = None
    error: Any = None


class ChunkPiece(NamedTuple):
    """The content of one chunk. `n_tokens` is 0 for a chunk with the role only; without ids, a chunk with content
    counts as one token. `usage` may come with any chunk."""

    n_tokens: int
    text: str
    token_ids: tuple[int, ...] | None
    finish_reason: str | None
    usage: Usage | None


_DECODER = msgspec.json.Decoder(_Chunk)
_NOTHING = _ChunkChoice()


def parse_chunk(event: bytes) -> ChunkPiece:
    """The content of one event. Raises `RequestFailed`: `MALFORMED` if it is not a chat chunk, `SERVER` if it is an
    error."""
    try:
        chunk = _DECODER.decode(event)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise RequestFailed(FailureKind.MALFORMED, f"not a chat chunk ({e}): {event[:80]!r}") from None
    if chunk.error is not None:
        message = chunk.error.get("message") if isinstance(chunk.error, dict) else chunk.error
        raise RequestFailed(FailureKind.SERVER, str(message))
    choice = _NOTHING
    if chunk.choices:
        choice = chunk.choices[0]
    text = choice.delta.content or choice.delta.reasoning_content or ""
    n_tokens = len(choice.token_ids) if choice.token_ids else int(bool(text))
    return ChunkPiece(n_tokens, text, choice.token_ids, choice.finish_reason, chunk.usage)
