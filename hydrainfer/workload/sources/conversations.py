"""Readers of conversations: OpenAI chat requests, one per line, and ShareGPT-like dialogues."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hydrainfer.workload.sources.chat import ChatRequest
from hydrainfer.workload.sources.files import entries_of, field, read_json, read_json_lines, wrong

TOKENS_PER_WORD = 4 / 3
"""Approximate tokens per English word in the tokenizers of Llama and Qwen. It gives the length of a recorded answer
until `hydrainfer trace` has asked the model itself."""


def openai_requests(path: Path, max_tokens: int) -> Iterator[ChatRequest]:
    """The chat requests of a file, one per line, bare or as `body` of a batch file. Only `messages` and
    `max_completion_tokens` or `max_tokens` are read (without either, the caller's `max_tokens`); the benchmark sets the
    sampling."""
    for where, entry in read_json_lines(path):
        body = entry.get("body", entry)
        messages = field(path, where, body, "messages", list)
        if not messages or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            raise wrong(path, f"{where}: 'messages' must be a list of messages, each with a role")
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or max_tokens
        if not isinstance(limit, int) or limit < 1:
            raise wrong(path, f"{where}: max_tokens must be a positive number, not {limit!r}")
        yield ChatRequest(messages=tuple(messages), max_tokens=limit)


def sharegpt(path: Path, max_tokens: int) -> Iterator[ChatRequest]:
    """The first questions of a list of `conversations`, each a list of `from` (human, user or gpt, assistant) and
    `value`. The length of the recorded answer, at most `max_tokens`, is the length of the answer to generate. Other
    turns are left out."""
    for i, entry in enumerate(entries_of(path, read_json(path))):
        turns = field(path, f"[{i}]", entry, "conversations", list)
        if len(turns) < 2:
            continue
        asked, answered = (turns[k].get("value") if isinstance(turns[k], dict) else None for k in (0, 1))
        if not isinstance(asked, str) or not isinstance(answered, str):
            raise wrong(path, f"[{i}]: each turn needs 'from' and 'value'")
        if turns[0].get("from") in ("human", "user") and asked.strip() and answered.strip():
            n_tokens = max(1, round(len(answered.split()) * TOKENS_PER_WORD))
            yield ChatRequest(text=asked, max_tokens=min(n_tokens, max_tokens))


CONVERSATIONS = {"openai-jsonl": openai_requests, "sharegpt": sharegpt}
