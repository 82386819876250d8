"""Traces: requests as numbers of tokens."""

from __future__ import annotations

import msgspec

ANSWER = ""
"""The name of a part that the server itself generated."""


class PromptPart(msgspec.Struct, frozen=True):
    """A piece of a prompt. Parts of one name have the same content, as far as the shorter one reaches. `picture`:
    whether the part is a picture."""

    name: str
    n_tokens: int
    picture: bool = False


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace. `n_text`: prompt tokens that are not picture placeholders; `pictures`: embedding tokens
    of each picture; `n_output`: tokens to generate. `content` names the pictures: equal names mean the same pictures,
    "" means new ones. `parts`: the same prompt in order, needed only if it shares content with another prompt.
    `megapixels`: of all its pictures as they are sent. `whole`: all tokens of a picture are computed at once
    (`MediaSpan.whole`). `talk`: the conversation's number; 0 if the request stands alone. `apart_s`: seconds after the
    turn before, if these are fixed."""

    arrival_s: float
    n_text: int
    pictures: tuple[int, ...] = ()
    n_output: int
    content: str = ""
    parts: tuple[PromptPart, ...] = ()
    megapixels: float = 0.0
    whole: bool = False
    talk: int = 0
    apart_s: float = 0.0

    @property
    def n_prompt(self) -> int:
        return self.n_text + sum(self.pictures)
