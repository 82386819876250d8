"""A tiny checkpoint, and what one instance answers to the mixed batch."""

import pytest

from hydrainfer import LLM
from tests.checkpoints import make_llava
from tests.equivalence.mixed import CHUNKED, ask


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="session")
def wanted(tiny):
    with LLM(tiny, layout="1EPD", **CHUNKED | {"token_budget": 2048}) as llm:
        return ask(llm)
