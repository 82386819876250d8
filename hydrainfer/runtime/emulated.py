"""An emulated device: batches take the time a cost model says, tokens are a function of the prompt, blocks hold tags.

No thread and no sleep: a ticket knows when it is ready, and the engine's driver wakes then. What a batch reads and
writes is fixed at launch and carried out when its time is over, so a block that is freed too early is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile

from hydrainfer.cache import for_stage
from hydrainfer.core import (
    CostModel,
    DeviceTime,
    EncodeWork,
    Guessing,
    HydraError,
    InternalError,
    Lane,
    LiveSequence,
    PixelSource,
    SlicedTime,
    Span,
    Stage,
    StepBatch,
    StepResult,
    TokenLogprobs,
    TokenWork,
)
from hydrainfer.runtime.lane import guarded
from hydrainfer.runtime.tags import MASK, KVTags, Reads, TagStore, content_of, digest, identity
from hydrainfer.storage import BlockStore

_MISMATCH = "emulated_mismatch"
_LIVES_KEPT = 1024
_GOLDEN = 0x9E3779B97F4A7C15
_LOG_HALF = -0.6931471805599453
_FIRST_LEARNED = 259  # in a Llama vocabulary, after the special tokens and the 256 bytes


def spoken_ids(n_vocab: int, placeholder: int) -> range:
    """The token ids that stand for text. They come after a Llama vocabulary's special tokens and bytes (in a small
    vocabulary: after the first three ids) and before the tokens added later, of which the picture's placeholder is the
    first."""
    first = _FIRST_LEARNED if n_vocab > 2 * _FIRST_LEARNED else 3
    return range(first, placeholder if placeholder > first + 1 else n_vocab)


class EmulatedDevice:
    """The state that the lanes of one instance share. `clock` is the engine's; `stores` by spec name; `spoken`: the ids
    to answer with. With `pixels`, each picture's pixels are fetched as a vision tower's would be. `sliced`: lanes share
    a thread. `guessing`: results bring guesses of what follows."""

    def __init__(
        self,
        cost: CostModel,
        clock: Callable[[], float],
        stores: Mapping[str, BlockStore],
        spoken: range,
        pixels: PixelSource | None = None,
        sliced: bool = False,
        guessing: Guessing | None = None,
    ) -> None:
        self.clock, self.spoken, self.pixels, self.guessing = clock, spoken, pixels, guessing
        self.tags = {name: TagStore(store) for name, store in stores.items()}
        self._time = SlicedTime(cost) if sliced else DeviceTime(cost)

    def tags_for(self, stage: Stage) -> TagStore | None:
        """The tags of the first cache that this stage uses; None if there is none."""
        spec = for_stage((tags.spec for tags in self.tags.values()), stage)
        return None if spec is None else self.tags[spec.name]

    def token_tags(self) -> list[TagStore]:
        """The tags of the caches that every decode writes."""
        return [tags for tags in self.tags.values() if Stage.DECODE in tags.spec.stages]

    def occupy(self, batch: StepBatch) -> Span:
        """Begin the batch now. Returns the time it takes of the device."""
        return self._time.occupy(batch, self.clock())


class EmulatedTicket:
    """A batch that is done when `span` ends."""

    __slots__ = ("_finish", "_result", "_span")

    def __init__(self, span: Span, finish: Callable[[], StepResult]) -> None:
        self._span, self._finish = span, finish
        self._result: StepResult | None = None

    def poll(self, now: float) -> StepResult | None:
        if self._result is None and now >= self._span.end_s:
            self._result = self._finish()
            self._result.own_s = self._span.own_s
        return self._result

    def ready_at(self) -> float | None:
        return self._span.end_s


class EmulatedRunner:
    """The runner of one lane; satisfies `engine.ports.Runner`.

    A request whose blocks do not hold what was written for it fails with `InternalError(code="emulated_mismatch")`.
    The checked reads are: the embeddings of a chunk; all the context of a sequence that is first seen here, or that
    prefills; the last block in every decode; and, in each step, all the context of one decoding sequence, in turns."""

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
            return EmulatedTicket(Span(float("-inf")), lambda: outcome)
        return EmulatedTicket(self._device.occupy(batch), lambda: guarded(batch, steps[0]))

    def close(self) -> None:
        """Nothing to do: no thread runs."""


class _Vision:
    """The vision lane's work: one tag for each block of a picture."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._pixels = device.pixels
        embeds = device.tags_for(Stage.ENCODE)
        assert embeds is not None, "this role has no embedding cache"
        self._embeds = embeds

    def pack(self, batch: StepBatch) -> Callable[[], StepResult]:
        blocks: list[int] = []
        tags: list[int] = []
        failed: dict[str, HydraError] = {}
        for work in batch.work:
            if (error := self._fetch(work)) is not None:
                failed[work.seq.id] = error
                continue
            span = work.seq.request.media[work.index]
            held = self._embeds.spec.pictures(work.seq.request)[work.index]
            blocks += self._embeds.spec.held(work.seq, held)
            ident = identity(digest(span.key))
            tags += range(ident + 1, ident + 1 + len(held))

        def finish() -> StepResult:
            self._embeds.write(blocks, tags)
            return StepResult(batch, failed=failed)

        return finish

    def _fetch(self, work: EncodeWork) -> HydraError | None:
        try:
            if self._pixels is not None:
                self._pixels(work.seq.request.media[work.index].pixels)
        except KeyError:
            return InternalError("the picture's pixels are no longer there", code="pixels_gone")
        except HydraError as e:
            return e
        return None


