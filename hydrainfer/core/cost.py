"""The modelled time of a batch, for emulated devices and the simulator."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hydrainfer.core.sequence import StepBatch
from hydrainfer.core.stage import Lane


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """A base, and the larger of arithmetic and memory traffic (the roofline of the paper's Table 2); all in seconds.

    A vision batch takes `encode_base_s` and the larger of `encode_weights_s` and its arithmetic: per picture
    `encode_image_s`, per embedding token `encode_token_s` and per pair of tokens of one picture `encode_attention_s`.
    A language batch takes `step_base_s` and the larger of its arithmetic (per prefilled token `prefill_token_s`, and
    `prefill_attention_s` for each pair of a chunk's tokens and the context after it, `count * (start + count)`; per
    decoding sequence `decode_token_s`, and `decode_context_s` for each token of its context, the new one included) and
    its traffic (`weights_s` once, `context_s` for each token of context that is read, and `sequence_s` per decoding
    sequence, for windows, which are read whatever the context). Terms left at 0 make a model linear in what a batch
    holds.

    `overlap_slowdown`: how many times slower a batch runs that is launched beside one of the instance's other lane,
    which is not slowed (`DeviceTime`): together they run at 1 + 1 / `overlap_slowdown` times the speed of either alone.
    `prefill_overlap_slowdown`: the same where the language batch prefills, and competes with encode for arithmetic; 0
    is no difference. Where lanes only take turns, a very large number.
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
    overlap_slowdown: float = 1.0
    prefill_overlap_slowdown: float = 0.0

    def step_s(self, batch: StepBatch) -> float:
        """Seconds from launch to result on an idle device."""
        if batch.lane is Lane.VISION:
            return self._encode_s(batch)
        work, n_decodes = batch.work, batch.n_decodes
        n_contexts = n_prefilled = n_pairs = n_read = 0
        for _, start, *_ in work[:n_decodes]:
            n_contexts += start
        for _, start, count, _ in work[n_decodes:]:
            n_prefilled += count
            n_pairs += count * (start + count)
            n_read += start
        return self.language_s(n_prefilled, n_pairs, n_decodes, n_contexts + n_decodes, n_read)

    def language_s(self, n_prefilled: int, n_pairs: int, n_decodes: int, n_contexts: int, n_read: int = 0) -> float:
        """Seconds of a language batch: prefilled tokens, their pairs, decoding sequences and the tokens of their
        contexts; `n_read`: tokens of context before the chunks."""
        arithmetic_s = (
            self.prefill_token_s * n_prefilled
            + self.prefill_attention_s * n_pairs
            + self.decode_token_s * n_decodes
            + self.decode_context_s * n_contexts
        )
        traffic_s = self.weights_s + self.context_s * (n_contexts + n_read) + self.sequence_s * n_decodes
        return self.step_base_s + (arithmetic_s if arithmetic_s > traffic_s else traffic_s)

    def encode_s(self, n_tokens: Sequence[int]) -> float:
        """Seconds of a vision batch whose pictures have so many embedding tokens each."""
        arithmetic_s = self.encode_image_s * len(n_tokens) + self.encode_token_s * sum(n_tokens)
        if self.encode_attention_s:
            arithmetic_s += self.encode_attention_s * sum(n * n for n in n_tokens)
        return self.encode_base_s + max(arithmetic_s, self.encode_weights_s)

    def _encode_s(self, batch: StepBatch) -> float:
        if not (self.encode_token_s or self.encode_attention_s):
            return self.encode_s([0] * len(batch.work))
        return self.encode_s([seq.request.media[i].n_tokens for seq, i in batch.work])


class DeviceTime:
    """When the batches of one instance are done. The lanes run side by side: a batch launched while the other lane is
    busy runs slower until that lane's batch ends, by `overlap_slowdown` or, if the language batch of the two prefills,
    by `prefill_overlap_slowdown`; the one that was there first is not slowed.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.busy_until: dict[Lane, float] = {}
        self._beside_decode = cost.overlap_slowdown
        self._beside_prefill = cost.prefill_overlap_slowdown or cost.overlap_slowdown
        self._prefills = False  # the latest language batch

    def occupy(self, batch: StepBatch, now: float) -> float:
        """Begin the batch now; when it will be done."""
        if batch.lane is Lane.LANGUAGE:
            self._prefills = batch.chunked
        work_s, slowdown = self.cost.step_s(batch), self._beside_prefill if self._prefills else self._beside_decode
        shared_s = max((end_s - now for lane, end_s in self.busy_until.items() if lane is not batch.lane), default=0.0)
        if shared_s > 0.0 and slowdown > 1.0:
            work_s = beside_s(work_s, shared_s, slowdown)
        self.busy_until[batch.lane] = end_s = now + work_s
        return end_s


def beside_s(work_s: float, shared_s: float, slowdown: float) -> float:
    """How long a batch of `work_s` takes whose first `shared_s` pass `slowdown` times slower."""
    return work_s * slowdown if work_s * slowdown <= shared_s else shared_s + work_s - shared_s / slowdown
