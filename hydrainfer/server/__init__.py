"""The OpenAI-style HTTP API: fields, errors, server-sent events; and its sessions, which the offline API also uses.

Called by `assemble` and `offline`. Sends requests to an `EngineHandle` and knows nothing of scheduling, tensors or
checkpoints; text and pictures are processed by `processor`.
"""

from hydrainfer.server.access import read_origins
from hydrainfer.server.admission import AdmissionControl
from hydrainfer.server.app import ServerSettings, create_app
from hydrainfer.server.connection import Connection
from hydrainfer.server.intake import Intake
from hydrainfer.server.logs import StatsLine, written_logs
from hydrainfer.server.session import Sessions
from hydrainfer.server.stream import TokenStream
from hydrainfer.server.tenants import Tenants
from hydrainfer.server.traces import Traces, open_traces

__all__ = [
    "AdmissionControl",
    "Connection",
    "Intake",
    "ServerSettings",
    "Sessions",
    "StatsLine",
    "Tenants",
    "TokenStream",
    "Traces",
    "create_app",
    "open_traces",
    "read_origins",
    "written_logs",
]