class _Life:
    """A sequence seen lately: its KV `tags`, where its last picture ends (`n_pictured`), and what its tokens come from.
    Token number `position` is `odd * position` modulo 2**31, scaled to the spoken ids: a function of the prompt, the
    position and, unless greedy, the seed. The ids in `never`, which would end it, do not occur."""

    __slots__ = ("attempt", "logprobs", "n_pictured", "never", "odd", "request", "tags")

    def __init__(self, seq: LiveSequence, block_tokens: int) -> None:
        request = seq.request
        self.request, self.attempt = request, seq.attempt
        content = content_of(request)
        self.tags = KVTags(request, content, block_tokens)
        self.n_pictured = max((m.end for m in request.media), default=0)
        if not request.sampling.greedy:
            content ^= (request.seed + request.choice * _GOLDEN) & MASK
        self.odd = ((content * _GOLDEN & MASK) >> 33) | 1
        self.never = request.eos_ids
        self.logprobs = request.sampling.logprobs


class _Language:
    """The language lane's work: the tags that chunks and decodes read and write, and their tokens."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._first, self._n_spoken = device.spoken.start, len(device.spoken)
        kv, *others = device.token_tags()
        self._kv, self._kv_name, self._others = kv, kv.spec.name, others
        self._embeds = device.tags_for(Stage.ENCODE)
        self._block_tokens = self._kv.spec.block_tokens
        self._guessing = device.guessing
        self._lives: dict[str, _Life] = {}
        self._n_steps = 0

    def pack(self, batch: StepBatch) -> Callable[[], StepResult]:
        embeds, kv, result = Reads(), Reads(), StepResult(batch)
        writes = [(store, Reads(), list[int](), list[int]()) for store in self._others]
        blocks: list[int] = []
        tags: list[int] = []
        tokens, size, lives = result.tokens, self._block_tokens, self._lives
        first, n_spoken, paged = self._first, self._n_spoken, not self._kv.spec.slides
        self._n_steps += 1
        turn = self._n_steps % len(batch.work)
        for i, item in enumerate(batch.work):
            seq, start, count = item.seq, item.start, item.count
            request, held = seq.request, seq.hold.blocks[self._kv_name]
            life = lives.get(request.id)
            if life is None or life.request is not request or life.attempt != seq.attempt:
                life = self._meet(seq)
                known = False
            else:
                known = i != turn
            idents = life.tags.idents
            drafts = item.drafts
            if drafts:  # only the right ones write what is read again
                item = self._right_part(item, life)
                count = item.count
            if len(idents) <= (start + count) // size:
                life.tags.know([*seq.tokens, *drafts[: count - 1]] if drafts else seq.tokens)
            for store, reads, *written in writes:
                self._chunk(item, life.tags, store, reads, *written)
            if known and count == 1 and start and paged:  # nearly always; written out, a call costs more than this
                block = held[start // size]
                kv.blocks.append(block if start % size else held[start // size - 1])
                kv.tags.append(idents[start // size] + start)
                kv.readers.append(request.id)
                blocks.append(block)
                tags.append(idents[(start + 1) // size] + start + 1)
            else:
                self._chunk(item, life.tags, self._kv, kv, blocks, tags)
            if start < life.n_pictured:
                self._look(item, embeds)
            if start < seq.n_prompt and (asked := item.asked):
                n_top = request.sampling.prompt_logprobs or 0
                result.prompt_logprobs[i] = [self._logprobs(seq.tokens[at], n_top) for at in asked]
            if self._guessing is not None and item.sample:
                n_known = start + count + 1
                result.drafts[i] = self._guessing.after(request, n_known, partial(self._token, life))
            for n in range(len(drafts)):
                if life.logprobs is not None:
                    result.logprobs[len(tokens)] = self._logprobs(self._token(life, start + 1 + n), life.logprobs)
                tokens.append(self._token(life, start + 1 + n))
            if drafts:
                start, count = start + len(drafts), 1
            if item.sample:
                token = first + ((life.odd * (start + count) & 0x7FFFFFFF) * n_spoken >> 31)
                if token in life.never:
                    token = self._another(token, life.never)
                if life.logprobs is not None:
                    result.logprobs[len(tokens)] = self._logprobs(token, life.logprobs)
                tokens.append(token)

        def finish() -> StepResult:
            wrong = self._kv.mismatches(kv)
            if self._embeds is not None:
                wrong |= self._embeds.mismatches(embeds)
            for store, reads, *written in writes:
                wrong |= store.mismatches(reads)
                store.write(*written)
            for reader, said in wrong.items():
                result.failed[reader] = InternalError(f"a cache block is not what it was: {said}", code=_MISMATCH)
            self._kv.write(blocks, tags)
            return result

        return finish

    def _chunk(
        self, work: TokenWork, of: KVTags, store: TagStore, reads: Reads, blocks: list[int], tags: list[int]
    ) -> None:
        """Note the blocks of a cache that a chunk reads (all of its context that is held) and those that it fills."""
        seq, start, count = work.seq, work.start, work.count
        held, size, end = seq.hold.blocks[store.spec.name], self._block_tokens, start + count
        if not store.spec.paged:
            source, written = store.spec.scan(held, start, count, bool(work.drafts))
            if start:
                reads.add(seq.id, [source], [of.after(start)])
            blocks += [block for _, block in written]
            tags += [of.after(n_tokens) for n_tokens, _ in written]
            return
        first = seq.hold.first_block.get(store.spec.name, 0)
        if start:
            reads.add(seq.id, held[: -(-start // size) - first], of.of(first, start))
        blocks += held[start // size - first : -(-end // size) - first]
        tags += of.of(start // size, end)

    def _right_part(self, item: TokenWork, life: _Life) -> TokenWork:
        """The work without the drafts from the first wrong one on."""
        right = (self._token(life, item.start + 1 + i) == draft for i, draft in enumerate(item.drafts))
        n_right = len(list(takewhile(bool, right)))
        return TokenWork(item.seq, item.start, 1 + n_right, True, item.drafts[:n_right])

    def _token(self, life: _Life, position: int) -> int:
        """The token at this position."""
        token = self._first + ((life.odd * position & 0x7FFFFFFF) * self._n_spoken >> 31)
        return self._another(token, life.never) if token in life.never else token

    def _meet(self, seq: LiveSequence) -> _Life:
        lives = self._lives
        lives.pop(seq.id, None)
        if len(lives) >= _LIVES_KEPT:
            del lives[next(iter(lives))]  # if that one still lives, it is met again
        life = lives[seq.id] = _Life(seq, self._block_tokens)
        return life

    def _look(self, work: TokenWork, reads: Reads) -> None:
        """Note the embedding blocks that this chunk reads."""
        assert self._embeds is not None, "this role has no embedding cache"
        seq, start, count = work.seq, work.start, work.count
        size, end = self._embeds.spec.block_tokens, start + count
        for span, held in zip(seq.request.media, self._embeds.spec.pictures(seq.request)):
            lo, hi = span.rows_before(start), span.rows_before(end)
            if lo < hi:
                parts = range(lo // size, -(-hi // size))
                blocks = self._embeds.spec.held(seq, range(held.start + parts.start, held.start + parts.stop))
                ident = identity(digest(span.key))
                reads.add(seq.id, blocks, [*range(ident + parts.start + 1, ident + parts.stop + 1)])

    def _another(self, token: int, never: tuple[int, ...]) -> int:
        """The next spoken id that is not in `never`; `token` itself if there is none."""
        others = (self._next(token, i) for i in range(1, self._n_spoken))
        return next((t for t in others if t not in never), token)

    def _next(self, token: int, by: int) -> int:
        return self._first + (token - self._first + by) % self._n_spoken

    def _logprobs(self, token: int, n_top: int) -> TokenLogprobs:
        """The token has half of the probability, its neighbour half of the rest, and so on."""
        n = min(n_top, self._n_spoken)
        return TokenLogprobs(_LOG_HALF, 1, tuple((self._next(token, i), _LOG_HALF * (i + 1)) for i in range(n)))
