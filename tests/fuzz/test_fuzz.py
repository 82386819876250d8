"""The first inputs of each target, and such as hypothesis finds; all of them: `make fuzz`."""

import pytest

from tests.fuzz.targets import TARGETS, rng_of

pytestmark = [pytest.mark.cpu, pytest.mark.multi, pytest.mark.timeout(120)]
N_INPUTS = {"http": 400, "media": 600, "frames": 2000, "predicted": 150}


@pytest.mark.parametrize("name", TARGETS)
def test_the_first_inputs(name, tmp_path):
    target = TARGETS[name](tmp_path)
    try:
        for number in range(N_INPUTS[name]):
            target.feed(rng_of(name, number))
    finally:
        target.close()
    assert len(target.seen) > 1, target.seen
