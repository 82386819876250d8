"""Conversations drawn from a seed: turns that carry all earlier turns, and system prompts that conversations share."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec

from hydrainfer.workload.sources.chat import ChatRequest, Said
from hydrainfer.workload.sources.conversations import TOKENS_PER_WORD
from hydrainfer.workload.sources.spread import Spread
from hydrainfer.workload.sources.synthetic import WORDS


class Dialogues(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The conversations that requests belong to. `turns`: number of turns of a conversation, each sent with all turns
    before it; only the first has pictures. `apart`: number of requests of other conversations between two turns.
    `apart_s`: seconds from one turn to the next instead, where requests come at a rate (`in_turn`); 0 for `apart`.
    `systems`: number of system prompts, of `system_words` words each, that all conversations share; 0 for none.
    `picture_pool`: number of pictures to draw from; 0 if no two conversations share a picture."""

    turns: str | float = 1
    apart: int = 16
    apart_s: str | float = 0.0
    systems: int = 0
    system_words: str | float = 200
    picture_pool: int = 0

    def weave(self, chats: Iterable[ChatRequest], rng: random.Random) -> Iterator[ChatRequest]:
        """The requests of `chats` as turns of conversations."""
        turns = Spread.parse(self.turns)
        words = Spread.parse(self.system_words)
        pause = Spread.parse(self.apart_s)
        systems = [_text(words.draw(rng), rng) for _ in range(self.systems)] or [""]
        begun: list[tuple[int, int, str, tuple[Said, ...]]] = [(0, 0, "", ())] * (self.apart + 1)
        n_talks = 0
        for i, chat in enumerate(chats):
            place = i % len(begun)
            n_left, talk, system, before = begun[place]
            apart_s = 0.0
            if not n_left:
                n_left = max(1, round(turns.draw(rng)))
                n_talks += 1
                talk = n_talks
                system = rng.choice(systems)
                before = ()
            elif self.apart_s:
                apart_s = pause.draw(rng)
            pictures = () if before else chat.pictures
            asked = msgspec.structs.replace(
                chat, system=system, before=before, pictures=pictures, talk=talk, apart_s=apart_s
            )
            yield asked
            answer = _text(chat.max_tokens / TOKENS_PER_WORD, rng)
            said = Said(text=chat.text, pictures=asked.pictures, answer=answer)
            begun[place] = n_left - 1, talk, system, (*before, said)


class Turn(Protocol):
    """A request of a conversation. See `ChatRequest`."""

    @property
    def talk(self) -> int: ...
    @property
    def apart_s(self) -> float: ...


AnyTurn = TypeVar("AnyTurn", bound=Turn)


def in_turn(requests: Sequence[AnyTurn], rate_per_s: float) -> list[AnyTurn]:
    """The same requests in the order in which they come at a rate, with each turn `apart_s` after the one before: a
    turn that is due comes first, else a new conversation begins. Unchanged if no request has an `apart_s`. Where no
    conversation is left to begin, turns come before they are due."""
    if not any(request.apart_s for request in requests):
        return list(requests)
    talks: dict[int, deque[AnyTurn]] = {}
    for i, request in enumerate(requests):
        talks.setdefault(request.talk or -i, deque()).append(request)
    new = deque(talks.values())
    waiting: list[tuple[float, int, deque[AnyTurn]]] = []  # by the place in the order at which the next turn is due
    order = []
    for i in range(len(requests)):
        if waiting and (waiting[0][0] <= i or not new):
            talk = heapq.heappop(waiting)[2]
        else:
            talk = new.popleft()
        order.append(talk.popleft())
        if talk:
            heapq.heappush(waiting, (i + talk[0].apart_s * rate_per_s, i, talk))
    return order


def _text(n_words: float, rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(max(1, round(n_words))))
