"""What a batch is said to take: the modelled time of an emulated device and of the simulator."""

from __future__ import annotations

import msgspec

from hydrainfer.core.sequence import StepBatch
from hydrainfer.core.stage import Lane, Stage

_DECODE = Stage.DECODE


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """Linear in what a batch holds; all in seconds.

    A vision batch takes `encode_base_s`, per picture `encode_image_s` and per embedding token `encode_token_s`.
    A language batch takes `step_base_s`; per prefilled token `prefill_token_s`, and `prefill_attention_s` for each pair
    of a chunk's tokens and the context after it (`count * (start + count)`); per decoding sequence `decode_token_s`,
    and `decode_context_s` for each token of its context, the new one included.

    `overlap_slowdown`: how many times slower a batch runs while the instance's other lane runs, too.
    """

    encode_base_s: float = 0.0
    encode_image_s: float
    encode_token_s: float = 0.0
    step_base_s: float
    prefill_token_s: float
    prefill_attention_s: float = 0.0
    decode_token_s: float
    decode_context_s: float = 0.0
    overlap_slowdown: float = 1.0

    def step_s(self, batch: StepBatch) -> float:
        """Seconds from launch to result on an idle device. Call it at launch: it reads the sequences' stages."""
        if batch.lane is Lane.VISION:
            return self._encode_s(batch)
        n_decodes = n_contexts = n_prefilled = n_pairs = 0
        for seq, start, count, _ in batch.work:
            if count == 1 and seq.plan[seq.cursor] is _DECODE:  # `seq.stage`, without the call
                n_decodes += 1
                n_contexts += start
            else:
                n_prefilled += count
                n_pairs += count * (start + count)
        return (
            self.step_base_s
            + self.prefill_token_s * n_prefilled
            + self.prefill_attention_s * n_pairs
            + self.decode_token_s * n_decodes
            + self.decode_context_s * (n_contexts + n_decodes)
        )

    def _encode_s(self, batch: StepBatch) -> float:
        n_tokens = sum(seq.request.media[i].n_tokens for seq, i in batch.work) if self.encode_token_s else 0
        return self.encode_base_s + self.encode_image_s * len(batch.work) + self.encode_token_s * n_tokens
