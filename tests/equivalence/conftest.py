"""A tiny checkpoint, and what one instance answers to the mixed batch."""

import gc

import pytest

from hydrainfer import LLM
from tests.checkpoints import make_llava
from tests.equivalence.mixed import CHUNKED, ask


@pytest.fixture(scope="module", autouse=True)
def old_objects_stay():
    """What is there when a module begins is left out of collections of garbage until it ends. The suite and its
    libraries are a million objects: each `LLM` that is closed would look through them, which takes longer than a test's
    requests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="session")
def wanted(tiny):
    with LLM(tiny, layout="1EPD", **CHUNKED | {"token_budget": 2048}) as llm:
        return ask(llm)
