"""Answers in 16 bits compared: one way to compute them rounds otherwise than another, so that tokens which are nearly
as likely as each other may be swapped. After such a swap an answer goes its own way."""

from __future__ import annotations

import math

TIE = 0.25  # between log-probabilities of two tokens: which of them is chosen may depend on rounding
ROUNDING = 0.25  # between log-probabilities of the same token
LEAST_COMPARED = 0.3  # of all tokens


def compared(got, want) -> int:
    """How many tokens of an answer were compared, up to one that a tie decides. Fails if one differs without a tie.
    Both are a choice with `token_ids` and `logprobs` of at least the two likeliest."""
    for i, (mine, other) in enumerate(zip(got.token_ids, want.token_ids, strict=True)):
        first, second = sorted((p for _, p in want.logprobs[i].top), reverse=True)[:2]
        if mine != other:
            assert first - second < TIE, f"token {i}: {mine}, not {other}, which is likelier by {first - second:.2f}"
            return i
        apart = abs(got.logprobs[i].logprob - want.logprobs[i].logprob)
        assert math.isfinite(apart) and apart < ROUNDING, f"token {i}: log-probabilities are {apart:.2f} apart"
    return len(want.token_ids)


def check_alike(got, want) -> str:
    """Compare lists of choices; how much of them could be compared."""
    n_tokens = sum(len(one.token_ids) for one in want)
    n = sum(compared(a, b) for a, b in zip(got, want, strict=True))
    assert n >= LEAST_COMPARED * n_tokens, f"only {n} of {n_tokens} tokens before a tie"
    return f"{n} of {n_tokens} tokens"
