"""Log-probabilities in the two formats of OpenAI's API, and those of prompts in vLLM's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydrainfer.core import TokenLogprobs
from hydrainfer.processor import Detokenizer, Vocabulary


def chat_logprobs(vocabulary: Vocabulary, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The chat format: `{"content": [...]}`. Each token has its exact bytes, which need not be whole characters."""

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


class TextOffsets:
    """The offsets at which the tokens of one choice begin in its text. Tokens that share a character have the offset of
    that character."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool, continues: bool) -> None:
        """The arguments are those of `Detokenizer`."""
        self._text = Detokenizer(vocabulary, skip_special=skip_special, continues=continues)
        self._byte_level, self._byte_ids = vocabulary.byte_level, vocabulary.byte_ids
        self._at = 0

    def push(self, ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens, in characters."""
        offsets = []
        for i in ids:
            if not self._byte_level and i not in self._byte_ids:
                self._at += len(self._text.flush())  # bytes of the tokens before it
            offsets.append(self._at)
            self._at += len(self._text.push((i,)))
        return offsets


def completion_logprobs(
    vocabulary: Vocabulary,
    ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    offsets: list[int],
    n_top: int,
) -> dict[str, Any]:
    """The text completion format, of parallel lists. `logprobs`: None for the first token of a prompt. `top_logprobs`
    always includes the token itself."""
    return {
        "tokens": [vocabulary.token_text(i) for i in ids],
        "token_logprobs": [None if lp is None else _finite(lp.logprob) for lp in logprobs],
        "top_logprobs": [_tops(vocabulary, i, lp, n_top) for i, lp in zip(ids, logprobs, strict=True)]
        if n_top
        else None,
        "text_offset": offsets,
    }


def _tops(vocabulary: Vocabulary, token: int, lp: TokenLogprobs | None, n_top: int) -> dict[str, float] | None:
    if lp is None:
        return None
    top: dict[str, float] = {}
    for i, value in (*lp.top[:n_top], (token, lp.logprob)):
        top.setdefault(vocabulary.token_text(i), _finite(value))
    return top


def prompt_logprobs(
    vocabulary: Vocabulary, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], n_top: int
) -> list[dict[str, Any] | None]:
    """The log-probabilities of a prompt in vLLM's format: per token, by id, the likeliest tokens and the token itself;
    None for the first token, which has no context. `logprobs`: from the second token on."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": vocabulary.token_text(token)}

    told: list[dict[str, Any] | None] = [None]
    for token, lp in zip(ids[1:], logprobs, strict=True):
        others = {str(i): entry(i, value, rank) for rank, (i, value) in enumerate(lp.top[:n_top], 1) if i != token}
        told.append({str(token): entry(token, lp.logprob, lp.rank), **others})
    return told


def _finite(logprob: float) -> float:
    """`logprob`, but at least -9999.0, which OpenAI's API writes for minus infinity: JSON has none."""
    return max(logprob, -9999.0)
