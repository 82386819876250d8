"""One instance: inbox → scheduler → launch vision ∥ language → commit → outbox.

Called by the server and offline API through `EngineHandle`. Sees tensors only through `ports.Runner`; never blocks.
"""

from hydrainfer.engine.engine import Engine, EventSink, Overlap
from hydrainfer.engine.ports import EngineHandle, OutputSink, Runner, Ticket
from hydrainfer.engine.thread import EngineThread

__all__ = ["Engine", "EngineHandle", "EngineThread", "EventSink", "OutputSink", "Overlap", "Runner", "Ticket"]
