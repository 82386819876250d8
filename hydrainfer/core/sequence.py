"""The live state of one request at one instance, and the batches made from such sequences.

    tokens     = prompt_ids + produced so far
    n_computed = tokens whose KV is written

        |<------------- tokens ------------->|
        |  n_computed  |   next chunk   |    |     prefill: the chunk ends at or before len(tokens)
        |         n_computed             | 1 |     decode:  exactly the last token is not computed yet

Chunked prefill, decode and recomputation after preemption all use this arithmetic. Only the cursor tells which step the
request is in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from hydrainfer.core.errors import HydraError
from hydrainfer.core.request import Request
from hydrainfer.core.stage import Lane, Stage


class Hold:
    """What a sequence holds of the caches of an instance. The instance's `SequenceRoom` alone changes it.

    `blocks`: per cache spec, the block ids of the present lease, of which the first is the request's block number
    `first_block[spec]`. `remapped`: how often some of them were replaced. `capacity`: the number of tokens that can be
    computed with them. `n_settled`, `due`: the number of computed tokens at the last `SequenceRoom.settle`, and at the
    next one. `stops`: numbers of computed tokens at which chunks end. `absent`: per cache spec, the numbers of blocks
    whose content was left behind when the sequence came here."""

    __slots__ = ("absent", "blocks", "capacity", "due", "first_block", "n_settled", "remapped", "stops")

    def __init__(self) -> None:
        self.blocks: dict[str, list[int]] = {}
        self.first_block: dict[str, int] = {}
        self.remapped = 0
        self.capacity = 0
        self.n_settled = 0
        self.due = math.inf
        self.stops: tuple[int, ...] = ()
        self.absent: dict[str, range] = {}


class LiveSequence:
    """One request at one instance. The scheduler owns it and alone mutates it: each field has one writer besides the
    methods here. A runner reads it while it packs a batch, never later.

    `order`: (arrival time, number at the instance it first came to), its age, which it keeps everywhere; smaller is
    older. `attempt`: how often it was placed; `hops`: how often it moved to another instance. `hold`: its blocks here.
    `n_cached`: the cached tokens found when its prefill here first got room, -1 before. `pending_media`: indices of
    pictures still to be encoded. `in_flight`: how many of its work items lanes are executing. `started`: whether its
    present stage has been in a batch. `rank`: the scheduler's order, smaller goes first; `rest`: the tokens and
    pictures to compute when `rank` was made. `token_s`: seconds per token of the latest batch with a chunk of it, 0
    before. `latest_s`, `n_late`: when it got its latest token here, and how many tokens came later than the scheduler's
    limit (`scheduler/gap.py`). `n_most`: the most tokens it may have; `ends`: tokens that may end it, see
    `finish_reason`. `prompt_logprobs`: those computed and asked for, of the prompt's tokens from the second on, until
    they are handed out with the first token.
    """

    __slots__ = (
        "attempt",
        "cancelled",
        "cursor",
        "ends",
        "hold",
        "hops",
        "id",
        "in_flight",
        "latest_s",
        "n_cached",
        "n_computed",
        "n_late",
        "n_most",
        "order",
        "pending_media",
        "plan",
        "prompt_logprobs",
        "queued_s",
        "rank",
        "request",
        "rest",
        "started",
        "token_s",
        "tokens",
    )

    def __init__(self, request: Request, order: tuple[float, int], now: float, produced: tuple[int, ...] = ()) -> None:
        """`produced`: tokens from an earlier run that was lost. Only their KV has to be computed again."""
        self.request, self.id = request, request.id
        self.n_most = request.n_prompt + request.max_tokens
        self.ends = request.ends
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
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.pending_media: list[int] = list(range(len(request.media)))
        self.hold = Hold()
        self.in_flight = 0
        self.cancelled = False
        self.started = False
        self.queued_s = now

    @property
    def stage(self) -> Stage:
        return self.plan[self.cursor]

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def n_produced(self) -> int:
        return len(self.tokens) - self.n_prompt

    def rewind(self) -> None:
        """Go back to the first step, with nothing computed. Produced tokens are kept. Used by preemption and
        failure."""
        self.cursor = 0
        self.attempt += 1
        self.n_computed = 0
        self.pending_media = list(range(len(self.request.media)))
        self.started = False
        self.token_s = 0.0
        self.prompt_logprobs = []

    def lost(self) -> None:
        """Note that some of what was found of it did not come, so that less is cached."""
        if not self.n_produced:
            self.n_cached = -1

    def queue(self, now: float) -> None:
        """Begin to wait, from now on, for the first batch of the present stage."""
        self.queued_s = now
        self.started = False

    def go_to(self, stage: Stage) -> None:
        """Go to another step of the plan."""
        self.cursor = self.plan.index(stage)

    def have(self, n_computed: int, pending_media: Sequence[int]) -> None:
        """Note what the blocks that it has got contain: so many of its tokens, and all pictures but these."""
        self.n_computed = n_computed
        self.pending_media = list(pending_media)

    def encoded(self, index: int) -> None:
        """Picture `index` is encoded."""
        self.pending_media.remove(index)

    def extend(self, tokens: Sequence[int], *, computed: bool = False) -> None:
        """Append tokens, and with `computed` let as many count as computed."""
        self.tokens += tokens
        if computed:
            self.n_computed += len(tokens)

    def retract(self) -> None:
        """Take the last token back."""
        self.tokens.pop()

    def pin(self) -> None:
        """Keep its blocks in place, like a batch in flight, until `unpin`."""
        self.in_flight += 1

    def unpin(self) -> None:
        self.in_flight -= 1

    def improve(self, rank: tuple[float, float, int]) -> None:
        """Take this rank, if it is better."""
        self.rank = min(self.rank, rank)

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """The prompt's log-probabilities found so far; each is returned once."""
        found, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return found

    def finish_reason(self, token: int) -> str | None:
        """The reason why the just appended `token` ends the choice: "stop", "length", or None if it does not. (Stop
        strings are found during detokenisation.)"""
        if token in self.ends:
            if self.n_produced > self.request.sampling.min_tokens:
                return "stop"  # as in vLLM: min_tokens first, then possibly an end
            if self.request.sampling.grammar is not None and token in self.request.eos_ids:
                return "stop"  # one of `ends_to_avoid` was sampled: the grammar is finished
        return "length" if len(self.tokens) >= self.n_most else None

    def __repr__(self) -> str:
        return f"Sequence({self.id}, {self.stage.value}, {self.n_computed}/{len(self.tokens)})"


