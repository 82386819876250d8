"""Workloads recorded once and replayed: the requests, each with the length of its answer.

JSON lines: the first says what was recorded and how, the others are requests. Drawn pictures are kept as their seeds,
picture files as their paths, so a recording is small and needs the dataset it was made of.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hydrainfer.core import ConfigError
from hydrainfer.workload.sources.chat import ChatRequest
from hydrainfer.workload.sources.files import read_bytes, wrong
from hydrainfer.workload.sources.pictures import DrawnPicture, SentPicture


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded workload. `model` and `server`: what gave the answers; empty if lengths were drawn. `n_cut_short`:
    answers that reached the largest number of tokens allowed. `n_failed`: requests without an answer, left out."""

    dataset: str
    seed: int = 0
    model: str = ""
    server: str = ""
    n_cut_short: int = 0
    n_failed: int = 0
    date: str = ""
    chats: tuple[ChatRequest, ...] = ()


class _RecordingHead(msgspec.Struct, tag="hydrainfer-recording", tag_field="kind"):
    recording: Recording
    version: int = 1


def write_recording(path: Path, recording: Recording) -> None:
    """Write a recording as JSON lines. Raises `ConfigError` if it cannot be written."""
    head = _RecordingHead(msgspec.structs.replace(recording, chats=()))
    lines: Sequence[object] = (head, *recording.chats)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\n".join(msgspec.json.encode(line) for line in lines) + b"\n")
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}", param="out") from None


def read_recording(path: Path) -> Recording:
    """The recording in a file. Raises `ConfigError`."""
    first, *rest = read_bytes(path).splitlines() or [b""]
    try:
        head = msgspec.json.decode(first, type=_RecordingHead)
    except msgspec.DecodeError:
        raise wrong(path, "not a recording of `hydrainfer trace`: its first line does not say so") from None
    chats = []
    for number, line in enumerate(rest, 2):
        try:
            chats.append(msgspec.json.decode(line, type=ChatRequest))
        except msgspec.DecodeError as e:
            raise wrong(path, f"line {number} is not a request ({e})") from None
    return msgspec.structs.replace(head.recording, chats=tuple(chats))


def replayed(chats: Sequence[ChatRequest], seed: int) -> list[ChatRequest]:
    """The recorded requests as a run with this seed sends them. So that caches do not answer for the server, pictures
    are drawn from other seeds than in other runs (equal pictures stay equal), and another request is the first one,
    unless the recording has times."""
    first = 0 if any(chat.at_s is not None for chat in chats) else random.Random(seed).randrange(max(len(chats), 1))

    def redrawn(pictures: Sequence[SentPicture]) -> tuple[SentPicture, ...]:
        return tuple(
            msgspec.structs.replace(p, seed=p.seed ^ (seed << 32)) if isinstance(p, DrawnPicture) else p
            for p in pictures
        )

    return [
        msgspec.structs.replace(
            chat,
            pictures=redrawn(chat.pictures),
            before=tuple(msgspec.structs.replace(said, pictures=redrawn(said.pictures)) for said in chat.before),
        )
        for chat in (*chats[first:], *chats[:first])
    ]
