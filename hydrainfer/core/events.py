"""The outputs of an instance: token outputs for the client, lifecycle events for the metrics, load for the router."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from hydrainfer.core.errors import KINDS, HydraError, InternalError
from hydrainfer.core.sequence import TokenLogprobs
from hydrainfer.core.stage import Layout, Role


class ErrorInfo(msgspec.Struct, frozen=True):
    """A `HydraError` as it travels in a message."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None
    type: str | None = None

    @classmethod
    def of(cls, e: HydraError) -> ErrorInfo:
        return cls(e.status, e.message, e.code, e.param, e.retry_after_s, e.type)

    def exception(self) -> HydraError:
        kind = next((k for k in KINDS if k.status == self.status and self.type in (None, k.type)), InternalError)
        return kind(self.message, param=self.param, code=self.code, retry_after_s=self.retry_after_s)


class Output(msgspec.Struct, frozen=True):
    """New tokens of one request, or its end. Exactly one output per request has a `finish_reason`
    ("stop", "length", "abort" or "error"), and it is the last. `start`: how many tokens the request had before these,
    since outputs of several instances may overtake each other. `n_cached`: prompt tokens that were found in a cache, 0
    from an instance that did not prefill the request. `prompt_logprobs`: those of the prompt's tokens from the second
    on, sent with the first token if they were asked for."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_token: int | None = None
    error: ErrorInfo | None = None
    start: int = 0
    n_cached: int = 0


OutputSink = Callable[[list[Output]], None]
"""Called once per step on the engine's thread with everything that step produced. Must not block."""


class EventKind(enum.StrEnum):
    """The kinds of lifecycle events. `QUEUED`, `STARTED`, `ENDED` and `MIGRATING` (to an instance of the stage) have a
    stage in `LifecycleEvent.stage`; the others have none."""

    ARRIVED = "arrived"
    QUEUED = "queued"
    STARTED = "started"
    ENDED = "ended"
    TOKEN = "token"
    DRAFTED = "drafted"
    ACCEPTED = "accepted"
    MIGRATING = "migrating"
    PREEMPTED = "preempted"
    RECOVERED = "recovered"
    FINISHED = "finished"


class LifecycleEvent(NamedTuple):
    """One event in a request's life. `at_s`: by the engine's clock; `detail`: a finish reason; `n`: the prompt tokens
    of an arrival, those of them that are in a cache when prefill has `STARTED`, the drafts that a step has verified, or
    those of them that were right. `instance`: where it happened; empty if that is not known, or there is only one."""

    request_id: str
    kind: EventKind
    at_s: float
    stage: str = ""
    detail: str = ""
    n: int = 0
    instance: str = ""


class Load(msgspec.Struct, frozen=True):
    """The work that waits at an instance, and the recent costs of such work, for placement.

    `n_pictures` to encode, `n_tokens` to prefill, `n_decoding` sequences that decode or will; `picture_s`, `token_s`,
    `decode_s` (one token of one sequence) and `pull_s` (one token whose KV is copied here) are running means of
    measured seconds, 0 before the first measurement. `sizes`: if short prompts go before long ones, the (prompts,
    tokens) that make up `n_tokens`, for each power of two of a prompt's tokens."""

    n_pictures: int = 0
    n_tokens: int = 0
    n_decoding: int = 0
    picture_s: float = 0.0
    token_s: float = 0.0
    decode_s: float = 0.0
    pull_s: float = 0.0
    sizes: tuple[tuple[int, int], ...] = ()

    def n_before(self, n_tokens: int) -> int:
        """The number of waiting tokens that go before a prompt with `n_tokens` tokens to compute. A longer prompt
        counts with `n_tokens`: its rest comes later, or would have been computed by now."""
        return self.n_tokens - sum(max(0, tokens - n * n_tokens) for n, tokens in self.sizes)


class CachedKeys(msgspec.Struct, frozen=True):
    """The keys of prefixes (`core.chain`) that one cache has published or evicted since the last report.
    `resume_blocks`: how many keys before a point must be there for a request to go on from that point; `chained`:
    whether a key is there only if all before it are."""

    resume_blocks: int = 1
    chained: bool = True
    added: tuple[bytes, ...] = ()
    dropped: tuple[bytes, ...] = ()


