"""Several conversations about one picture in one row: it is seen once, and they do not see each other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.builtin import phrases
from training.builtin.model import N_PATCHES
from training.builtin.questions import Exchange, ask, pick, small_talk
from training.builtin.scene import Scene

_IGNORED = -100
_PICTURE, _PAD, _BLIND = 0, -1, -2  # owners: the shared start; nothing; `_BLIND - i`: a conversation without picture
ENOUGH = 170  # tokens in a row, after which no further conversation begins


@dataclass(frozen=True, slots=True)
class Batch:
    """`ids`, `places`, `labels`, `owners` int64 [rows, length]; `kinds`: what each label's question is of, per answer:
    (row, start, end, kind), of labels."""

    ids: Tensor
    places: Tensor
    labels: Tensor
    owners: Tensor
    answers: list[tuple[int, int, int, str]]

    def mask(self) -> Tensor:
        """bool [rows, 1, length, length]: who sees whom."""
        o = self.owners
        same = o[:, :, None] == o[:, None, :]
        picture = (o[:, None, :] == _PICTURE) & (o[:, :, None] > _PICTURE)
        n = o.shape[1]
        return ((same | picture) & torch.ones(n, n, dtype=torch.bool).tril())[:, None]


class Packer:
    """Turns scenes into rows of tokens, with the prompts that the chat template would give."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._image = tokenizer.convert_tokens_to_ids("<image>")
        self._pad = tokenizer.pad_token_id

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text).input_ids

    def _answer(self, text: str) -> list[int]:
        return [*self._tokenizer(text, add_special_tokens=False).input_ids, self._tokenizer.eos_token_id]

    def _talk(self, rng: np.random.Generator, scene: Scene) -> list[Exchange]:
        return [ask(rng, scene) for _ in range(2 if rng.random() < 0.12 else 1)]

    def _tokens(self, start: str, talk: list[Exchange]) -> tuple[list[int], list[int], list[tuple[int, int, str]]]:
        """(ids, labels, answers) of a whole conversation that starts with `start`."""
        ids: list[int] = []
        labels: list[int] = []
        answers = []
        text = start
        for found in talk:
            text += f"{found.question} ASSISTANT:"
            prompt = self._ids(text) if not ids else self._ids("</s>" + text)[1:]
            answer = self._answer(found.answer)
            ids += prompt + answer
            labels += [_IGNORED] * len(prompt) + answer
            answers.append((len(ids) - len(answer), len(ids), found.kind))
            text = "USER: "
        return ids, labels, answers

    def row(self, rng: np.random.Generator, scene: Scene) -> tuple[list[list[int]], list[tuple[int, int, str]]]:
        """([ids, places, labels, owners], answers)."""
        system = pick(rng, phrases.SYSTEM) + " " if rng.random() < 0.06 else ""
        start = f"{system}USER: <image>\n"
        shared = self._ids(start)
        cut = shared.index(self._image)
        head = shared[:cut] + [self._image] * N_PATCHES
        columns = [head.copy(), list(range(len(head))), [_IGNORED] * len(head), [_PICTURE] * len(head)]
        answers: list[tuple[int, int, str]] = []
        for i in count():
            if len(columns[0]) >= ENOUGH:
                return columns, answers
            sees = bool(i) or rng.random() > 0.15
            talk = self._talk(rng, scene) if sees else [small_talk(rng)]
            ids, labels, found = self._tokens(start if sees else f"{system}USER: ", talk)
            skip, first = (cut + 1, len(head)) if sees else (0, 0)
            at = len(columns[0]) - skip
            columns[0] += ids[skip:]
            columns[1] += range(first, first + len(ids) - skip)
            columns[2] += labels[skip:]
            columns[3] += [i + 1 if sees else _BLIND - i] * (len(ids) - skip)
            answers += [(a + at, b + at, kind) for a, b, kind in found]
        raise AssertionError

    def batch(self, rng: np.random.Generator, scenes: list[Scene]) -> Batch:
        rows = [self.row(rng, s) for s in scenes]
        n = max(len(columns[0]) for columns, _ in rows)
        fills = (self._pad, 0, _IGNORED, _PAD)
        padded = [[c + [fill] * (n - len(c)) for c, fill in zip(columns, fills)] for columns, _ in rows]
        stacked = torch.tensor(padded)  # [rows, 4, length]
        answers = [(r, a, b, kind) for r, (_, found) in enumerate(rows) for a, b, kind in found]
        return Batch(*stacked.unbind(1), answers)
