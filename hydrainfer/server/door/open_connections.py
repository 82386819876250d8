"""The number of open connections, kept below what the process may open."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from hydrainfer.core import SeldomLog

_log = logging.getLogger("hydrainfer.server.open_connections")


class Closable(Protocol):
    """A client's connection, as it is counted here."""

    @property
    def between_requests(self) -> bool:
        """Whether no head is complete and no answer under way, so that little is lost if it is closed."""
        ...

    def close(self) -> None: ...


class OpenConnections:
    """The open connections, oldest first. A new one takes the place of the oldest that is between requests when there
    are `limit`: clients that open connections and send nothing shut nobody out."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: dict[Closable, None] = {}
        self._warn: Callable[..., None] = SeldomLog(_log)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Closable) -> None:
        """Count a new connection. It is itself closed if every other one has a request."""
        self._open[connection] = None
        if len(self._open) <= self.limit:
            return
        oldest = next(one for one in self._open if one.between_requests)
        self._warn(
            "%d connections are open, and more would take descriptors that the server needs (ulimit -n): "
            "the oldest that has sent no request is closed",
            self.limit,
        )
        self.remove(oldest)
        oldest.close()

    def remove(self, connection: Closable) -> None:
        self._open.pop(connection, None)
