"""An emulated device: batches take the time a cost model says, tokens are a function of the prompt, blocks hold tags.

No thread and no sleep: a ticket knows when it is ready, and the engine's driver wakes then. What a batch reads and
writes is settled at launch and carried out when its time is over, so a block given away too early shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hydrainfer.cache import embed_ranges
from hydrainfer.core import (
    CostModel,
    EncodeWork,
    HydraError,
    InternalError,
    Lane,
    PixelSource,
    Request,
    Sequence,
    StepBatch,
    StepResult,
    TokenLogprobs,
    TokenWork,
)
from hydrainfer.runtime.lane import guarded
from hydrainfer.runtime.tags import MASK, Reads, TagStore, content_of, digest, identity, kv_identity, kv_tags
from hydrainfer.storage import BlockStore

_MISMATCH = "emulated_mismatch"
_LIVES_KEPT = 1024
_GOLDEN = 0x9E3779B97F4A7C15
_LOG_HALF = -0.6931471805599453
_FIRST_LEARNED = 259  # of a Llama vocabulary: before it the special tokens and the 256 bytes


def spoken_ids(n_vocab: int, image_token: int) -> range:
    """Token ids that spell something: between a Llama vocabulary's bytes and what was added behind it (the picture's
    placeholder first), or all but the first three where that leaves nothing."""
    first = _FIRST_LEARNED if n_vocab > 2 * _FIRST_LEARNED else 3
    return range(first, image_token if image_token > first + 1 else n_vocab)


class EmulatedDevice:
    """What the lanes of one instance share. `clock` is the engine's; `stores` by spec name; `spoken`: the ids to answer
    with. With `pixels`, each picture's pixels are fetched as a vision tower's would be.

    The lanes run side by side. A batch launched while the other lane is busy runs `overlap_slowdown` times slower until
    that lane's batch ends; the one that was there first is not slowed."""

    def __init__(
        self,
        cost: CostModel,
        clock: Callable[[], float],
        stores: Mapping[str, BlockStore],
        spoken: range,
        pixels: PixelSource | None = None,
    ) -> None:
        self.clock, self.spoken, self.pixels = clock, spoken, pixels
        self.tags = {name: TagStore(store) for name, store in stores.items()}
        self._cost = cost
        self._busy_until: dict[Lane, float] = {}

    def occupy(self, batch: StepBatch) -> float:
        """Begin the batch now; when it will be done."""
        now, work_s, slowdown = self.clock(), self._cost.step_s(batch), self._cost.overlap_slowdown
        shared_s = max((end_s - now for lane, end_s in self._busy_until.items() if lane is not batch.lane), default=0.0)
        if shared_s > 0.0 and slowdown > 1.0:
            work_s = work_s * slowdown if work_s * slowdown <= shared_s else shared_s + work_s - shared_s / slowdown
        self._busy_until[batch.lane] = end_s = now + work_s
        return end_s


class EmulatedTicket:
    """A batch that is done at `at`."""

    __slots__ = ("_at", "_finish", "_result")

    def __init__(self, at: float, finish: Callable[[], StepResult]) -> None:
        self._at, self._finish = at, finish
        self._result: StepResult | None = None

    def poll(self, now: float) -> StepResult | None:
        if self._result is None and now >= self._at:
            self._result = self._finish()
        return self._result

    def ready_at(self) -> float | None:
        return self._at


class EmulatedRunner:
    """One lane; satisfies `engine.ports.Runner`.

    A request whose blocks do not hold what was written for it fails with `InternalError(code="emulated_mismatch")`.
    Checked are: the embeddings that a chunk reads; all its context when a sequence is first seen here, or prefills; its
    last block in every decode; and once a step all the context of one decoding sequence, in turns."""

    def __init__(self, device: EmulatedDevice, lane: Lane) -> None:
        self._device = device
        self._work = _Vision(device) if lane is Lane.VISION else _Language(device)

    def launch(self, batch: StepBatch) -> EmulatedTicket:
        steps: list[Callable[[], StepResult]] = []

        def pack() -> StepResult:
            steps.append(self._work.pack(batch))
            return StepResult(batch)

        outcome = guarded(batch, pack)
        if not steps:
            return EmulatedTicket(float("-inf"), lambda: outcome)
        return EmulatedTicket(self._device.occupy(batch), lambda: guarded(batch, steps[0]))

    def close(self) -> None:
        """Nothing runs."""


