"""The live state of one request at one instance, and the batches made of it.

    tokens     = prompt_ids + produced so far
    n_computed = tokens whose KV is written

        |<------------- tokens ------------->|
        |  n_computed  |   next chunk   |    |     prefill: the chunk ends at or before len(tokens)
        |         n_computed             | 1 |     decode:  exactly the last token is not computed yet

Chunked prefill, decode and recomputation after preemption are this one arithmetic; only the cursor says which step the
request is in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from hydrainfer.core.errors import HydraError
from hydrainfer.core.request import Request
from hydrainfer.core.stage import Lane, Stage


class LiveSequence:
    """Owner: the scheduler, which alone mutates it. A runner reads it while it packs a batch, never later.

    `order`: (arrival time, rank at the instance it came to first), smaller is older; it keeps its age wherever it goes.
    `attempt`: times it was placed; `hops`: times it came to another instance. `blocks`: per cache spec, the block ids
    of the present lease, of which the first is the request's block number `first_block[spec]`. `remapped`: times that
    some of them became others. `capacity`: tokens that can be computed with them. `n_settled`, `due`: how many tokens
    were computed when the room last did something for it, and are when it next has to. `stops`: numbers of computed
    tokens at which a chunk of it ends. `n_cached`: tokens that were
    found computed when it first came to be prefilled here, -1 before. `pending_media`: indices of pictures that are
    still to be encoded. `in_flight`: work items of it that lanes are executing. `started`: its present stage has been
    part of a batch. `rest`: tokens and pictures that were to be computed when `rank` was made, by which the scheduler
    says who goes first (smaller), as `order` says who is older. `token_s`: seconds per token of the latest batch that
    had a chunk of it, 0 before. `latest_s`, `n_late`: when it got its latest token here, and how many have come later
    than a limit of the scheduler (`scheduler/gap.py`). `n_most`, `ends`: how many tokens it may have, and which end it
    once it has `min_tokens`. `prompt_logprobs`: of the prompt's tokens from the second on, as far as computed and asked
    for, until they are handed out with the first token.
    """

    __slots__ = (
        "attempt",
        "blocks",
        "cancelled",
        "capacity",
        "cursor",
        "due",
        "ends",
        "first_block",
        "hops",
        "id",
        "in_flight",
        "latest_s",
        "n_cached",
        "n_computed",
        "n_late",
        "n_most",
        "n_prompt",
        "n_settled",
        "order",
        "pending_media",
        "plan",
        "prompt_logprobs",
        "queued_s",
        "rank",
        "remapped",
        "request",
        "rest",
        "started",
        "stops",
        "token_s",
        "tokens",
    )

    def __init__(self, request: Request, order: tuple[float, int], now: float, produced: tuple[int, ...] = ()) -> None:
        """`produced`: tokens it already has, of a life that was lost; only its KV has to be computed again."""
        self.request, self.id = request, request.id
        self.n_prompt = len(request.prompt_ids)
        self.n_most = self.n_prompt + request.max_tokens
        sampling = request.sampling
        self.ends = sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids + request.eos_ids
        self.plan = request.plan()
        self.cursor = 0
        self.order = order
        self.rank = (order[0], *order)
        self.rest = (0, 0)
        self.token_s = 0.0
        self.latest_s, self.n_late = math.inf, 0
        self.attempt = 0
        self.hops = 0
        self.tokens: list[int] = [*request.prompt_ids, *produced]
        self.n_computed = 0
        self.n_cached = -1
        self.capacity = 0
        self.n_settled = 0
        self.due = math.inf
        self.stops: tuple[int, ...] = ()
        self.remapped = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.pending_media: list[int] = list(range(len(request.media)))
        self.blocks: dict[str, list[int]] = {}
        self.first_block: dict[str, int] = {}
        self.in_flight = 0
        self.cancelled = False
        self.started = False
        self.queued_s = now

    @property
    def stage(self) -> Stage:
        return self.plan[self.cursor]

    @property
    def n_produced(self) -> int:
        return len(self.tokens) - self.n_prompt

    def rewind(self) -> None:
        """Back to the first step, nothing computed; produced tokens are kept. Used by preemption and failure."""
        self.cursor = 0
        self.attempt += 1
        self.n_computed = 0
        self.capacity = 0
        self.pending_media = list(range(len(self.request.media)))
        self.blocks = {}
        self.started = False
        self.token_s = 0.0
        self.prompt_logprobs = []

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """The prompt's log-probabilities found so far; each is returned once."""
        found, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return found

    def finish_reason(self, token: int) -> str | None:
        """Whether the just appended `token` ends the choice: "stop", "length" or None. (Stop strings are found where
        text is made.)"""
        if token in self.ends and self.n_produced > self.request.sampling.min_tokens:
            return "stop"  # as vLLM: min_tokens, then possibly an end
        return "length" if len(self.tokens) >= self.n_most else None

    def __repr__(self) -> str:
        return f"Sequence({self.id}, {self.stage.value}, {self.n_computed}/{len(self.tokens)})"


