"""Log-probabilities in the two formats of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydrainfer.core import TokenLogprobs
from hydrainfer.processor import Vocabulary


def chat_logprobs(vocabulary: Vocabulary, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`{"content": [...]}`, each token with its exact bytes, which need not be whole characters."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": vocabulary.token_text(token),
            "logprob": _finite(logprob),
            "bytes": list(vocabulary.spell(token)),
        }

    return {
        "content": [
            {**entry(token, lp.logprob), "top_logprobs": [entry(*top) for top in lp.top]}
            for token, lp in zip(ids, logprobs, strict=True)
        ]
    }


def completion_logprobs(
    vocabulary: Vocabulary, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offset: int, n_top: int
) -> dict[str, Any]:
    """The older format of parallel lists. `offset`: characters of the choice's text before these tokens. The chosen
    token is always among `top_logprobs`."""
    tokens = [vocabulary.token_text(i) for i in ids]
    offsets: list[int] = []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    tops = []
    for token, lp in zip(ids, logprobs, strict=True):
        top: dict[str, float] = {}
        for i, value in lp.top:
            top.setdefault(vocabulary.token_text(i), _finite(value))
        top.setdefault(vocabulary.token_text(token), _finite(lp.logprob))
        tops.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(lp.logprob) for lp in logprobs],
        "top_logprobs": tops if n_top else None,
        "text_offset": offsets,
    }


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's API writes -9999.0 for it."""
    return max(logprob, -9999.0)
