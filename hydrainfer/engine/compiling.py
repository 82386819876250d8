"""Requests that wait until their grammars are compiled, so that no batch waits for a compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from hydrainfer.core import Grammar, Offer, Parcel, Request

LOOK_S = 0.005
"""How often the engine looks whether a grammar is compiled."""


class Compiling:
    """What has come to the engine with a grammar that is not compiled. `ready`: whether a grammar is compiled; if not,
    this begins."""

    def __init__(self, ready: Callable[[Grammar], bool]) -> None:
        self._ready = ready
        self._requests: dict[str, tuple[Request, tuple[int, ...]]] = {}
        self._offers: list[Parcel] = []

    def __len__(self) -> int:
        return len(self._requests) + len(self._offers)

    @property
    def n_requests(self) -> int:
        return len(self._requests)

    def holds(self, request: Request, produced: tuple[int, ...]) -> bool:
        """Whether the request, with the tokens that it has, waits here from now on."""
        if self._can_go(request):
            return False
        self._requests[request.id] = request, produced
        return True

    def without_held(self, parcel: Parcel) -> Parcel:
        """The parcel without offers that wait here from now on. Messages may be late, so those behind an offer may
        come before it."""
        held = [m for m in parcel.messages if isinstance(m, Offer) and not self._can_go(m.handoff.request)]
        if not held:
            return parcel
        self._offers += [msgspec.structs.replace(parcel, messages=(offer,)) for offer in held]
        return msgspec.structs.replace(parcel, messages=tuple(m for m in parcel.messages if m not in held))

    def forget(self, request_id: str) -> bool:
        """Forget a request. Returns False if it does not wait here."""
        return self._requests.pop(request_id, None) is not None

    def requests(self) -> Iterator[tuple[Request, tuple[int, ...]]]:
        """The requests that need not wait any more, with their tokens. They leave."""
        for request, produced in list(self._requests.values()):
            if self._can_go(request):
                del self._requests[request.id]
                yield request, produced

    def offers(self) -> Iterator[Parcel]:
        """The parcels with offers that need not wait any more. They leave."""
        for parcel in list(self._offers):
            if all(self._can_go(m.handoff.request) for m in parcel.messages if isinstance(m, Offer)):
                self._offers.remove(parcel)
                yield parcel

    def _can_go(self, request: Request) -> bool:
        grammar = request.sampling.grammar
        return grammar is None or self._ready(grammar)
