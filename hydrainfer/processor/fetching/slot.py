"""The permission of one download to run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


class Slot:
    """A download's permission to run, taken from `free` for a block. A thread cannot be stopped: if the download ends
    while a blocking call of it goes on in a thread, the slot is given back when that call ends. So every download that
    has a slot finds a thread, if there is a thread for each slot."""

    def __init__(self, free: asyncio.Semaphore) -> None:
        self._free = free
        self._call: asyncio.Future[Any] | None = None

    async def __aenter__(self) -> Slot:
        await self._free.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._call is None:
            self._free.release()
        else:
            self._call.add_done_callback(self._ended)

    async def wait(self, call: Awaitable[T]) -> T:
        """The result of a blocking call. A download makes one call at a time."""
        task = self._call = asyncio.ensure_future(call)
        await asyncio.wait((task,))  # if this is cancelled, the call goes on
        return task.result()

    def _ended(self, call: asyncio.Future[Any]) -> None:
        self._free.release()
        if not call.cancelled():
            call.exception()  # nobody waits for it any more