class TokenWork(msgspec.Struct, frozen=True):
    """Compute `count` tokens of `seq` from position `start`; sample a token after the last one if `sample`. The last of
    these tokens may be `drafts`, guesses of what follows; a token is sampled before each draft, too. Work that is
    launched while the previous batch is computed may consist of the single token that the previous batch samples
    (`unknown`)."""

    seq: LiveSequence
    start: int
    count: int
    sample: bool
    drafts: tuple[int, ...] = ()

    @property
    def unknown(self) -> bool:
        """Whether the work's token is being sampled by the previous batch."""
        return self.start >= len(self.seq.tokens)

    @property
    def asked(self) -> range:
        """The positions of the prompt's tokens whose log-probabilities were asked for and are computed by this work."""
        seq = self.seq
        if seq.request.sampling.prompt_logprobs is None or len(seq.tokens) > seq.n_prompt:
            return range(0)  # already returned, with the first token
        return range(self.start + 1, min(self.start + self.count + 1, seq.n_prompt))


class EncodeWork(msgspec.Struct, frozen=True):
    """Compute the embeddings of picture `index` of `seq`."""

    seq: LiveSequence
    index: int


@dataclass(slots=True)
class StepBatch:
    """The work that one lane executes next. `work` holds `EncodeWork` on the vision lane, `TokenWork` on the language
    lane. `n_items`: the number of pictures or tokens. The first `n_decodes` items of a language batch decode, the
    others prefill. `after_s`: how long a vision batch that this batch interrupts runs on first (`--overlap slice`).
    `n_drafts`: the number of tokens that are drafts. `n_guesses`: how many tokens a device that guesses shall guess
    behind each that it samples; 0 afterwards if that did not take as long as usual. `guess_s`: of the time that the
    batch took, what that did; `guess_failed`: with an error, so that the device guesses no more."""

    id: int
    lane: Lane
    work: list
    n_items: int
    n_decodes: int = 0
    after_s: float = 0.0
    n_drafts: int = 0
    n_guesses: int = 0
    guess_s: float = 0.0
    guess_failed: bool = False

    @property
    def decodes_only(self) -> bool:
        return self.n_decodes == len(self.work) and not self.n_drafts

    @property
    def chunked(self) -> bool:
        """Whether the batch prefills more than one token of some sequence. A chunk of one token costs as much as a
        decode."""
        return self.n_items - self.n_drafts > len(self.work)


class TokenLogprobs(NamedTuple):
    """The `logprob` and rank of the chosen token, and the `top` (token, logprob) pairs, in natural log, of the raw
    distribution."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class StepResult:
    """The result of a batch. `tokens[i]` belongs to the i-th sampled row; a work item with `sample` has one row for
    each of its drafts and one more. `logprobs`: by the same i, if asked for. By the index of the work item:
    `prompt_logprobs`, for its `asked` positions, and `drafts`, guesses of the tokens that follow. `failed`: errors by
    request id. `error`: the whole batch failed, and nothing in it may be used. `own_s`: how long the batch itself was
    executed; None: the time from launch to result."""

    batch: StepBatch
    tokens: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    failed: dict[str, HydraError] = field(default_factory=dict)
    error: HydraError | None = None
    own_s: float | None = None

    def error_of(self, seq: LiveSequence) -> HydraError | None:
        """The error that makes this result useless for the request; None if there is none."""
        return self.error or self.failed.get(seq.id)