class Cached(msgspec.Struct, frozen=True):
    """The news of all caches of an instance that limit where a request can go on, always in the same order. Their keys
    are those of blocks of `block_tokens`."""

    block_tokens: int
    caches: tuple[CachedKeys, ...] = ()


class DraftCounts(msgspec.Struct):
    """What became of one drafter's drafts: the steps in which it had some, its `n_tokens` drafts, those that were
    right, and how many of them at each place behind the sequence's last token. `n_failures`: errors that it has
    raised. `left_out`: guesses that were not verified, by the reason: their `cost`, the step's token `budget`, or no
    `room`."""

    n_drafts: int = 0
    n_tokens: int = 0
    n_accepted: int = 0
    by_position: list[int] = []
    n_failures: int = 0
    left_out: dict[str, int] = {}

    def add(self, n_tokens: int, n_accepted: int) -> None:
        """Count the drafts of one sequence in one step."""
        self.n_drafts += 1
        self.n_tokens += n_tokens
        self.n_accepted += n_accepted
        self.by_position += [0] * (n_tokens - len(self.by_position))
        for i in range(n_accepted):
            self.by_position[i] += 1

    def leave_out(self, **by_reason: int) -> None:
        """Count guesses that were not verified."""
        for reason, n in by_reason.items():
            if n:
                self.left_out[reason] = self.left_out.get(reason, 0) + n


class StepTokens(msgspec.Struct):
    """The tokens of the language batches of an instance so far, and the number of batches by size: those of up to 1, 2,
    4, … tokens, each counted once. The tokens of a batch are those that decode, prefill and verify."""

    n_tokens: int = 0
    by_size: list[int] = []

    def add(self, n_tokens: int) -> None:
        """Count a batch."""
        size = max(n_tokens - 1, 0).bit_length()
        self.n_tokens += n_tokens
        self.by_size += [0] * (size + 1 - len(self.by_size))
        self.by_size[size] += 1


class StoreStats(msgspec.Struct):
    """What an instance has done with its shared store. `n_lost`: blocks that were to be loaded and did not come;
    `n_late`: requests that did not wait for them any longer; `n_skipped`: blocks that were evicted before they were
    saved; `n_corrupt`: those that were found broken; `n_failures`: how often the store could not be used."""

    n_asks: int = 0
    n_loaded: int = 0
    n_bytes_loaded: int = 0
    load_s: float = 0.0
    n_lost: int = 0
    n_late: int = 0
    n_saved: int = 0
    n_bytes_saved: int = 0
    n_skipped: int = 0
    n_corrupt: int = 0
    n_failures: int = 0


class InstanceStats(msgspec.Struct, frozen=True):
    """The statistics of one instance, for `/health`, `/metrics` and the router. `stalled_s`: how long there has been
    work without progress."""

    role: str
    n_waiting: int
    n_running: int
    n_encoding: int
    n_prefilling: int
    n_decoding: int
    cache_blocks: dict[str, tuple[int, int, int]]  # spec -> (total, leased, cached)
    pictures_found: int  # those in the cache, of `pictures_wanted`, which requests wanted encoded here
    pictures_wanted: int
    n_preemptions: int
    n_steps: int
    stalled_s: float
    hung_s: float = 0.0  # how long a lane has been at its present batch
    n_migrating: int = 0  # requests that wait for another instance to pull them
    n_arriving: int = 0  # requests offered by other instances, not here yet
    blocks_pulled: dict[str, int] = {}  # spec -> blocks copied from other instances so far
    n_landed: int = 0
    tokens_found: int = 0  # those already computed, of `tokens_wanted`, which requests wanted prefilled here
    tokens_wanted: int = 0
    tokens_missed: int = 0  # not found, though the caches of all tokens have them: another cache does not
    n_parked: int = 0  # sequences that wait in host memory to decode
    drafts: dict[str, DraftCounts] = {}  # by drafter
    step_tokens: StepTokens = msgspec.field(default_factory=StepTokens)
    store: StoreStats | None = None  # None if there is none
    tokens_asked: int = 0  # those not on the device, of `tokens_wanted`, for which other tiers were asked
    tokens_from: dict[str, int] = {}  # those not on the device, of `tokens_found`: by tier, 0 for each, or from `PEER`


