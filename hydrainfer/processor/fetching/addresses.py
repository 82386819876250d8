"""The rules for which URLs may be fetched and which addresses may be connected to. A URL is parsed only once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Literal, NamedTuple
from urllib.parse import quote, urlsplit

import idna

from hydrainfer.core import InvalidRequest

IP = IPv4Address | IPv6Address
Hosts = Literal["public", "any", "none"]
MAX_URL_CHARACTERS = 8192
_PORTS = {"http": 80, "https": 443}
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PATH_SAFE = "/%:@!$&'()*+,;=~"

# networks that `hosts="any"` adds: loopback, private, carrier-grade NAT, unique local
_PRIVATE = tuple(
    map(
        ip_network,
        ("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1/128", "fc00::/7"),
    )
)
# cloud providers' services for their virtual machines, outside the link-local networks
_NEVER = tuple(map(ip_network, ("100.100.100.200/32", "168.63.129.16/32", "fd00:ec2::/32", "fd20:ce::/32")))
_NOT_PUBLIC_4 = tuple(
    map(
        ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
            *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        ),
    )
)
# public IPv6 is 2000::/3 less Teredo and other protocols, documentation and 6to4; mapped and NAT64 lie outside
_PUBLIC_6 = ip_network("2000::/3")
_NOT_PUBLIC_6 = tuple(map(ip_network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))


class Address(NamedTuple):
    """The place that an http(s) URL points to. `host`: lower case, ASCII, no brackets; `ip`: set if the host is an
    address; `target`: path and query as they are sent."""

    scheme: str
    host: str
    port: int
    target: str
    ip: IP | None = None

    @property
    def netloc(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.target}"


def may_connect(ip: IP, hosts: Hosts) -> bool:
    """Whether the server may connect to an address: a public one or, with `hosts="any"`, also a private one.
    Link-local, multicast, reserved, mapped and translated addresses are never allowed."""
    if hosts == "none" or any(ip in net for net in _NEVER):
        return False
    if hosts == "any" and any(ip in net for net in _PRIVATE):
        return True
    if isinstance(ip, IPv4Address):
        return not any(ip in net for net in _NOT_PUBLIC_4)
    return ip in _PUBLIC_6 and not any(ip in net for net in _NOT_PUBLIC_6)


def is_listed(host: str, domains: Sequence[str]) -> bool:
    """Whether `host` is one of `domains`, or `domains` is empty. `*.example.com` stands for every name below
    example.com."""
    return not domains or any(host.endswith(d[1:]) if d.startswith("*.") else host == d for d in domains)


def parse_url(url: str, param: str) -> Address:
    """The parsed form of an http(s) URL. Raises `InvalidRequest`."""
    if len(url) > MAX_URL_CHARACTERS:
        raise _invalid(f"it is longer than {MAX_URL_CHARACTERS} characters", param)
    if any(c <= " " or c == "\x7f" or c == "\\" for c in url):
        raise _invalid("it holds spaces, control characters or backslashes", param)
    try:
        parts = urlsplit(url)
        port, userinfo = parts.port, "@" in parts.netloc
    except ValueError:
        raise _invalid("its host or port cannot be read", param) from None
    scheme = parts.scheme
    if scheme not in _PORTS:
        raise _invalid("it must start with https:// or http://", param)
    if userinfo:
        raise _invalid("a user name or password in it is not allowed", param)
    if port == 0:
        raise _invalid("port 0 cannot be connected to", param)
    bracketed = parts.netloc.startswith("[")
    host = parts.hostname or ""
    ip = _literal(host, bracketed, param)
    if ip is None:
        host = _name(host, param)
        ip = _literal(host, bracketed, param)  # full-width digits have become digits
    target = quote(parts.path or "/", safe=_PATH_SAFE)
    if parts.query:
        target += "?" + quote(parts.query, safe=_PATH_SAFE + "?")
    return Address(scheme, str(ip) if ip else host, port or _PORTS[scheme], target, ip)


def check_host(address: Address, hosts: Hosts, domains: Sequence[str], param: str) -> None:
    """Refuse a host that is not allowed, before its name is resolved. Raises `InvalidRequest`."""
    if hosts == "none":
        raise _forbidden("http(s) URLs are not fetched by this server", param)
    if not is_listed(address.host, domains):
        raise _forbidden("the host of the URL is not on this server's list of allowed hosts", param)
    if address.ip is not None and not may_connect(address.ip, hosts):
        raise _forbidden("the URL names an address that this server does not connect to", param)


def _literal(host: str, bracketed: bool, param: str) -> IP | None:
    """The address that `host` spells; None for a name. Only the canonical spelling of IPv4 is accepted, since programs
    disagree on what `127.1`, `0x7f000001`, `2130706433` and `0177.0.0.1` mean."""
    if bracketed:
        try:
            if "%" in host:
                raise ValueError
            return IPv6Address(host)
        except ValueError:
            raise _invalid("its IPv6 address cannot be read", param) from None
    if not _NUMBER.fullmatch(host.removesuffix(".").rpartition(".")[2]):
        return None
    try:
        return IPv4Address(host)
    except ValueError:
        raise _invalid("an IPv4 address must be four decimal numbers without leading zeros", param) from None


def _name(host: str, param: str) -> str:
    """The host name in lower case and ASCII, without the dot of the root."""
    try:
        name = host if host.isascii() else idna.encode(host, uts46=True).decode("ascii")
    except idna.IDNAError:
        name = ""
    name = name.lower().removesuffix(".")
    if not name or len(name) > 253 or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise _invalid("its host is not a valid name", param)
    return name


def to_ip(text: str) -> IP | None:
    """The address in a resolver's answer; None if it has a zone or cannot be read."""
    try:
        ip = ip_address(text)
    except ValueError:
        return None
    return None if isinstance(ip, IPv6Address) and ip.scope_id else ip


def _invalid(why: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"the URL cannot be used: {why}", param=param, code="invalid_url")


def _forbidden(why: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"{why}; send the file itself as a data: URL", param=param, code="forbidden_url")
