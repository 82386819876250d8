"""What all HTTP here has in common: bodies within limits, errors, ids and log lines, and what a protocol declares.

Imported by all other parts of the server. Knows nothing of models.
"""

from hydrainfer.server.http.access import EXPOSED, ID_HEADERS, Access, RefusalLines, id_in, new_id, read_origins
from hydrainfer.server.http.body import Bodies, arriving, disconnected, json_response, unless_disconnected
from hydrainfer.server.http.errors import JSON, as_hydra_error, error_body, error_headers
from hydrainfer.server.http.failures import Farewell, install_error_handlers
from hydrainfer.server.http.fields import (
    EXTENSIONS,
    ChatExtensions,
    Described,
    Extensions,
    Named,
    Penalties,
    Shown,
    Streamed,
    Temper,
    Templated,
    Whole,
    field,
)
from hydrainfer.server.http.known import EMPTY, FieldCheck, KnownFields, Refusal, loose, names, refusals
from hydrainfer.server.http.logs import StatsLine, written_logs
from hydrainfer.server.http.paths import Prefixed, route_path
from hydrainfer.server.http.protocol import Body, Protocol, Protocols

__all__ = [
    "EMPTY",
    "EXPOSED",
    "EXTENSIONS",
    "ID_HEADERS",
    "JSON",
    "Access",
    "Bodies",
    "Body",
    "ChatExtensions",
    "Described",
    "Extensions",
    "Farewell",
    "FieldCheck",
    "KnownFields",
    "Named",
    "Penalties",
    "Prefixed",
    "Protocol",
    "Protocols",
    "Refusal",
    "RefusalLines",
    "Shown",
    "StatsLine",
    "Streamed",
    "Temper",
    "Templated",
    "Whole",
    "arriving",
    "as_hydra_error",
    "disconnected",
    "error_body",
    "error_headers",
    "field",
    "id_in",
    "install_error_handlers",
    "json_response",
    "loose",
    "names",
    "new_id",
    "read_origins",
    "refusals",
    "route_path",
    "unless_disconnected",
    "written_logs",
]
