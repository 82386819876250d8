"""One instance: inbox → scheduler → launch vision ∥ language → commit → outbox.

Called by the server and offline API through `EngineHandle`. Sees tensors only through `ports.Runner`; never blocks.
"""

from hydrainfer.engine.copies import Copies, Mover, TierMover, tier_movers
from hydrainfer.engine.engine import Engine, EventSink
from hydrainfer.engine.lanes import Overlap
from hydrainfer.engine.migration import Timing
from hydrainfer.engine.moves import Moves
from hydrainfer.engine.ports import (
    CopyTicket,
    EngineHandle,
    PeerLink,
    Placement,
    Puller,
    Runner,
    StoreClient,
    StoreTicket,
    Ticket,
    WaitFor,
)
from hydrainfer.engine.stored import Stored, StoreTimes
from hydrainfer.engine.thread import EngineThread

__all__ = [
    "Copies",
    "CopyTicket",
    "Engine",
    "EngineHandle",
    "EngineThread",
    "EventSink",
    "Mover",
    "Moves",
    "Overlap",
    "PeerLink",
    "Placement",
    "Puller",
    "Runner",
    "StoreClient",
    "StoreTicket",
    "StoreTimes",
    "Stored",
    "Ticket",
    "TierMover",
    "Timing",
    "WaitFor",
    "tier_movers",
]
