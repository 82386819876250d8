"""Models in FP8 against transformers on the float32 numbers that their weights are, end to end, by layout."""

from __future__ import annotations

from functools import partial

import pytest

from tests.checkpoints_fp8 import make_fp8
from tests.checkpoints_text import make_text
from tests.equivalence.criterion import Tally
from tests.equivalence.reference import TextReference
from tests.equivalence.test_gguf import N_NEW, agrees
from tests.families.chats import TEXTS

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("kind", "how", "seed"),
    [("qwen3", "blocks", 5), ("qwen3_moe", "uneven blocks", 15), ("ministral3", "tensor", 28), ("llama", "row", 2)],
)
def test_tokens_are_those_of_transformers(tmp_path, kind, how, seed):
    published, plain = make_fp8(tmp_path, partial(make_text, kind=kind, seed=seed), how)
    reference = TextReference(plain)
    wanted = {chat: reference.greedy(content, N_NEW) for chat, content in TEXTS.items()}
    tally = Tally()
    agrees(published, ("1EPD", "1P1D"), TEXTS, wanted, tally)
    tally.check()
