"""The modelled time of a batch, for emulated devices and the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from hydrainfer.core.sequence import StepBatch
from hydrainfer.core.stage import Lane


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a batch: a base, and the larger of arithmetic and memory traffic (the roofline of the paper's Table
    2), all in seconds.

    A vision batch takes `encode_base_s` and the larger of `encode_weights_s` and its arithmetic: per picture
    `encode_image_s`, per embedding token `encode_token_s` and per pair of tokens of one picture `encode_attention_s`.
    A language batch takes `step_base_s` and the larger of its arithmetic (per prefilled token `prefill_token_s`, and
    `prefill_attention_s` for each pair of a chunk's tokens and the context after it, `count * (start + count)`; per
    decoding sequence `decode_token_s`, and `decode_context_s` for each token of its context, the new one included) and
    its traffic (`weights_s` once, `context_s` for each token of context that is read, and `sequence_s` per decoding
    sequence, for windows, which are read whatever the context). Terms left at 0 make a model linear in the contents of
    a batch. All experts together take `experts_s` to read; each token reads the share `expert_share` of them, and
    tokens are assumed to choose independently.

    `overlap_slowdown`: how many times slower a batch runs that is launched beside a batch of the instance's other lane,
    which is not slowed (`DeviceTime`). Together they run at 1 + 1 / `overlap_slowdown` times the speed of either alone.
    `prefill_overlap_slowdown`: the same if the language batch prefills, and so competes with encode for arithmetic; 0:
    no difference. If lanes only take turns, a very large number.
    """

    encode_base_s: float = 0.0
    encode_image_s: float
    encode_token_s: float = 0.0
    encode_attention_s: float = 0.0
    encode_weights_s: float = 0.0
    step_base_s: float
    prefill_token_s: float
    prefill_attention_s: float = 0.0
    decode_token_s: float
    decode_context_s: float = 0.0
    weights_s: float = 0.0
    context_s: float = 0.0
    sequence_s: float = 0.0
    experts_s: float = 0.0
    expert_share: float = 0.0
    overlap_slowdown: float = 1.0
    prefill_overlap_slowdown: float = 0.0

    def step_s(self, batch: StepBatch) -> float:
        """Seconds from launch to result on an idle device."""
        if batch.lane is Lane.VISION:
            return self._encode_s(batch)
        work, n_decodes = batch.work, batch.n_decodes
        n_contexts = n_prefilled = n_pairs = n_read = 0
        for item in work[:n_decodes]:
            n_contexts += item.start
        for item in work[:n_decodes] if batch.n_drafts else ():
            n_decodes += len(item.drafts)  # each is computed as a decode is
            n_contexts += sum(range(item.start + 1, item.start + item.count))
        for item in work[batch.n_decodes :]:
            n_prefilled += item.count
            n_pairs += item.count * (item.start + item.count)
            n_read += item.start
        return self.language_s(n_prefilled, n_pairs, n_decodes, n_contexts + n_decodes, n_read)

    def language_s(self, n_prefilled: int, n_pairs: int, n_decodes: int, n_contexts: int, n_read: int = 0) -> float:
        """Seconds of a language batch, given its prefilled tokens, their pairs, its decoding sequences and the tokens
        of their contexts. `n_read`: tokens of context before the chunks."""
        arithmetic_s = (
            self.prefill_token_s * n_prefilled
            + self.prefill_attention_s * n_pairs
            + self.decode_token_s * n_decodes
            + self.decode_context_s * n_contexts
        )
        traffic_s = self.weights_s + self.context_s * (n_contexts + n_read) + self.sequence_s * n_decodes
        if self.experts_s:
            traffic_s += self.experts_read_s(n_prefilled + n_decodes)
        return self.step_base_s + (arithmetic_s if arithmetic_s > traffic_s else traffic_s)

    def decodes_s(self, n_decodes: int, n_contexts: int) -> Iterator[float]:
        """Seconds of each following batch, while only `n_decodes` sequences decode, whose contexts have `n_contexts`
        tokens now. The same numbers as those of `language_s`."""
        arithmetic_s, each_s = self.decode_token_s * n_decodes, self.decode_context_s
        weights_s, read_s, sequences_s = self.weights_s, self.context_s, self.sequence_s * n_decodes
        experts_s, base_s = self.experts_read_s(n_decodes), self.step_base_s
        while True:
            n_contexts += n_decodes
            computed_s = arithmetic_s + each_s * n_contexts
            moved_s = weights_s + read_s * n_contexts + sequences_s + experts_s
            yield base_s + (computed_s if computed_s > moved_s else moved_s)

    def experts_read_s(self, n_tokens: int) -> float:
        """Seconds to read the experts that `n_tokens` tokens choose."""
        return self.experts_s * (1.0 - (1.0 - self.expert_share) ** n_tokens)

    def encode_s(self, n_tokens: Sequence[int]) -> float:
        """Seconds of a vision batch whose pictures have these numbers of embedding tokens."""
        arithmetic_s = self.encode_image_s * len(n_tokens) + self.encode_token_s * sum(n_tokens)
        if self.encode_attention_s:
            arithmetic_s += self.encode_attention_s * sum(n * n for n in n_tokens)
        return self.encode_base_s + max(arithmetic_s, self.encode_weights_s)

    def _encode_s(self, batch: StepBatch) -> float:
        if not (self.encode_token_s or self.encode_attention_s):
            return self.encode_s([0] * len(batch.work))
        return self.encode_s([item.seq.request.media[item.index].n_tokens for item in batch.work])


