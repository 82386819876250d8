"""Conversations drawn from a seed: turns that carry all earlier turns, and system prompts that conversations share."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import msgspec

from hydrainfer.workload.sources.chat import ChatRequest, Said
from hydrainfer.workload.sources.conversations import TOKENS_PER_WORD
from hydrainfer.workload.sources.spread import Spread
from hydrainfer.workload.sources.synthetic import WORDS


class Dialogues(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The conversations that requests belong to. `turns`: number of turns of a conversation, each sent with all turns
    before it; only the first has pictures. `apart`: number of requests of other conversations between two turns.
    `systems`: number of system prompts, of `system_words` words each, that all conversations share; 0 for none.
    `picture_pool`: number of pictures to draw from; 0 if no two conversations share a picture."""

    turns: str | float = 1
    apart: int = 16
    systems: int = 0
    system_words: str | float = 200
    picture_pool: int = 0

    def weave(self, chats: Iterable[ChatRequest], rng: random.Random) -> Iterator[ChatRequest]:
        """The requests of `chats` as turns of conversations."""
        turns = Spread.parse(self.turns)
        words = Spread.parse(self.system_words)
        systems = [_text(words.draw(rng), rng) for _ in range(self.systems)] or [""]
        begun: list[tuple[int, str, tuple[Said, ...]]] = [(0, "", ())] * (self.apart + 1)
        for i, chat in enumerate(chats):
            place = i % len(begun)
            n_left, system, before = begun[place]
            if not n_left:
                n_left = max(1, round(turns.draw(rng)))
                system = rng.choice(systems)
                before = ()
            asked = msgspec.structs.replace(
                chat, system=system, before=before, pictures=() if before else chat.pictures
            )
            yield asked
            answer = _text(chat.max_tokens / TOKENS_PER_WORD, rng)
            said = Said(text=chat.text, pictures=asked.pictures, answer=answer)
            begun[place] = n_left - 1, system, (*before, said)


def _text(n_words: float, rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(max(1, round(n_words))))
