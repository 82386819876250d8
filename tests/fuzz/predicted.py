"""Predicted answers, however wrong: the answer is that without one."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from hydrainfer.config import load
from hydrainfer.serving import serve_in_background
from tests.checkpoints_text import make_text

_PROMPTS = ("one two three four five six ", "A B C A B C A", "Name a colour.", "x")
_WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 0, "presence_penalty": 1.5},
    {"temperature": 0.7, "logprobs": True},
    {"temperature": 0, "stop": ["e", "12"]},
)
_JUNK = ("", " ", "\n\n", "word ", "0", "é", "漢字", "\x00", "<|im_end|>", "{", "a" * 300)


class Predicted:
    """A server with a tiny model, one request at a time. `feed` takes one prediction and raises `AssertionError` if its
    answer is not the plain one. `seen`: what became of the predicted tokens."""

    def __init__(self, folder: Path) -> None:
        self.seen: Counter[str] = Counter()
        model = make_text(folder / "model", "llama", seed=3)
        flags = {"model": str(model), "layout": "1EPD", "launcher": "inproc", "port": 0, "threads": 1}
        self._exit = ExitStack()
        url, _ = self._exit.enter_context(
            serve_in_background(load(flags | {"drafts": "prediction"}), Console(quiet=True))
        )
        self._client = self._exit.enter_context(httpx.Client(base_url=url, timeout=60))
        self._plain: dict[tuple[str, int, int], dict[str, Any]] = {}

    def feed(self, rng: random.Random) -> None:
        prompt, way, seed = rng.choice(_PROMPTS), rng.randrange(len(_WAYS)), rng.randrange(4)
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 12,
            "seed": seed,
            "return_token_ids": True,
            **_WAYS[way],
        }
        key = prompt, way, seed
        if key not in self._plain:
            self._plain[key] = self._ask(body | {"drafts": False})
        plain = self._plain[key]
        words = _predicted(rng, plain["choices"][0]["message"]["content"])
        content: Any = words
        if rng.random() < 0.3:
            cut = rng.randint(0, len(words))
            content = [{"type": "text", "text": part} for part in (words[:cut], words[cut:])]
        answer = self._ask(body | {"prediction": {"type": "content", "content": content}})
        for name in ("token_ids", "finish_reason", "message"):
            assert answer["choices"][0][name] == plain["choices"][0][name], (body, words)
        counted, usual = answer["usage"], plain["usage"]
        assert counted["completion_tokens"] == usual["completion_tokens"], (body, words)
        details = counted.get("completion_tokens_details", {})  # not of an empty prediction
        for name, n in details.items():
            self.seen[name] += n

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, (body, answer.text)
        return answer.json()

    def close(self) -> None:
        self._exit.close()


def _predicted(rng: random.Random, answer: str) -> str:
    """The answer, cut, edited, repeated, or nothing of it."""
    words = answer
    for _ in range(rng.randint(0, 4)):
        a, b = sorted(rng.randint(0, len(words)) for _ in range(2))
        words = rng.choice(
            (
                words[a:],
                words[:b],
                words[:a] + words[b:],
                words[:a] + rng.choice(_JUNK) + words[b:],
                words[:b] + words[a:],
                rng.choice(_JUNK) * rng.randint(1, 20),
            )
        )
    return words[:4000]