class _Vision:
    """Pictures: one tag for each of their blocks."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._pixels = device.pixels
        self._embeds = device.tags["embed"]

    def pack(self, batch: StepBatch) -> Callable[[], StepResult]:
        blocks: list[int] = []
        tags: list[int] = []
        failed: dict[str, HydraError] = {}
        for work in batch.work:
            if not self._fetch(work):
                failed[work.seq.id] = InternalError("the picture's pixels are no longer there", code="pixels_gone")
                continue
            span = work.seq.request.media[work.index]
            held = embed_ranges(work.seq.request, self._embeds.spec)[work.index]
            blocks += work.seq.blocks["embed"][held.start : held.stop]
            ident = identity(digest(span.key))
            tags += range(ident + 1, ident + 1 + len(held))

        def finish() -> StepResult:
            self._embeds.write(blocks, tags)
            return StepResult(batch, failed=failed)

        return finish

    def _fetch(self, work: EncodeWork) -> bool:
        try:
            if self._pixels is not None:
                self._pixels(work.seq.request.media[work.index].pixels)
        except KeyError:
            return False
        return True


class _Life:
    """What is known of a sequence seen lately: its KV `ident`ity and the multiplier that its tokens come from."""

    __slots__ = ("attempt", "ident", "odd", "request")

    def __init__(self, seq: Sequence) -> None:
        self.request, self.attempt = seq.request, seq.attempt
        content = content_of(seq.request)
        self.ident = kv_identity(seq.request, content)
        if not seq.request.sampling.greedy:
            content ^= (seq.request.seed + seq.request.choice * _GOLDEN) & MASK
        self.odd = (content * _GOLDEN & MASK) | 1


class _Language:
    """Chunks and decodes: tags of what they read, tags of what they write, tokens."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._spoken = device.spoken
        self._kv = device.tags["kv"]
        self._embeds = device.tags.get("embed")
        self._block_tokens = self._kv.spec.block_tokens
        self._lives: dict[str, _Life] = {}

    def pack(self, batch: StepBatch) -> Callable[[], StepResult]:
        embeds, kv = Reads(), Reads()
        blocks: list[int] = []
        tags: list[int] = []
        result = StepResult(batch)
        tokens, size, lives = result.tokens, self._block_tokens, self._lives
        turn = batch.id % len(batch.work)
        for i, item in enumerate(batch.work):
            seq, start, count, sample = item
            request, held = seq.request, seq.blocks["kv"]
            life = lives.get(request.id)
            known = life is not None and life.request is request and life.attempt == seq.attempt
            if life is None or not known:
                life = self._meet(seq)
            end, ident = start + count, life.ident
            if count == 1 and known and i != turn:
                kv.add(request.id, [held[(start - 1) // size]], [ident + start])
                blocks.append(held[start // size])
                tags.append(ident + end)
            else:
                if start:
                    kv.add(request.id, held[: -(-start // size)], kv_tags(ident, 0, start, size))
                first = start // size
                blocks += held[first : -(-end // size)]
                tags += kv_tags(ident, first, end, size)
                if request.media and start < request.n_prompt:
                    self._look(item, embeds)
            if sample:
                token = self._token(life.odd, end, request)
                if request.sampling.logprobs is not None:
                    result.logprobs[len(tokens)] = self._logprobs(token, request.sampling.logprobs)
                tokens.append(token)

        def finish() -> StepResult:
            wrong = kv.mismatches(self._kv)
            if self._embeds is not None:
                wrong |= embeds.mismatches(self._embeds)
            for reader, said in wrong.items():
                result.failed[reader] = InternalError(f"a cache block is not what it was: {said}", code=_MISMATCH)
            self._kv.write(blocks, tags)
            return result

        return finish

    def _meet(self, seq: Sequence) -> _Life:
        lives = self._lives
        lives.pop(seq.id, None)
        if len(lives) >= _LIVES_KEPT:
            del lives[next(iter(lives))]  # if that one still lives, it is met again
        life = lives[seq.id] = _Life(seq)
        return life

    def _look(self, work: TokenWork, reads: Reads) -> None:
        """At the embeddings that this chunk reads."""
        assert self._embeds is not None, "this role has no embedding cache"
        seq, start, count, _ = work
        size, end = self._embeds.spec.block_tokens, start + count
        for span, held in zip(seq.request.media, embed_ranges(seq.request, self._embeds.spec)):
            lo, hi = max(start, span.start) - span.start, min(end, span.start + span.n_tokens) - span.start
            if lo < hi:
                parts = range(lo // size, -(-hi // size))
                blocks = seq.blocks["embed"][held.start + parts.start : held.start + parts.stop]
                ident = identity(digest(span.key))
                reads.add(seq.id, blocks, [*range(ident + parts.start + 1, ident + parts.stop + 1)])

    def _token(self, odd: int, position: int, request: Request) -> int:
        """A function of the prompt, the position and, unless greedy, the seed; never one of the request's `eos_ids`."""
        spoken = self._spoken
        n = len(spoken)
        token = spoken.start + ((odd * position & MASK) >> 32) * n // (1 << 32)
        while token in request.eos_ids:
            token = self._next(token)
        return token

    def _next(self, token: int, by: int = 1) -> int:
        spoken = self._spoken
        return spoken.start + (token - spoken.start + by) % len(spoken)

    def _logprobs(self, token: int, n_top: int) -> TokenLogprobs:
        """The token has half of the probability, its neighbour half of the rest, and so on."""
        n = min(n_top, len(self._spoken))
        return TokenLogprobs(_LOG_HALF, 1, tuple((self._next(token, i), _LOG_HALF * (i + 1)) for i in range(n)))
