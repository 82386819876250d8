"""Readers of published arrival traces: Azure's LLM inference traces, BurstGPT, Mooncake. Lengths are in tokens."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from hydrainfer.core import ConfigError
from hydrainfer.workload.sources.files import field, read_json_lines, read_table, wrong


class Arrival(NamedTuple):
    """The arrival of one request. `at_s`: seconds after the first one."""

    at_s: float
    n_prompt: int
    n_output: int


def azure(path: Path) -> Iterator[Arrival]:
    """`AzureLLMInferenceTrace_*.csv` (2023, 2024): TIMESTAMP, ContextTokens, GeneratedTokens."""
    _, rows = read_table(path)
    for where, row in rows:
        # fractions have up to seven digits, one more than datetime accepts
        text = re.sub(r"(\.\d{6})\d+", r"\1", row["TIMESTAMP"] or "")
        try:
            at = datetime.datetime.fromisoformat(text)
        except ValueError:
            raise wrong(path, f"{where}: TIMESTAMP {row['TIMESTAMP']!r} is no date and time") from None
        at_s = at.replace(tzinfo=at.tzinfo or datetime.UTC).timestamp()
        yield Arrival(at_s, _count(path, where, row, "ContextTokens"), _count(path, where, row, "GeneratedTokens"))


def burstgpt(path: Path) -> Iterator[Arrival]:
    """`BurstGPT_*.csv`: Timestamp (seconds), Request tokens, Response tokens. A response of 0 tokens is a failure and
    is left out."""
    _, rows = read_table(path)
    for where, row in rows:
        n_output = _count(path, where, row, "Response tokens")
        if n_output:
            at_s = _number(path, where, row, "Timestamp")
            yield Arrival(at_s, _count(path, where, row, "Request tokens"), n_output)


def mooncake(path: Path) -> Iterator[Arrival]:
    """`*_trace.jsonl`: timestamp (milliseconds), input_length, output_length. Shared prefixes (`hash_ids`) are not
    reproduced: prompts are distinct."""
    for where, entry in read_json_lines(path):
        at_ms = field(path, where, entry, "timestamp", (int, float))
        n_prompt, n_output = (field(path, where, entry, name, int) for name in ("input_length", "output_length"))
        yield Arrival(at_ms / 1e3, n_prompt, n_output)


TRACES: dict[str, Callable[[Path], Iterator[Arrival]]] = {"azure": azure, "burstgpt": burstgpt, "mooncake": mooncake}


def read_arrivals(path: Path, kind: str | None = None) -> list[Arrival]:
    """The arrivals in order of time, the first at 0. `kind`: None to tell it from the columns. Raises `ConfigError`."""
    reader = TRACES[kind or _kind_of(path)]
    rows = sorted(reader(path))
    if not rows:
        raise wrong(path, "no arrivals in it")
    return [Arrival(row.at_s - rows[0].at_s, *row[1:]) for row in rows]


def _kind_of(path: Path) -> str:
    if path.suffix == ".jsonl":
        return "mooncake"
    columns, _ = read_table(path)
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(columns):
        return "azure"
    if {"Timestamp", "Request tokens", "Response tokens"} <= set(columns):
        return "burstgpt"
    raise ConfigError(
        f"{path} is none of the traces known: Azure (TIMESTAMP, ContextTokens, GeneratedTokens), BurstGPT (Timestamp, "
        f"Request tokens, Response tokens) or Mooncake (.jsonl); its columns are {', '.join(columns) or 'none'}",
        param="path",
    )


def _number(path: Path, where: str, row: dict[str, str], name: str) -> float:
    try:
        return float(row[name])
    except (KeyError, TypeError, ValueError):
        raise wrong(path, f"{where}: {name!r} must be a number, not {row.get(name)!r}") from None


def _count(path: Path, where: str, row: dict[str, str], name: str) -> int:
    return int(_number(path, where, row, name))
