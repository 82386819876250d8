"""Tenants: API keys, and a file of tenants with their limits.

acme:
  keys: [sha256:…]            # hashes of the bearer tokens that clients send; at least one
  top_priority: 1             # no request may have a higher one; 0 by default
  requests_per_minute: 600    # each limit: none by default; counted once the work of a request begins
  tokens_per_minute: 100000   # tokens of prompts and answers
  concurrency: 16             # choices at once: `n` and each prompt of a request count
  weight: 2                   # its share of the engine, relative to others, while they also wait; 1 by default
  admin: true                 # may reset the prefix cache; false by default
  share_cache: true           # share KV and embeddings with the other tenants that do; false by default
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter

from hydrainfer.config import check_known, read_yaml
from hydrainfer.core import ConfigError, HydraError, InvalidRequest, Overloaded, Share, Unauthorized
from hydrainfer.core.request import MAX_PRIORITY
from hydrainfer.server.door.queues import LATEST_TURN_S

_Limit = Annotated[int, msgspec.Meta(ge=1)]
_Key = Annotated[str, msgspec.Meta(pattern="^sha256:[0-9a-f]{64}$")]
_BUSY_S = 1.0  # the pause before a retry for a tenant that has too many requests at once
_WASTED = "refused or cancelled requests"
_WASTED_EACH, _FEWEST_WASTED = 10, 60  # requests per minute that may end before work: for each allowed one, at least


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the file. None means no limit."""

    keys: Annotated[tuple[_Key, ...], msgspec.Meta(min_length=1)]
    top_priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = MAX_PRIORITY
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    concurrency: _Limit | None = None
    weight: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 1.0
    share_cache: bool = False
    admin: bool = False
    name: str = ""

    @property
    def share(self) -> Share:
        return Share(self.name, self.weight)

    def salt(self, own: str | None) -> str:
        """The salt of a request's KV and embeddings. `own`: the request's own salt. Without `share_cache`, the salt
        differs from those of all other tenants."""
        whose = "" if self.share_cache else self.name
        return f"{whose}\0{own or ''}" if whose or own else ""


_FIELDS = [field for field in Tenant.__struct_fields__ if field != "name"]
_EVERYBODY = Tenant(keys=(), share_cache=True)
_OPERATOR = Tenant(keys=(), share_cache=True, admin=True)


def read_tenants(path: Path) -> dict[str, Tenant]:
    """The tenants of a file, by the hashes of their keys; at least one. Raises `ConfigError`."""
    by_key: dict[str, Tenant] = {}
    for name, entry in read_yaml(path).items():
        where = f"{path}, tenant {name}"
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}: must hold keys and limits, such as `keys: [sha256:…]`", param="tenants")
        for key in entry:
            check_known(key, _FIELDS, where)
        if "keys" in entry and not entry["keys"]:
            raise ConfigError(f"{where}: keys must hold at least one key", param="tenants")
        try:
            tenant = msgspec.convert({"top_priority": 0, **entry, "name": str(name)}, Tenant)
            if not tenant.name or "\0" in tenant.name:
                raise TypeError("a name has at least one character, and no NUL")
        except (msgspec.ValidationError, TypeError) as e:
            hint = (
                "; a key is written as sha256: and what `printf %s KEY | sha256sum` prints"
                if "sha256" in str(e)
                else ""
            )
            raise ConfigError(f"{where}: {e}{hint}", param="tenants") from None
        for key in tenant.keys:
            if key in by_key:
                raise ConfigError(f"{path}: {name} and {by_key[key].name} have the same key", param="tenants")
            by_key[key] = tenant
    if not by_key:  # an editor may be writing it, or the disk be full
        raise ConfigError(f"{path}: it names no tenant, so every key would be refused", param="tenants")
    return by_key


class Reloaded(NamedTuple):
    """The number of keys in a file that was read again, and the names of the tenants that it has no longer."""

    n_keys: int
    gone: list[str]


class NotAdmin(HydraError):
    """403: the key is valid, but none of an operator; or the server has no keys."""

    status, type, code = 403, "permission_error", "admin_key_needed"


class TenantLimit(Overloaded):
    """429: a tenant is at one of its limits. `tenant`: its name, for the log."""

    code = "tenant_limit"

    def __init__(self, tenant: str, limit: str, retry_after_s: float) -> None:
        super().__init__(f"this API key may have {limit}; retry when Retry-After says", retry_after_s=retry_after_s)
        self.tenant = tenant


