"""The ways in which a request can fail, as the client sees it."""

from __future__ import annotations

import enum

import msgspec


class FailureKind(enum.StrEnum):
    """The kinds of failure. `STATUS`: an HTTP status other than 200. `CONNECTION`: no connection, or it broke before
    the answer ended. `MALFORMED`: bytes that are not HTTP, not an event stream or not a chunk, or a stream without its
    `[DONE]`. `SERVER`: an error event within the stream. `TIMEOUT`: no end within the client's limit."""

    STATUS = "status"
    CONNECTION = "connection"
    MALFORMED = "malformed"
    SERVER = "server"
    TIMEOUT = "timeout"


class Failure(msgspec.Struct, frozen=True):
    """The failure of one request. `message` is for people; `status` is set for `STATUS` only."""

    kind: FailureKind
    message: str
    status: int | None = None


class RequestFailed(Exception):
    """Carries the `Failure` of one request."""

    def __init__(self, kind: FailureKind, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message, status)
