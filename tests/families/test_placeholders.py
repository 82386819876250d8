"""The ids of a picture in a prompt: those that the reference's preprocessing makes of a picture of the same size."""

from __future__ import annotations

import random

import pytest

from hydrainfer.core import MediaError
from hydrainfer.processor import load_description
from hydrainfer.processor.text import expand
from tests.families.sample import samples

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]
SAMPLES = {name: sample for name, sample in samples().items() if sample.expanded is not None}
N_RANDOM = 300


@pytest.mark.parametrize("name", SAMPLES)
def test_placeholders_of_many_sizes(name, tmp_path):
    path, rng = SAMPLES[name].make(tmp_path / "checkpoint"), random.Random(7)
    expanded, model = SAMPLES[name].expanded(path), load_description(path)
    sizes = [*SAMPLES[name].sizes, *((rng.randint(1, 700), rng.randint(1, 700)) for _ in range(N_RANDOM))]
    for width, height in sizes:
        want, token = expanded(width, height), model.images.token_id
        if want is None:
            with pytest.raises(MediaError, match=f"the picture is {width} x {height}"):
                model.images.adapter.fit(width, height)
            continue
        item = model.images.adapter.fit(width, height)
        ours = list(expand([token], [[item]], model, [token]).ids)
        assert ours == want, (width, height)
        assert ours.count(token) == item.n_tokens, (width, height)
        n_around = ours[::-1].index(token) + ours.index(token)
        assert len(ours) - n_around == item.n_tokens + item.n_inner, (width, height)