class TokenWork(msgspec.Struct, frozen=True):
    """Compute `count` tokens of `seq` from position `start`; sample a token after the last one if `sample`. The last of
    them are `drafts`, which may follow its tokens: a token is sampled before each of them, too. What is launched while
    the batch before it is computed may begin with the token that this one samples: then it is that one alone."""

    seq: LiveSequence
    start: int
    count: int
    sample: bool
    drafts: tuple[int, ...] = ()

    @property
    def unknown(self) -> bool:
        """Whether its token is being sampled by the batch before it."""
        return self.start >= len(self.seq.tokens)

    @property
    def asked(self) -> range:
        """Positions of the prompt's tokens whose log-probabilities were asked for and follow from this work."""
        seq = self.seq
        if seq.request.sampling.prompt_logprobs is None or len(seq.tokens) > seq.n_prompt:
            return range(0)  # who has a first token has been told
        return range(self.start + 1, min(self.start + self.count + 1, seq.n_prompt))


class EncodeWork(msgspec.Struct, frozen=True):
    """Compute the embeddings of picture `index` of `seq`."""

    seq: LiveSequence
    index: int


@dataclass(slots=True)
class StepBatch:
    """The work that one lane executes next. `work` holds `EncodeWork` on the vision lane, `TokenWork` on the language
    lane. `n_items` is images or tokens. The first `n_decodes` items of a language batch decode, the others prefill.
    `after_s`: a vision batch that this one interrupts goes on so long first (`--overlap slice`). `n_drafts`: tokens
    that are only verified."""

    id: int
    lane: Lane
    work: list
    n_items: int
    n_decodes: int = 0
    after_s: float = 0.0
    n_drafts: int = 0

    @property
    def decodes_only(self) -> bool:
        return self.n_decodes == len(self.work) and not self.n_drafts

    @property
    def chunked(self) -> bool:
        """Whether it prefills more than a token of some sequence: what a chunk of one costs is what a decode costs."""
        return self.n_items - self.n_drafts > len(self.work)


class TokenLogprobs(NamedTuple):
    """`logprob` of the chosen token and the `top` (token, logprob) pairs, natural log, of the raw distribution."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class StepResult:
    """The result of a batch. `tokens[i]` belongs to the i-th row that is sampled: one of each work item with `sample`,
    after one for each of its drafts. `logprobs`: by the same i, only where asked for; `prompt_logprobs`: by the work
    item's place, what it `asked`. `failed`: by request id. `error`: the whole batch failed and nothing in it may be
    used. `own_s`: how long it was executed by itself; None: from launch to result."""

    batch: StepBatch
    tokens: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failed: dict[str, HydraError] = field(default_factory=dict)
    error: HydraError | None = None
    own_s: float | None = None

    def error_of(self, seq: LiveSequence) -> HydraError | None:
        """The error because of which nothing of this result may be used for the request, None if there is none."""
        return self.error or self.failed.get(seq.id)
