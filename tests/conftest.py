"""What holds for all tests."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def old_objects_stay() -> None:
    """What is there when a module begins is left out of later collections of garbage. The whole suite and its libraries
    are a million objects: each `LLM` that is closed would look through them, which takes longer than a test's
    requests."""
    gc.collect()
    gc.freeze()
