"""Tokens of whole instances on a CUDA device are those of the CPU, in float32, which rounds little. The main path, in
bfloat16, is in test_whole.py."""

from __future__ import annotations

import pytest
import torch

from hydrainfer import LLM
from tests.checkpoints import make_llava
from tests.equivalence import mixed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

WAYS = {
    "free": {"overlap": "free"},
    "off": {"overlap": "off", "token_budget": 7},
    "1E1P1D": {"layout": "1E1P1D", "launcher": "inproc"},
}


@pytest.fixture(scope="module")
def on_cpu(device, tmp_path_factory):
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    path = make_llava(tmp_path_factory.mktemp("llava"))
    with LLM(path, device="cpu", dtype="float32", **mixed.CHUNKED) as llm:
        return path, tokens(mixed.ask(llm))


def tokens(answers):
    """Without log-probabilities, whose third digit another device may round otherwise."""
    return [[ids for ids, _ in choices] for choices in answers]


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_the_cpu(device, on_cpu, way):
    """Greedy and seeded; between instances of one process blocks move by our kernel."""
    path, wanted = on_cpu
    options = mixed.CHUNKED | {"native_kernels": True, "kv_cache_gib": 0.25, "image_cache_gib": 0.25} | WAYS[way]
    with LLM(path, device=device.type, dtype="float32", **options) as llm:
        for _ in ("computed", "cached"):
            assert tokens(mixed.ask(llm)) == wanted
