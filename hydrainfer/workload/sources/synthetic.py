"""Requests with the shape of a dataset, drawn from a seed: nothing is downloaded, and no two share a picture or a
text."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate

from hydrainfer.workload.sources.chat import ChatRequest
from hydrainfer.workload.sources.conversations import TOKENS_PER_WORD
from hydrainfer.workload.sources.pictures import DrawnPicture
from hydrainfer.workload.sources.spread import Spread
from hydrainfer.workload.sources.traces import Arrival

WORDS = """
apple arrow ball bank bear bird boat book bottle bowl bread bridge brush bus cake camera car card cat chair
clock cloud coat coffee corn cow cup desk dog door dress drum duck engine eye face farm fence field fire fish
flag floor flower fork fruit garden glass glove grass hand hat hill horse house ice island jar key kite knife
ladder lake lamp leaf letter light lion map market milk mirror moon mountain music nail nest night oil orange
paint paper park pen picture pie plane plant plate pocket pond queen rain ring river road rock roof room rope
rose sail salt sand school sea seat sheep ship shirt shoe sign sky snow soap song spoon square star stone store
street sugar sun table tail tent ticket tiger tool tower town toy train tree truck umbrella valley village wall
watch water wheel window wing winter wood wool word yard
""".split()  # noqa: SIM905

_OWN_WORDS = 64  # of a long text: a prefix cache finds nothing of other texts
_MORE_WORDS = 1 << 14


class Texts:
    """Questions from templates: `{word}` is one word, `{words}` as many as `n_words` draws. No question occurs twice.
    `passage`: the words of a question after its first ones are the beginning of one passage, so that even very long
    questions take no time to draw."""

    def __init__(
        self,
        templates: Sequence[str],
        n_words: Spread,
        instruction: str,
        rng: random.Random,
        passage: Passage | None = None,
    ) -> None:
        self._templates = templates
        self._n_words = n_words
        self._instruction = instruction
        self._rng = rng
        self._passage = passage
        self._seen: set[str] = set()

    def next(self) -> str:
        text = self._fill(self._rng.choice(self._templates))
        while text in self._seen:
            text = f"{self._rng.choice(WORDS)} {self._rng.choice(WORDS)}: {text}"
        self._seen.add(text)
        if self._instruction:
            return f"{text}\n{self._instruction}"
        return text

    def _fill(self, template: str) -> str:
        def word(match: re.Match[str]) -> str:
            n = 1
            if match[1]:
                n = max(1, round(self._n_words.draw(self._rng)))
            own = n
            if self._passage is not None:
                own = min(n, _OWN_WORDS)
            words = [self._rng.choice(WORDS) for _ in range(own)]
            if self._passage is not None and n > own:
                words.append(self._passage.beginning(n - own))
            return " ".join(words)

        return re.sub(r"\{word(s?)\}", word, template)


class Passage:
    """A text of random words, as long as it is asked for."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._text = ""
        self._ends: list[int] = []  # of each word

    def beginning(self, n_words: int) -> str:
        while len(self._ends) < n_words:
            words = self._rng.choices(WORDS, k=_MORE_WORDS)
            ends = accumulate((len(word) + 1 for word in words), initial=len(self._text))
            self._ends += [end - 1 for end in ends][1:]
            self._text += " ".join([*words, ""])
        return self._text[: self._ends[n_words - 1]]


SizeWeight = tuple[int, int, float]
"""Width and height in pixels, and the relative frequency of that size."""


def fitted(width: int, height: int, max_side_px: int | None) -> tuple[int, int]:
    """Width and height scaled down in proportion, so that the longer side is at most `max_side_px`."""
    scale = 1.0
    if max_side_px:
        scale = min(1.0, max_side_px / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def synthetic_chats(
    n: int,
    *,
    seed: int,
    texts: Texts,
    sizes: Sequence[SizeWeight],
    n_pictures: int,
    max_side_px: int | None,
    output_tokens: Spread,
    rng: random.Random,
    pool: int = 0,
) -> list[ChatRequest]:
    """`n` drawn requests. Pictures are JPEG, as in the datasets; no other request and no other workload seed uses the
    same picture seeds. With a `pool`, pictures are drawn from that many."""
    chats = []
    weights = [weight for *_, weight in sizes]

    def drawn(number: int, size: SizeWeight) -> DrawnPicture:
        return DrawnPicture((seed << 32) + number, *fitted(*size[:2], max_side_px), "jpeg")

    pooled = [drawn(i, size) for i, size in enumerate(rng.choices(sizes, weights, k=pool))]
    for i in range(n):
        if pooled:
            pictures = tuple(rng.choices(pooled, k=n_pictures))
        else:
            some = rng.choices(sizes, weights, k=n_pictures)
            pictures = tuple(drawn(i * n_pictures + k, size) for k, size in enumerate(some))
        n_tokens = max(1, round(output_tokens.draw(rng)))
        chats.append(ChatRequest(text=texts.next(), pictures=pictures, max_tokens=n_tokens))
    return chats


def chats_of_arrivals(arrivals: Iterable[Arrival], rng: random.Random, max_tokens: int) -> list[ChatRequest]:
    """Text prompts with about as many tokens as each arrival had (an English word has about 4/3 tokens)."""
    chats = []
    for a in arrivals:
        n_words = max(1, round(a.n_prompt / TOKENS_PER_WORD))
        text = " ".join(rng.choice(WORDS) for _ in range(n_words))
        chats.append(ChatRequest(text=text, max_tokens=min(max(1, a.n_output), max_tokens), at_s=a.at_s))
    return chats
