"""A check for tests: no sequence is lost or in two places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hydrainfer.core import LiveSequence, Stage

Sequences = Mapping[str, LiveSequence]


def check_places(
    live: Sequences,
    running: Mapping[Stage, Sequences],
    migrating: Sequences,
    waits: Iterable[LiveSequence],
    arriving: Sequences,
) -> None:
    """Raises `AssertionError` unless every live sequence runs in its own stage, migrates, or waits."""
    places = [*waits, *migrating.values()]
    for stage, group in running.items():
        assert all(seq.stage is stage for seq in group.values()), f"a sequence is not in {stage.value}"
        places += group.values()
    assert not arriving.keys() & live.keys(), "seen before it landed"
    assert len(places) == len({seq.id for seq in places}) == len(live), "a sequence is lost or doubled"
