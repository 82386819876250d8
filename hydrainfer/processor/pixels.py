"""The pictures of live requests, owned by the server under a byte budget."""

from __future__ import annotations

import threading

import numpy as np

from hydrainfer.core import Overloaded, RequestTooLarge

Pixels = np.ndarray
"""uint8, shaped by the model's adapter; `[height, width, 3]` for LLaVA. Read-only once stored."""


class PixelStore:
    """Arrays by content key, counted by holder: the same picture in two requests is kept once. Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._arrays: dict[str, Pixels] = {}
        self._holders: dict[str, int] = {}
        self._n_bytes = 0
        self._lock = threading.Lock()

    def put(self, key: bytes, array: Pixels) -> str:
        """One more holder of the picture. Returns the reference for `get` and `release`. Raises `Overloaded` beyond the
        budget, `RequestTooLarge` if it alone is."""
        ref = key.hex()
        if array.nbytes > self.budget_bytes:
            raise RequestTooLarge(
                f"a picture takes {array.nbytes} bytes, more than the {self.budget_bytes} this server may hold",
                param="messages",
            )
        array.flags.writeable = False
        with self._lock:
            if ref not in self._arrays:
                if self._n_bytes + array.nbytes > self.budget_bytes:
                    raise Overloaded(
                        f"the server holds as many pictures as it may ({self.budget_bytes >> 20} MiB); retry later",
                        param="messages",
                        retry_after_s=1.0,
                    )
                self._arrays[ref] = array
                self._holders[ref] = 0
                self._n_bytes += array.nbytes
            self._holders[ref] += 1
            return ref

    def get(self, ref: str) -> Pixels:
        """A `core.PixelSource`. Raises `KeyError` once the last holder has released it."""
        with self._lock:
            return self._arrays[ref]

    def release(self, ref: str) -> None:
        """One holder less; the last one frees the bytes."""
        with self._lock:
            self._holders[ref] -= 1
            assert self._holders[ref] >= 0, f"pixels {ref} released twice"
            if not self._holders[ref]:
                self._n_bytes -= self._arrays.pop(ref).nbytes
                del self._holders[ref]

    @property
    def n_bytes(self) -> int:
        return self._n_bytes

    def __len__(self) -> int:
        return len(self._arrays)

    def check(self, idle: bool = False) -> None:
        """Counts and bytes agree; with `idle`, nothing is left. Raises `AssertionError`."""
        with self._lock:
            assert self._arrays.keys() == self._holders.keys(), "a picture without holders, or holders without picture"
            assert self._n_bytes == sum(a.nbytes for a in self._arrays.values()), "bytes miscounted"
            assert all(n > 0 for n in self._holders.values()), "a picture nobody holds"
            assert not (idle and self._arrays), f"{len(self._arrays)} pictures left behind"
