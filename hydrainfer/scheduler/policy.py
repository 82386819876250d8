"""The rules by which an instance fills its batches: budgets, order, encode gate, headroom."""

from __future__ import annotations

from typing import Literal

import msgspec

from hydrainfer.core.request import MAX_PRIORITY

Ordering = Literal["rank", "fcfs"]
STEP_S, RUNNING = 0.5, 96
"""The `step_s` and the `running` of a server."""
ENOUGH_S = 0.1
"""The `enough_s` of a server whose lanes take turns. Pictures that take this long each gain nothing from a larger batch
(`benchmarks/results/b13_encode_batch.json`), and a prompt that takes this long fills the processor by itself."""
_WAIT, _WAIT_SHARE = 20, 1 / 3  # `wait_s` in TPOT limits, and its largest share of the TTFT limit
EncodeGate = Literal["paper", "aged"]
Batching = Literal["stage-level", "prefill-first"]


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a batch. `tokens`: language tokens per batch (τ_t of Algorithm 1). `images`: pictures per vision
    batch (τ_e), with at most `image_tokens` embeddings together unless there is only one picture. `running`: requests
    that may hold caches at once. `step_s`: how long a batch may take, judging by recent ones; slow chunks (after a long
    context, or on a slow device) shrink to fit, but not below one picture or a small chunk. `enough_s`: a batch ends
    with the prompt with which it reaches this time, and a vision batch has no more pictures than take this long, but at
    least one: more would gain nothing and delay their first tokens. `gap_s`: how long a decoding sequence may wait for
    its next token, nine times in ten; 0: some decode steps (`gap.py`); None: no bound. `wait_s`: how long a picture or
    a prompt waits in its stage for the decoding requests to pause, before it is cut to `gap_s`."""

    tokens: int = 1024
    images: int = 4
    image_tokens: int = 16_384
    running: int = 256
    step_s: float = float("inf")
    enough_s: float = float("inf")
    gap_s: float | None = None
    wait_s: float = 0.0

    @property
    def draft_s(self) -> float:
        """How long a step may take because of drafts."""
        return min(self.step_s, self.gap_s or float("inf"))

    def within(self, tpot_s: float | None, ttft_s: float | None) -> Budgets:
        """These budgets for lanes that share a thread (`--overlap slice`), with the limits of an SLO, if there are
        any."""
        gap_s = tpot_s or 0.0
        wait_s = min(_WAIT * gap_s, float("inf") if ttft_s is None else _WAIT_SHARE * ttft_s)
        return msgspec.structs.replace(self, gap_s=gap_s, wait_s=wait_s)


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of scheduling. `order="rank"`: the order is decided for every chunk, by age and remaining work
    (`order.py`): a second of waiting is worth `ageing` seconds of work, and each level of priority, up to
    `max_priority`, is worth `boost_s` of waiting; at most `half_way` requests are half way through prefill. `"fcfs"`:
    first come, first served, and requests that have begun go on (Algorithm 1). Tenants stay within `credit_s` of work
    of each other (`fair.py`). `encode_gate="paper"`: encode only while nothing is in prefill (Algorithm 1, line 20).
    `"aged"`: the gate also opens for a picture that has waited `encode_wait_s`, so that steady text cannot starve
    pictures. `headroom_tokens`: tokens reserved beyond prompt and produced, before a lease has to grow. `batching`:
    "stage-level" is Algorithm 1. `"prefill-first"`: nobody decodes while there is something to prefill (the paper's
    section 3.2 on vLLM v0). This is the baseline of its ablation, with lanes that take turns and budgets of whole
    prompts. `shared_tokens`: a request waits for another's prefill if that computes this many of the tokens that it
    would compute itself, or half of them."""

    order: Ordering = "rank"
    ageing: float = 0.3
    boost_s: float = 10.0
    max_priority: int = MAX_PRIORITY
    credit_s: float = 4.0
    half_way: int = 8
    encode_gate: EncodeGate = "aged"
    encode_wait_s: float = 0.5
    headroom_tokens: int = 32
    batching: Batching = "stage-level"
    shared_tokens: int = 64
