"""Messages between the engines of one process: straight into the peer's queue, no bytes in between."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

from hydrainfer.core import Parcel


class Mailbox(Protocol):
    """An engine's queue; `deliver` may be called from any thread."""

    def deliver(self, parcel: Parcel) -> None: ...


class LocalLink:
    """An `engine.ports.PeerLink`. `lock` is also held while the router tells all engines to cancel: so a request cannot
    slip from one that has not heard it yet to one that heard it before the request came."""

    def __init__(self, mailboxes: Mapping[str, Mailbox], lock: threading.Lock) -> None:
        self._mailboxes = mailboxes
        self._lock = lock

    def send(self, peer: str, parcel: Parcel) -> None:
        with self._lock:
            self._mailboxes[peer].deliver(parcel)