class TenantRequest:
    """One request of a tenant, which counts as live from when it is made until `end`. It costs one of the tenant's
    requests per minute once its work begins. If it ends before that, because it was refused or given up, it costs none,
    but only so many such requests are let in per minute."""

    __slots__ = ("_begun", "_n", "_tenants", "tenant")

    def __init__(self, tenants: Tenants, tenant: Tenant) -> None:
        self.tenant = tenant
        self._tenants = tenants
        self._begun, self._n = False, 1

    def claim(self, n: int) -> None:
        """Count it by its `n` choices. Raises as `Tenants.claim`."""
        self._tenants.claim(self.tenant, n)
        self._n = n

    def begin_work(self) -> None:
        """Note that its work begins. Safe to repeat."""
        if not self._begun:
            self._begun = True
            self._tenants.settle(self.tenant, worked=True)

    def charge(self, n_tokens: int) -> None:
        """Count tokens once they are known. Its work has then begun, if there are any."""
        if n_tokens:
            self.begin_work()
            self._tenants.charge(self.tenant, n_tokens)

    def end(self) -> None:
        """Note that it has ended."""
        if not self._begun:
            self._tenants.settle(self.tenant, worked=False)
        self._tenants.end(self.tenant, self._n)


class Tenants:
    """The API keys, and what each tenant has used of its limits. Used on one thread, except for `reload`; the others of
    its methods take constant time.

    `keys`: keys without limits, of operators; `path`: a file of tenants. Without either, the server is open to all."""

    def __init__(self, keys: Iterable[str] = (), path: Path | None = None) -> None:
        """Read the file. Raises `ConfigError`."""
        self._keys = {_hash(key): _OPERATOR for key in keys}
        self._path = path
        self._tenants = read_tenants(path) if path is not None else {}
        self._reading = threading.Lock()
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._n_live: Counter[str] = Counter()  # by tenant, like the following
        self._n_idle: Counter[str] = Counter()  # requests whose work has not begun
        self._owed: Counter[str] = Counter()  # tokens beyond the limit
        self._latest: Counter[str] = Counter()  # tokens of the latest request
        self._turn_s: dict[str, float] = {}

    @property
    def open(self) -> bool:
        """Whether no key is needed."""
        return not self._keys and self._path is None

    def reload(self) -> Reloaded:
        """Read the file again; what has been used still counts. Raises `ConfigError`; the tenants are then as
        before."""
        with self._reading:  # or of two at once the one that began first could end last
            before = self._tenants
            if self._path is not None:
                self._tenants = read_tenants(self._path)
            names = {tenant.name for tenant in self._tenants.values()}
            gone = {tenant.name for tenant in before.values()} - names
            return Reloaded(len(self._tenants), sorted(gone))

    def find(self, authorization: str) -> Tenant:
        """The tenant that sent this Authorization header, whose bytes were decoded as latin-1. Raises
        `Unauthorized`."""
        if self.open:
            return _EVERYBODY
        scheme, _, key = authorization.partition(" ")
        tenant = next((t for d in _digests(key) if (t := self._keys.get(d) or self._tenants.get(d))), None)
        if tenant is None or scheme.lower() != "bearer":
            raise Unauthorized("a valid API key is needed: send the header Authorization: Bearer KEY")
        return tenant

    def check_admin(self, authorization: str) -> None:
        """Raises `Unauthorized` as `find`, or `NotAdmin` if the key is none of an operator."""
        if not self.find(authorization).admin:
            raise NotAdmin("only an operator may do this: with the key of --api-key, or of a tenant with admin: true")

    def check(self, tenant: Tenant) -> None:
        """Raises `Overloaded` if the tenant may have no more requests now."""
        if tenant.concurrency is not None and self._n_live[tenant.name] >= tenant.concurrency:
            raise self._exceeded(tenant, f"{tenant.concurrency} requests at once", 0.0, _BUSY_S)
        self._pay(tenant)
        if tenant.requests_per_minute is not None:
            cost = 1 + self._n_idle[tenant.name]  # those that may still begin, and this one
            self._check_window(tenant, "requests", tenant.requests_per_minute, cost, turn=1)
            self._check_window(tenant, _WASTED, _most_wasted(tenant.requests_per_minute), 1, turn=1)
        if tenant.tokens_per_minute is not None:
            cost = 1 + self._owed[tenant.name]
            self._check_window(tenant, "tokens", tenant.tokens_per_minute, cost, turn=self._latest[tenant.name])

    def begin(self, tenant: Tenant) -> TenantRequest:
        """Let in one more request of the tenant. The caller calls its `end`."""
        self._n_live[tenant.name] += 1
        self._n_idle[tenant.name] += 1
        return TenantRequest(self, tenant)

    def settle(self, tenant: Tenant, *, worked: bool) -> None:
        """Note that the work of one of the tenant's requests begins or, not `worked`, never will."""
        self._n_idle[tenant.name] -= 1
        most = tenant.requests_per_minute
        if most is not None and worked:
            self._limiter.hit(RateLimitItemPerMinute(most), tenant.name, "requests")
        elif most is not None:
            self._limiter.hit(RateLimitItemPerMinute(_most_wasted(most)), tenant.name, _WASTED)

    def claim(self, tenant: Tenant, n: int) -> None:
        """Count a request of the tenant, which `begin` has counted once, by its `n` choices. Raises `InvalidRequest` if
        the tenant may never have so many at once, or `Overloaded` if it has others."""
        most = tenant.concurrency
        if most is not None and n > most:
            raise InvalidRequest(f"this API key may have {most} choices at once, and these are {n}", param="n")
        if most is not None and self._n_live[tenant.name] - 1 + n > most:
            raise self._exceeded(tenant, f"{most} requests at once, and each choice counts", 0.0, _BUSY_S)
        self._n_live[tenant.name] += n - 1

    def charge(self, tenant: Tenant, n_tokens: int) -> None:
        """Count tokens once they are known. Tokens beyond the limit are owed, and are paid before the next request."""
        if tenant.tokens_per_minute is not None:
            self._latest[tenant.name] = n_tokens
            self._owed[tenant.name] += n_tokens
            self._pay(tenant)

    def end(self, tenant: Tenant, n: int) -> None:
        """Note that one of the tenant's requests, which counts `n` times, has ended."""
        self._n_live[tenant.name] -= n

    @staticmethod
    def check_priority(tenant: Tenant, priority: int) -> None:
        """Raises `InvalidRequest` if the tenant may not have this priority."""
        if priority > tenant.top_priority:
            raise InvalidRequest(
                f"priority {priority} is above {tenant.top_priority}, the highest of this API key", param="priority"
            )

    def _pay(self, tenant: Tenant) -> None:
        if tenant.tokens_per_minute is not None and self._owed[tenant.name]:
            item = RateLimitItemPerMinute(tenant.tokens_per_minute)
            paid = min(self._owed[tenant.name], self._limiter.get_window_stats(item, tenant.name, "tokens").remaining)
            if paid and self._limiter.hit(item, tenant.name, "tokens", cost=paid):
                self._owed[tenant.name] -= paid

    def _check_window(self, tenant: Tenant, what: str, limit: int, cost: int, turn: int) -> None:
        """Raises `Overloaded` unless the tenant may have `cost` more of these in this minute. `turn`: the number that
        the next one is likely to take."""
        item, each_s = RateLimitItemPerMinute(limit), 60.0 / limit
        if cost > limit or not self._limiter.test(item, tenant.name, what, cost=cost):
            reset_s = self._limiter.get_window_stats(item, tenant.name, what).reset_time - time.time()
            raise self._exceeded(tenant, f"{limit} {what} per minute", reset_s + each_s * cost, each_s * turn)

    def _exceeded(self, tenant: Tenant, limit: str, wait_s: float, each_s: float) -> TenantLimit:
        """The error for a tenant at its limit. Refused requests get turns one after the other, so that they do not all
        come back at once."""
        now = time.time()
        turn_s = max(self._turn_s.get(tenant.name, 0.0), now + wait_s) + each_s
        self._turn_s[tenant.name] = min(turn_s, now + LATEST_TURN_S)
        return TenantLimit(tenant.name, limit, turn_s - now)


def _most_wasted(requests_per_minute: int) -> int:
    """The requests of a tenant per minute that may end before their work begins. Each costs the server a little."""
    return max(_FEWEST_WASTED, _WASTED_EACH * requests_per_minute)


def _digests(key: str) -> tuple[str, ...]:
    """The hashes of the keys that a header may mean. Clients encode letters beyond ASCII as UTF-8, or as latin-1."""
    if key.isascii() or max(key) > "\xff":
        return (_hash(key),)
    return _hash(key), _hash(key.encode("latin-1").decode("utf-8", "surrogateescape"))


def _hash(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
