"""Every architecture is in one row of the tables in the documentation, and none of those that are not served is."""

from __future__ import annotations

import pytest

from hydrainfer.assemble.server import _settled
from hydrainfer.checkpoint import locate_model
from hydrainfer.config import ServeConfig
from hydrainfer.families import FAMILIES, NOT_SERVED, SERVED, read_config

pytestmark = pytest.mark.cpu


def test_every_architecture_is_in_one_row():
    named = [name for row in SERVED for name in row.architectures]
    assert sorted(named) == sorted(FAMILIES)
    assert not set(NOT_SERVED) & set(FAMILIES)


def test_rows_say_what_the_families_take():
    for row in SERVED:
        families = [FAMILIES[name] for name in row.architectures]
        assert all(bool(family.pictures) == ("pictures" in row.media) for family in families), row
        assert all(bool(family.videos) == ("videos" in row.media) for family in families), row


@pytest.mark.parametrize(("dtype", "warned"), [("float16", True), ("bfloat16", False)])
def test_a_model_whose_numbers_float16_does_not_hold_is_warned_of(monkeypatch, caplog, dtype, warned):
    name = "LlamaForCausalLM"
    monkeypatch.setitem(FAMILIES, name, FAMILIES[name]._replace(overflows=True))
    model = read_config(locate_model("llama-3.1-8b"))
    assert _settled(ServeConfig(model="", dtype=dtype), model).dtype == dtype
    assert ("--dtype bfloat16" in caplog.text) == warned
