"""The pictures of live requests, held by the server within a budget of bytes. Pictures of ended requests stay as a
cache while there is room."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from hydrainfer.core import Overloaded, RequestTooLarge

Pixels = np.ndarray
"""A uint8 array whose shape the model's adapter decides; `[height, width, 3]` for LLaVA. Read-only once stored."""


class PixelStore:
    """Arrays by content key, with a count of holders: a picture that is in two requests is stored once. Thread-safe.

    Up to `keep_bytes` of the budget may be used for the pictures that were released last and have no holder any more.
    `hold` can take these up again. They are dropped when their room is needed.
    """

    def __init__(self, budget_bytes: int, keep_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.keep_bytes = min(keep_bytes, budget_bytes)
        self._arrays: dict[str, Pixels] = {}
        self._holders: dict[str, int] = {}
        self._n_bytes = 0
        self._kept: OrderedDict[str, Pixels] = OrderedDict()  # least recently released first
        self._n_kept_bytes = 0
        self._lock = threading.Lock()

    def put(self, key: bytes, array: Pixels) -> str:
        """Store a picture, or add a holder to a stored one. Returns the reference for `get` and `release`. Raises
        `Overloaded` if the budget is used up, `RequestTooLarge` if the picture alone exceeds it."""
        ref = key.hex()
        if array.nbytes > self.budget_bytes:
            raise RequestTooLarge(
                f"a picture takes {array.nbytes} bytes, more than the {self.budget_bytes} this server may hold",
                param="messages",
            )
        array.flags.writeable = False
        with self._lock:
            if not self._hold(ref):
                if self._n_bytes + array.nbytes > self.budget_bytes:
                    raise Overloaded(
                        f"the server holds as many pictures as it may ({self.budget_bytes >> 20} MiB); retry later",
                        param="messages",
                        retry_after_s=1.0,
                    )
                self._arrays[ref] = array
                self._holders[ref] = 1
                self._n_bytes += array.nbytes
                self._make_room()
            return ref

    def hold(self, ref: str) -> bool:
        """Add a holder if the picture is still stored, and return whether it is. A picture without holders counts
        against the budget again."""
        with self._lock:
            return self._hold(ref)

    def get(self, ref: str) -> Pixels:
        """The array of a picture, as `core.PixelSource` requires. Raises `KeyError` once the last holder has released
        it."""
        with self._lock:
            return self._arrays[ref]

    def release(self, ref: str) -> None:
        """Remove a holder. A picture without holders may be dropped."""
        with self._lock:
            self._holders[ref] -= 1
            assert self._holders[ref] >= 0, f"pixels {ref} released twice"
            if not self._holders[ref]:
                del self._holders[ref]
                array = self._arrays.pop(ref)
                self._n_bytes -= array.nbytes
                self._kept[ref] = array
                self._n_kept_bytes += array.nbytes
                self._make_room()

    @property
    def n_bytes(self) -> int:
        """The bytes of pictures that have holders."""
        return self._n_bytes

    @property
    def n_kept_bytes(self) -> int:
        """The bytes of pictures without holders."""
        return self._n_kept_bytes

    def __len__(self) -> int:
        """The number of pictures that have holders."""
        return len(self._arrays)

    def check(self, idle: bool = False) -> None:
        """Check that counts and bytes agree and, with `idle`, that no picture has holders. Raises `AssertionError`."""
        with self._lock:
            assert self._arrays.keys() == self._holders.keys(), "a picture without holders, or holders without picture"
            assert not self._arrays.keys() & self._kept.keys(), "held, and held by nobody"
            assert self._n_bytes == sum(a.nbytes for a in self._arrays.values()), "bytes miscounted"
            assert self._n_kept_bytes == sum(a.nbytes for a in self._kept.values()), "kept bytes miscounted"
            assert self._n_kept_bytes <= min(self.keep_bytes, self.budget_bytes - self._n_bytes), "keeps too much"
            assert all(n > 0 for n in self._holders.values()), "a picture nobody holds"
            assert not (idle and self._arrays), f"{len(self._arrays)} pictures left behind"

    def _hold(self, ref: str) -> bool:
        if ref in self._kept:
            array = self._kept.pop(ref)
            self._n_kept_bytes -= array.nbytes
            self._n_bytes += array.nbytes
            self._arrays[ref] = array
            self._holders[ref] = 0
        if ref in self._holders:
            self._holders[ref] += 1
            return True
        return False

    def _make_room(self) -> None:
        while self._n_kept_bytes > min(self.keep_bytes, self.budget_bytes - self._n_bytes):
            self._n_kept_bytes -= self._kept.popitem(last=False)[1].nbytes
