"""The link between instances: how long messages and copies take."""

from __future__ import annotations

import msgspec


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The link between any two instances. `bytes_per_s`, `latency_s`: of a copy; each instance sends one copy and
    receives one at a time. `message_s`: seconds of a message; `host_bytes_per_s`: rate between a device and its host's
    memory, one copy at a time."""

    bytes_per_s: float = 20e9
    latency_s: float = 50e-6
    message_s: float = 300e-6
    host_bytes_per_s: float = 20e9
