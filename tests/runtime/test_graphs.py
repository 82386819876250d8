"""Decode steps by graphs, with a double that computes a step anew where a graph would be replayed."""

from __future__ import annotations

import pytest
import torch

from hydrainfer.core import TokenWork
from hydrainfer.runtime.graphs import ROWS
from tests.runtime.harness import IMAGE, Prompt, Rig

pytestmark = pytest.mark.cpu

PROMPTS = [
    Prompt([1, 5, 6, IMAGE, 7], [1]),
    Prompt(list(range(1, 30)), []),
    Prompt([1, 9], []),
    Prompt([1, IMAGE, 8, IMAGE], [2, 3]),
    Prompt([1, 4, 4, 4, 4, 4, 4], []),
]


class Captures:
    """Captures a step as what computes it, and counts."""

    def __init__(self) -> None:
        self.n, self.replays = 0, 0

    def __call__(self, run):
        self.n += 1
        hidden = run()

        def replay() -> None:
            self.replays += 1
            hidden.copy_(run())

        return replay, hidden


def outputs(rig: Rig) -> list[list[int]]:
    lengths = [3, 9, 7, 12, 5]  # they end one after the other: batches of five to one
    return rig.run([rig.sequence(prompt, n) for prompt, n in zip(PROMPTS, lengths)])


@pytest.mark.parametrize("before", [False, True], ids=["at first use", "at start"])
def test_tokens_are_those_without_graphs(checkpoints, rig, before):
    captures = Captures()
    with_graphs = Rig(checkpoints(), capture=captures)
    try:
        if before:
            with_graphs.language.capture()
            assert captures.n == len(ROWS) and not captures.replays
        assert outputs(with_graphs) == outputs(rig)
        assert captures.n == (len(ROWS) if before else 4), "for 8, 4, 2 and 1 rows"
        assert captures.replays >= 7
    finally:
        with_graphs.close()


def test_a_decode_that_does_not_sample_and_too_many_rows(checkpoints, rig):
    captures = Captures()
    with_graphs = Rig(checkpoints(), capture=captures)
    try:
        for n in (3, ROWS[-1] + 1):
            found = []
            for each in (rig, with_graphs):
                seqs = [each.sequence(Prompt([1, 5 + i % 50], []), 2) for i in range(n)]
                work = [TokenWork(s, i % 2, 1, i % 2 == 1) for i, s in enumerate(seqs)]
                found.append(each.step(work).tokens)
                for s in seqs:
                    each.release(s)
            assert found[0] == found[1] and len(found[0]) == n // 2
        assert captures.n == 1, "a batch larger than all graphs goes without"
    finally:
        with_graphs.close()


def test_a_capture_that_fails_says_so(checkpoints):
    def no_memory(run):
        raise torch.OutOfMemoryError

    broken = Rig(checkpoints(), capture=no_memory)
    try:
        with pytest.raises(Exception, match="out of memory"):
            broken.language.capture()
    finally:
        broken.close()