class Span:
    """The time for which a batch occupies a device, until `end_s`. `own_s`: see `StepResult`."""

    __slots__ = ("end_s", "own_s")

    def __init__(self, end_s: float, own_s: float | None = None) -> None:
        self.end_s, self.own_s = end_s, own_s


class DeviceTime:
    """The end times of one instance's batches. The lanes run side by side. A batch launched while the other lane is
    busy runs slower until that lane's batch ends, by `overlap_slowdown` or, if the language batch of the two prefills,
    by `prefill_overlap_slowdown`. The earlier batch is not slowed.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.latest: dict[Lane, Span] = {}
        self._beside_decode = cost.overlap_slowdown
        self._beside_prefill = cost.prefill_overlap_slowdown or cost.overlap_slowdown
        self._prefills = False  # whether the latest language batch prefills

    def occupy(self, batch: StepBatch, now: float) -> Span:
        """Begin the batch now. The returned span's end may move later, if another batch makes this one wait."""
        if batch.lane is Lane.LANGUAGE:
            self._prefills = batch.chunked
        work_s, slowdown = self.cost.step_s(batch), self._beside_prefill if self._prefills else self._beside_decode
        shared_s = max((s.end_s - now for lane, s in self.latest.items() if lane is not batch.lane), default=0.0)
        if shared_s > 0.0 and slowdown > 1.0:
            work_s = beside_s(work_s, shared_s, slowdown)
        span = self.latest[batch.lane] = Span(now + work_s)
        return span


class SlicedTime(DeviceTime):
    """`DeviceTime` for lanes that share a thread (`--overlap slice`). A vision batch is interrupted by each language
    batch that is launched meanwhile, after it has run for that batch's `after_s` since it last began or resumed. A real
    vision batch can be interrupted only between its operators, which is not modelled."""

    def __init__(self, cost: CostModel) -> None:
        super().__init__(cost)
        self._resumed_s = 0.0  # when the vision batch began or resumed

    def occupy(self, batch: StepBatch, now: float) -> Span:
        work_s, language, vision = self.cost.step_s(batch), Lane.LANGUAGE, self.latest.get(Lane.VISION)
        start_s = now
        if batch.lane is not language:
            if language in self.latest:
                start_s = max(now, self.latest[language].end_s)
            self._resumed_s = start_s
        elif vision is not None and vision.end_s > now:
            start_s = min(max(now, self._resumed_s + batch.after_s), vision.end_s)
            if start_s < vision.end_s:
                vision.end_s += work_s
                self._resumed_s = start_s + work_s
        span = self.latest[batch.lane] = Span(start_s + work_s, work_s)
        return span


def beside_s(work_s: float, shared_s: float, slowdown: float) -> float:
    """The seconds that a batch of `work_s` takes if it runs `slowdown` times slower for the first `shared_s`."""
    return work_s * slowdown if work_s * slowdown <= shared_s else shared_s + work_s - shared_s / slowdown
