"""Live requests: from fields that have been checked to a stream of texts, and their end.

Called by the answers and by the offline API. Sends requests to an `EngineHandle`; knows no format of an answer.
"""

from hydrainfer.server.live.intake import Intake
from hydrainfer.server.live.session import Sessions
from hydrainfer.server.live.sse import DONE, EventStream, error_event, event
from hydrainfer.server.live.stream import Completion, Delta, TokenStream
from hydrainfer.server.live.traces import Traces, open_traces

__all__ = [
    "DONE",
    "Completion",
    "Delta",
    "EventStream",
    "Intake",
    "Sessions",
    "TokenStream",
    "Traces",
    "error_event",
    "event",
    "open_traces",
]
