"""The record of one request. Times are seconds after the start of the load."""

from __future__ import annotations

import itertools

import msgspec

from hydrainfer.workload.client.failures import Failure
from hydrainfer.workload.client.sse import Usage


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the client saw it. `index`: rank in the workload. `scheduled_s`: when it was due; `sent_s`: when
    it was sent; `end_s`: when the answer ended or failed. `chunk_s[i]`: when the i-th chunk with tokens arrived;
    `chunk_tokens[i]`: how many tokens it carried (a chunk with content but without ids counts as one). `token_ids`:
    None if the server sent none."""

    index: int
    n_asked: int
    scheduled_s: float
    sent_s: float
    end_s: float
    chunk_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    token_ids: tuple[int, ...] | None = None
    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def late_s(self) -> float:
        """Seconds by which the client was late to send the request."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """TTFT: seconds from sending (connecting included) to the first token; None if there was none."""
        return self.chunk_s[0] - self.sent_s if self.chunk_s else None

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def itl_s(self) -> tuple[float, ...]:
        """ITL: times between consecutive chunks with tokens, which is what a reader waits for, however many tokens a
        chunk has."""
        return tuple(b - a for a, b in itertools.pairwise(self.chunk_s))

    @property
    def token_interval_s(self) -> tuple[float, ...]:
        """The time of each token after the first chunk. A chunk of k tokens counts as k equal intervals since the chunk
        before it. Tokens in the first chunk have no interval."""
        gaps = zip(self.itl_s, self.chunk_tokens[1:], strict=True)
        return tuple(gap / n for gap, n in gaps for _ in range(n))

    @property
    def timings(self) -> dict[str, float]:
        """The server's account of where the time went; empty if it sent none."""
        said = None
        if self.usage:
            said = self.usage.hydrainfer
        return {k: float(v) for k, v in (said or {}).items() if isinstance(v, int | float)}

    @property
    def n_tokens(self) -> int:
        """The number of answer tokens: by `usage` if the server sends it, else by ids, else by chunks with content."""
        if self.usage:
            return self.usage.completion_tokens
        return sum(self.chunk_tokens)

    @property
    def tpot_s(self) -> float | None:
        """TPOT: mean time per token after the first; None below two tokens."""
        if self.n_tokens > 1 and self.chunk_s:
            return (self.chunk_s[-1] - self.chunk_s[0]) / (self.n_tokens - 1)
        return None

    @property
    def count_differs(self) -> bool:
        """Whether the number of ids received differs from the server's `usage`."""
        return self.usage is not None and self.token_ids is not None and len(self.token_ids) != self.n_tokens