PEER = "peer"
"""Another instance, among the places that tokens of a prompt are found at."""

Forgotten = dict[str, dict[str, int]]
"""The numbers of blocks whose content was forgotten, by instance and cache."""


class InstanceInfo(msgspec.Struct, frozen=True):
    """One instance of the layout, for `/v1/instances`. `state`: "alive", "suspect" (silent for a while) or "dead";
    `heard_s`: seconds since its last message; `trouble`: why a dead one has not come back, if known."""

    name: str
    role: str
    state: str
    incarnation: int = 0
    pid: int = 0
    heard_s: float = 0.0
    stats: InstanceStats | None = None
    trouble: str = ""


def total(parts: list[InstanceStats]) -> InstanceStats:
    """The statistics of all instances as one. Counts are added up; `stalled_s` and `hung_s` are the largest."""
    if not parts:
        return InstanceStats("", 0, 0, 0, 0, 0, {}, 0, 0, 0, 0, 0.0)
    blocks: dict[str, tuple[int, int, int]] = {}
    pulled: Counter[str] = Counter()
    tokens_from: Counter[str] = Counter()
    for part in parts:
        for spec, (n, leased, cached) in part.cache_blocks.items():
            a, b, c = blocks.get(spec, (0, 0, 0))
            blocks[spec] = (a + n, b + leased, c + cached)
        pulled.update(part.blocks_pulled)
        tokens_from.update(part.tokens_from)

    def add(name: str) -> int:
        return sum(getattr(part, name) for part in parts)

    return InstanceStats(
        role=str(Layout(tuple(Role.parse(part.role) for part in parts))),
        n_waiting=add("n_waiting"),
        n_running=add("n_running"),
        n_encoding=add("n_encoding"),
        n_prefilling=add("n_prefilling"),
        n_decoding=add("n_decoding"),
        cache_blocks=blocks,
        pictures_found=add("pictures_found"),
        pictures_wanted=add("pictures_wanted"),
        n_preemptions=add("n_preemptions"),
        n_steps=add("n_steps"),
        stalled_s=max(part.stalled_s for part in parts),
        hung_s=max(part.hung_s for part in parts),
        n_migrating=add("n_migrating"),
        n_arriving=add("n_arriving"),
        blocks_pulled=dict(pulled),
        n_landed=add("n_landed"),
        tokens_found=add("tokens_found"),
        tokens_wanted=add("tokens_wanted"),
        tokens_missed=add("tokens_missed"),
        n_parked=add("n_parked"),
        drafts=_all_drafts(parts),
        step_tokens=_all_step_tokens(parts),
        store=_all_stores([part.store for part in parts if part.store is not None]),
        tokens_asked=add("tokens_asked"),
        tokens_from=dict(tokens_from),
    )


def _all_step_tokens(parts: list[InstanceStats]) -> StepTokens:
    sizes = zip_longest(*(part.step_tokens.by_size for part in parts), fillvalue=0)
    return StepTokens(sum(part.step_tokens.n_tokens for part in parts), [sum(each) for each in sizes])


def _all_stores(parts: list[StoreStats]) -> StoreStats | None:
    return StoreStats(*map(sum, zip(*map(msgspec.structs.astuple, parts)))) if parts else None


def _all_drafts(parts: list[InstanceStats]) -> dict[str, DraftCounts]:
    found: dict[str, DraftCounts] = {}
    for name, counts in ((name, counts) for part in parts for name, counts in part.drafts.items()):
        one = found.setdefault(name, DraftCounts())
        one.n_drafts += counts.n_drafts
        one.n_tokens += counts.n_tokens
        one.n_accepted += counts.n_accepted
        one.n_failures += counts.n_failures
        one.leave_out(**counts.left_out)
        one.by_position = [a + b for a, b in zip_longest(one.by_position, counts.by_position, fillvalue=0)]
    return found
