"""Every architecture is in one row of the tables in the documentation, and none of those that are not served is."""

from __future__ import annotations

import pytest

from hydrainfer.families import FAMILIES, NOT_SERVED, SERVED

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
