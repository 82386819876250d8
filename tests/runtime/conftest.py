"""Checkpoints shared by the runtime tests of one session."""

from __future__ import annotations

import pytest

from tests.checkpoints import make_llava
from tests.runtime.harness import Rig


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """`checkpoints(seed, kv_heads)` → a directory, made once."""
    made = {}

    def get(seed: int = 0, kv_heads: int = 2, **options):
        key = (seed, kv_heads, *sorted(options.items()))
        if key not in made:
            out = tmp_path_factory.mktemp("llava")
            made[key] = make_llava(out, seed, kv_heads=kv_heads, heads=4, head_dim=16, **options)
        return made[key]

    return get


@pytest.fixture
def rig(checkpoints):
    made = Rig(checkpoints())
    yield made
    made.close()
