"""Addresses of a store's places: `dir:/path?gib=50`, `redis://host:6379/0?ttl_s=3600`. No address holds a password, and
no error repeats a text that may be one."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn
from urllib.parse import SplitResult, parse_qsl, urlsplit

from hydrainfer.config import STORE_PASSWORD as PASSWORD
from hydrainfer.config import STORE_USERNAME as USERNAME
from hydrainfer.core import ConfigError

_GIB = 1 << 30
_DEFAULT_GIB = 16.0
_DEFAULT_PORT = 6379
_DEFAULT_TIMEOUT_MS = 1000
_LONGEST_TIMEOUT_MS = 600_000
_LONGEST_TTL_S = 10**9
_HOST = re.compile(r"[\w.-]+|[\da-f:.]+(%[\w.-]+)?", re.ASCII)  # a name or an address of IPv4, or one of IPv6


class FolderAddress(NamedTuple):
    """A folder of this machine, or of a file system that several machines mount."""

    path: Path
    limit_bytes: int

    @property
    def name(self) -> str:
        return f"dir:{self.path}"


class ServerAddress(NamedTuple):
    """A server that speaks Redis's protocol. `ttl_s`: how long a block stays that nobody uses; None leaves that to the
    server. `timeout_ms`: the limit of each wait for the server."""

    host: str
    port: int
    db: int
    tls: bool
    ttl_s: int | None
    timeout_ms: int

    @property
    def name(self) -> str:
        """The same for all spellings of an address, and without options."""
        scheme = "rediss" if self.tls else "redis"
        host = f"[{self.host}]" if ":" in self.host else self.host
        db = f"/{self.db}" if self.db else ""
        return f"{scheme}://{host}:{self.port}{db}"


def folder_address(text: str) -> FolderAddress:
    """The folder that `dir:/path?gib=50` names. Raises `ConfigError`."""
    path, _, query = text.partition(":")[2].partition("?")
    options = _options(query, ("gib",), "dir:")
    gib = _positive(options.get("gib"), _DEFAULT_GIB)
    if not path:
        _refuse("dir: needs a path, such as dir:/var/cache/hydrainfer?gib=50")
    if "\0" in path:
        _refuse("dir: the path has a zero byte in it; leave it out")
    if gib is None:
        _refuse("dir: gib must be a positive number, such as dir:/path?gib=50")
    try:
        expanded = Path(path).expanduser()
    except RuntimeError:
        _refuse("dir: ~ has no meaning here, because no home folder is known; write the whole path")
    absolute = os.path.abspath(expanded)
    return FolderAddress(Path("/" + absolute.lstrip("/")), max(1, int(gib * _GIB)))


def server_address(text: str) -> ServerAddress:
    """The server that `redis://host:6379/0?ttl_s=3600` names; `rediss` is TLS. Raises `ConfigError`."""
    if "@" in text:
        refuse_password()
    url = _split(text)
    if url is None or not url.hostname or not _HOST.fullmatch(url.hostname):
        _refuse("redis: the host or the port is missing or wrong; write redis://host:6379")
    if url.fragment or not re.fullmatch(r"/?|/[0-9]{1,5}", url.path):
        _refuse("redis: after the port, only the number of a database may follow, such as redis://host:6379/0")
    options = _options(url.query, ("ttl_s", "timeout_ms"), "redis:")
    return ServerAddress(
        url.hostname,
        url.port or _DEFAULT_PORT,
        int(url.path.strip("/") or 0),
        url.scheme == "rediss",
        _whole("ttl_s", options, _LONGEST_TTL_S),
        _whole("timeout_ms", options, _LONGEST_TIMEOUT_MS) or _DEFAULT_TIMEOUT_MS,
    )


def refuse_password() -> NoReturn:
    _refuse(f"an address must not hold a user or a password; set {USERNAME} and {PASSWORD} in the environment instead")


def _split(text: str) -> SplitResult | None:
    """None if brackets do not match, or the port is no number below 65536. The exception would repeat the text."""
    try:
        url = urlsplit(text)
        return url if url.port != 0 else None
    except ValueError:
        return None


def _options(query: str, known: Collection[str], scheme: str) -> Mapping[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    if not options.keys() <= set(known):
        _refuse(f"{scheme} unknown option after the ?; the options are {' and '.join(known)}")
    if len(options) < len(pairs):
        _refuse(f"{scheme} an option is set twice")
    return options


def _positive(text: str | None, default: float) -> float | None:
    """The number, or None if it is none above zero."""
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def _whole(name: str, options: Mapping[str, str], limit: int) -> int | None:
    """An option's value; None if it is not set."""
    text = options.get(name)
    if text is None:
        return None
    if not re.fullmatch("[0-9]{1,10}", text) or not 1 <= int(text) <= limit:
        _refuse(f"redis: {name} must be a whole number from 1 to {limit}")
    return int(text)


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message, param="store") from None
