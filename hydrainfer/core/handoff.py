"""A request on its way between two instances, and the messages that move it.

    source                         target
      Offer(handoff)  ─────────────>  waits for room (back-pressure), says so by Renew
      <───────────────────────  Admit   room is reserved, the copy begins
      <──────────────────────  Landed   the bytes are here: did the lease hold?
      Confirm(held)   ─────────────>  held: it is the target's from now on
      <─────────────────────  Release   this copy is over: it reads and asks nothing any more

With Reject the target refuses the offer; with Withdraw the source takes it back. Every message names (request, attempt)
and may come twice, late or never. An instance hands out a request's outputs and lifecycle events before it offers the
request, so they do not travel with it.
"""

from __future__ import annotations

import msgspec

from hydrainfer.core.events import ErrorInfo, Load
from hydrainfer.core.request import Request
from hydrainfer.core.sequence import LiveSequence
from hydrainfer.core.stage import Stage

Key = tuple[str, int]
"""(request id, attempt). An attempt is offered once, to one peer."""


def owner_of(name: str, incarnation: int) -> str:
    """The name of all exports of one incarnation of an instance."""
    return f"{name}:{incarnation}"


class ExportHandle(msgspec.Struct, frozen=True):
    """The place where a peer finds the blocks of one cache. `owner`: the instance and its incarnation, by `owner_of`.
    `host`, `process`: equal to the reader's if it is the same host or process. `device`: cpu, or cuda:UUID. `ways`:
    transport -> address. `offer`: the name under which the blocks are read while an offer is open; "" if the owner
    cannot refuse a read."""

    owner: str
    host: str = ""
    process: str = ""
    device: str = "cpu"
    n_blocks: int = 0
    block_bytes: int = 0
    ways: dict[str, str] = {}
    offer: str = ""


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """A request between two stages. `produced`: the tokens produced so far. `n_computed`: the tokens whose KV is in the
    blocks. `order`, `hops`: see `LiveSequence`. `blocks`: per cache spec, the source's ids, in token order, of the
    blocks that the next stage reads; empty if everything must be computed again. `exports`: where those blocks are.
    `abroad`: they are in another cluster."""

    request: Request
    cursor: int
    produced: tuple[int, ...]
    n_computed: int
    attempt: int
    order: tuple[float, int]
    hops: int
    source: str
    incarnation: int
    blocks: dict[str, tuple[int, ...]]
    exports: dict[str, ExportHandle]
    abroad: bool = False

    @property
    def key(self) -> Key:
        return self.request.id, self.attempt

    @property
    def stage(self) -> Stage:
        """The request's next stage. The target runs it, or has its result, or hands the request on."""
        return self.request.plan()[self.cursor]

    @classmethod
    def of(
        cls,
        seq: LiveSequence,
        blocks: dict[str, tuple[int, ...]],
        source: str,
        incarnation: int,
        exports: dict[str, ExportHandle],
        abroad: bool = False,
    ) -> Handoff:
        return cls(
            request=seq.request,
            cursor=seq.cursor,
            produced=tuple(seq.tokens[seq.request.n_prompt :]),
            n_computed=seq.n_computed,
            attempt=seq.attempt,
            order=seq.order,
            hops=seq.hops,
            source=source,
            incarnation=incarnation,
            blocks=blocks,
            exports={spec: exports[spec] for spec in blocks},
            abroad=abroad,
        )

    def sequence(self, now: float) -> LiveSequence:
        """The request as a live sequence of the target, which holds no blocks yet."""
        seq = LiveSequence(self.request, self.order, now, self.produced)
        seq.cursor = self.cursor
        seq.attempt = self.attempt
        seq.hops = self.hops + 1
        seq.n_computed = self.n_computed
        if self.stage is Stage.DECODE:
            seq.latest_s = now  # its latest token was sampled elsewhere, about now
        return seq


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Source: offers a request."""

    handoff: Handoff

    @property
    def key(self) -> Key:
        return self.handoff.key


class Admit(msgspec.Struct, frozen=True, tag=True):
    """Target: room is reserved; from now on the blocks are read."""

    key: Key


class Reject(msgspec.Struct, frozen=True, tag=True):
    """Target: refuses the request. `error`: why it could never run here."""

    key: Key
    error: ErrorInfo | None = None


class Landed(msgspec.Struct, frozen=True, tag=True):
    """Target: copy number `pull` is complete. Asks for a `Confirm`."""

    key: Key
    pull: int


class Confirm(msgspec.Struct, frozen=True, tag=True):
    """Source: whether the lease held throughout copy `pull`. If so the request is the target's."""

    key: Key
    pull: int
    held: bool


class Release(msgspec.Struct, frozen=True, tag=True):
    """Target: copy `pull` (0: none was begun) is over. It reads nothing and waits for nothing any more. `cut`: the copy
    failed because the source could not be connected."""

    key: Key
    pull: int
    cut: bool = False


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """Source: takes the offer back. Answered by `Release` once no copy reads."""

    key: Key


class Renew(msgspec.Struct, frozen=True, tag=True):
    """Target: these offers have arrived and wait. Renews their leases."""

    keys: tuple[Key, ...]


Message = Offer | Admit | Reject | Landed | Confirm | Release | Withdraw | Renew


class Parcel(msgspec.Struct, frozen=True, tag=True):
    """All messages of one instance to another after one step, and the sender's load."""

    sender: str
    incarnation: int
    messages: tuple[Message, ...]
    load: Load = Load()
