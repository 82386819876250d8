"""The likeliest token by a shortlist is that of the whole head, always."""

from __future__ import annotations

import pytest
import torch

from hydrainfer.ops import Shortlist
from hydrainfer.ops.build import load_kernels
from tests.ops.test_variants import compiled, random

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def kernels():
    if not compiled():
        pytest.skip("no compiler here")
    return load_kernels(torch.device("cpu"))[0]


def shortlist_of(head: torch.Tensor) -> Shortlist:
    made = Shortlist(tuple(head.shape), head.device)
    made.take(head)
    return made


def heads():
    plain = random(5000, 96, dtype=torch.float32, seed=1)
    twice = torch.cat([plain[:2500], plain[:2500]])  # each logit is there twice: the first one counts
    close = plain[:1] + 1e-6 * plain  # closer to each other than 8 bits can tell
    uneven = plain * torch.logspace(-8, 8, 5000)[:, None]
    return {"plain": plain, "twice": twice, "close": close, "uneven": uneven, "zero": torch.zeros(5000, 96)}


@pytest.mark.parametrize("name", heads())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_the_likeliest_token_of_a_shortlist_is_that_of_the_whole_head(kernels, name, dtype, rows):
    head = heads()[name].to(dtype)
    shortlist = shortlist_of(head)
    for seed in range(20):
        x = (random(rows, 96, dtype=torch.float32, seed=seed) * 10.0 ** (seed % 5 - 2)).to(dtype)
        assert kernels.likeliest(x, head, shortlist).tolist() == kernels.linear(x, head).argmax(-1).tolist()


def test_of_a_plain_head_few_tokens_are_multiplied(kernels, monkeypatch):
    head, met = heads()["plain"], []
    shortlist = shortlist_of(head)
    linear = kernels.linear
    monkeypatch.setattr(kernels, "linear", lambda x, weight: met.append(len(weight)) or linear(x, weight))
    for seed in range(20):
        kernels.likeliest(random(2, 96, dtype=torch.float32, seed=seed), head, shortlist)
    assert max(met) < 200
    assert shortlist.nbytes < 0.3 * head.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_error_is_what_it_says(kernels, dtype):
    for name, wide in heads().items():
        head = wide.to(dtype)
        shortlist = shortlist_of(head)
        x = random(8, 96, dtype=dtype, seed=3).float()
        off = (kernels.linear_int8(x, shortlist.narrow) - kernels.linear(x.to(dtype), head).float()).abs()
        assert (off <= x.norm(dim=1)[:, None] * shortlist.errors).all(), name


def test_logits_that_are_no_numbers(kernels):
    head = heads()["plain"]
    x = torch.full((1, 96), float("nan"))
    assert kernels.likeliest(x, head, shortlist_of(head)).shape == (1,)
    beside = torch.cat([x, random(1, 96, dtype=torch.float32)])
    assert (
        kernels.likeliest(beside, head, shortlist_of(head)).tolist() == kernels.linear(beside, head).argmax(-1).tolist()
    )
