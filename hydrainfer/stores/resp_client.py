"""The connections to a server that speaks Redis's protocol, and what its failures mean to people.

No error shows what a server sent, which may be anything, the password included. So none has a cause or a context, in
which the exceptions of the redis package would show it.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.retry import Retry

from hydrainfer.stores.address import PASSWORD, USERNAME, ServerAddress
from hydrainfer.stores.port import StoreError, StoreFull

Command = tuple[Any, ...]

_MAX_COMMANDS = 1024  # of a pipeline: the replies of all are in memory together
_READ_BYTES = 1 << 18

_FULL = {
    "OOM": "has no more memory: give it a larger maxmemory, or maxmemory-policy allkeys-lru",
    "READONLY": "takes no writes because it is a replica: name the primary",
    "MISCONF": "takes no writes because it cannot save to its disk: see its log",
    "NOREPLICAS": "takes no writes because it has too few replicas: see min-replicas-to-write",
}
_CLUSTER = "is part of a Redis Cluster, which cannot be used: name servers of their own, separated by commas"
_FAILED = {
    "NOAUTH": f"wants a password: set {PASSWORD}",
    "WRONGPASS": f"refuses the password: {PASSWORD} or {USERNAME} is wrong",
    "NOPERM": "does not let this user do what a store needs: allow it all commands on the keys hydrainfer:*",
    "LOADING": "is still loading its data",
    "MASTERDOWN": "is a replica without its primary",
    "MOVED": _CLUSTER,
    "ASK": _CLUSTER,
    "CLUSTERDOWN": _CLUSTER,
    "CROSSSLOT": _CLUSTER,
}
_NONSENSE = "does not answer as a server of Redis's protocol does"


class Refusal(NamedTuple):
    """The reply to a command that could not be carried out, while others can. `code`: a key of `_FULL`, or WRONGTYPE
    for a key that holds no bytes."""

    code: str


class RespClient:
    """Sends commands in pipelines; any thread may call it. It opens connections when they are needed, and tries nothing
    twice. `connect`: makes the client of the redis package."""

    def __init__(
        self,
        address: ServerAddress,
        environ: Mapping[str, str],
        connect: Callable[..., redis.Redis] = redis.Redis,
    ) -> None:
        self._address = address
        password = environ.get(PASSWORD, "")
        self._has_password = bool(password)
        timeout_s = address.timeout_ms / 1000
        self._redis = connect(
            host=address.host,
            port=address.port,
            db=address.db,
            ssl=address.tls,
            credential_provider=_Credentials(environ.get(USERNAME, ""), password) if password else None,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            socket_read_size=_READ_BYTES,
            retry=Retry(NoBackoff(), 0),
            protocol=2,  # the one that all servers speak
        )
        self._redis.response_callbacks.clear()  # replies stay as they come: what is odd about them is for us to say

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        """The replies to the commands, which the server carries out in this order. Raises `StoreError`."""
        replies: list[Any] = []
        for start in range(0, len(commands), _MAX_COMMANDS):
            replies += self._pipeline(commands[start : start + _MAX_COMMANDS])
        return replies

    def unexpected(self, reply: object) -> StoreError:
        """The error of a reply other than the one that a command has."""
        if isinstance(reply, Refusal) and reply.code in _FULL:
            return StoreFull(f"{self._address.name} {_FULL[reply.code]}")
        return StoreError(f"{self._address.name} {_NONSENSE}")

    def close(self) -> None:
        self._redis.close()

    def _pipeline(self, commands: Sequence[Command]) -> list[Any]:
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        failure = ""
        replies = []
        try:
            replies = [_reply(reply) for reply in pipeline.execute(raise_on_error=False)]
        except Exception as e:  # of any type, as a server can send anything
            failure = self._meaning(e)
        if failure:  # not within `except`: see above
            raise StoreError(f"{self._address.name} {failure}")
        return replies

    def _meaning(self, e: Exception) -> str:
        if isinstance(e, redis.AuthenticationError):
            return _FAILED["WRONGPASS" if self._has_password else "NOAUTH"]
        if isinstance(e, redis.BusyLoadingError):
            return _FAILED["LOADING"]
        if isinstance(e, redis.TimeoutError):
            return f"did not answer within {self._address.timeout_ms} ms"
        if isinstance(e, redis.ResponseError):
            code = _code(e)
            return _FAILED.get(code) or _FULL.get(code) or self._error()
        if isinstance(e, redis.ConnectionError):
            return _no_connection(e)
        return _NONSENSE

    def _error(self) -> str:
        if self._address.db:
            return f"answers with an error: does it have a database {self._address.db}?"
        return "answers with an error to what all servers of Redis's protocol do"


class _Credentials(CredentialProvider):
    """What AUTH sends. An object of its own, because the redis package shows what it is given as arguments."""

    def __init__(self, username: str, password: str) -> None:
        self._words = (username, password) if username else (password,)

    def get_credentials(self) -> Any:
        return self._words


def _reply(reply: Any) -> Any:
    if not isinstance(reply, redis.ResponseError):
        return reply
    code = _code(reply)
    if code not in _FULL and code != "WRONGTYPE":
        raise reply
    return Refusal(code)


def _code(e: redis.ResponseError) -> str:
    """The first word of the server's reply, which the redis package cuts off where it knows the word."""
    return str(getattr(e, "status_code", None) or str(e).partition(" ")[0])


def _no_connection(e: BaseException) -> str:
    for cause in _causes(e):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"cannot be trusted: {cause.verify_message or 'its certificate is not valid'}"
        if isinstance(cause, ssl.SSLError):
            return "cannot be reached by TLS: is it rediss:// or redis://?"
        if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
            return f"cannot be reached: {os.strerror(cause.errno)}"
        if isinstance(cause, OSError):
            return "cannot be reached: is the host's name right?"
    return "closed the connection"


def _causes(e: BaseException | None) -> Iterator[BaseException]:
    while e is not None:
        yield e
        e = e.__cause__ or e.__context__
