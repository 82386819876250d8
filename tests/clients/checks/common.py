"""The parts of every check: two servers, a picture, a form, a tool. Runs in a client's own environment, without
ours."""

from __future__ import annotations

import base64
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

SEES, CALLS = os.environ["CLIENTS_SEES"], os.environ["CLIENTS_CALLS"]
"""Base URLs of the built-in model, which knows shapes, and of a tiny random one whose template has tools."""
KEY = "none"
SHAPES = Path(__file__).parents[3] / "datasets/samples/shapes.png"
PICTURE = "data:image/png;base64," + base64.b64encode(SHAPES.read_bytes()).decode()
QUESTION = "What is in this picture?"
ANSWER = "A red circle, a blue square and a green star."


class Seen(BaseModel):
    """The facts that were seen."""

    color: Literal["red", "green", "blue"]
    count: int = Field(ge=0, le=9)


def seen_parts() -> list[dict]:
    return [{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": QUESTION}]


def run(*checks: Callable[[], object]) -> None:
    """Each check in turn; one line for each, `ok NAME` or `bad NAME: why`."""
    for check in checks:
        name = check.__name__.replace("_", " ")
        try:
            check()
            print(f"ok {name}", flush=True)
        except Exception as e:
            traceback.print_exc()
            print(f"bad {name}: {type(e).__name__}: {' '.join(str(e).split())[:300]}", flush=True)
