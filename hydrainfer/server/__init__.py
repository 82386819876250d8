"""The HTTP server: `protocols` that clients speak, `openai` to which they are translated, `live` requests, which the
offline API also uses, the `door` that lets requests in, the `page` at `/`, and `http`, which all have in common.

Called by `assemble` and `offline`. Sends requests to an `EngineHandle`; text and pictures are processed by `processor`.
Of the scheduler it knows only the rank by which requests wait; of tensors and checkpoints nothing.
"""

from hydrainfer.server.app import ServerSettings, create_app
from hydrainfer.server.door import Connection, OverloadControl, Tenants
from hydrainfer.server.http import StatsLine, read_origins, written_logs
from hydrainfer.server.live import Completion, Delta, Intake, Sessions, TokenStream, Traces, open_traces
from hydrainfer.server.openai import grammar_of

__all__ = [
    "Completion",
    "Connection",
    "Delta",
    "Intake",
    "OverloadControl",
    "ServerSettings",
    "Sessions",
    "StatsLine",
    "Tenants",
    "TokenStream",
    "Traces",
    "create_app",
    "grammar_of",
    "open_traces",
    "read_origins",
    "written_logs",
]
