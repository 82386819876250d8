"""Which measurement of this machine is continued."""

import pytest
import torch

from hydrainfer.config import ServeConfig
from hydrainfer.profiling import measuring

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (measuring, "cpu_name", lambda: "another processor"),
        (measuring, "instruction_sets", lambda: ("avx1024",)),
        (measuring, "__version__", "99.0"),
        (torch, "__version__", "99.0"),
    ],
)
def test_another_machine_or_version_is_measured_anew(owner, name, other, monkeypatch):
    config = ServeConfig(model="builtin", device="cpu", threads=1)
    key = measuring._key(config)
    assert measuring._key(config) == key
    monkeypatch.setattr(owner, name, other)
    assert measuring._key(config) != key
