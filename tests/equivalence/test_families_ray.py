"""Families that see, with an instance for each stage in a process of its own: the tokens of one instance."""

from __future__ import annotations

import pytest

from hydrainfer import LLM, SamplingParams
from tests.equivalence.test_ray import ray_runtime, wait_returned  # noqa: F401 (a fixture)
from tests.families.sample import samples

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]
SEEING = {name: sample for name, sample in samples().items() if sample.expanded is not None}
FAST = ("mistral3",)  # has texts within a picture, so that a span names more than its beginning and end
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
OPTIONS = {"threads": 1, "native_kernels": False, "dtype": "float32", "image_backend": "pillow", "token_budget": 24}


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in SEEING])
def test_tokens_in_processes_are_those_of_one_instance(name, tmp_path):
    sample = SEEING[name]
    path, chats = sample.make(tmp_path / "checkpoint", seed=5), list(sample.chats.values())
    with LLM(path, layout="1EPD", launcher="inproc", **OPTIONS) as llm:
        wanted = [out.outputs[0].token_ids for out in llm.chat(chats, GREEDY, use_tqdm=False)]
    with LLM(path, layout="1E1P1D", launcher="ray", **OPTIONS) as llm:
        found = [out.outputs[0].token_ids for out in llm.chat(chats, GREEDY, use_tqdm=False)]
        wait_returned(llm)
    assert found == wanted
