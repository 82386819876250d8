"""Decode steps by graphs, with a double that computes a step anew where a graph would be replayed."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from hydrainfer import LLM, SamplingParams
from hydrainfer.assemble import engine as assembling
from hydrainfer.core import DEVICE_LOST, InternalError, Role, TokenWork
from hydrainfer.models import PatchedPicture, load_model
from hydrainfer.runtime.graphs import ROWS, SQUARES, SquareGraphs
from tests.checkpoints import make_picture
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


def test_embeddings_are_those_without_graphs(checkpoints):
    captures, model = Captures(), load_model(checkpoints(), Role.parse("E"))
    pictures = [PatchedPicture(make_picture(i, 56)) for i in range(SQUARES[-1] + 2)]
    plain = {n: model.encode(pictures[-n:]) for n in (*SQUARES, len(pictures))}
    with torch.inference_mode():
        SquareGraphs(model.vision.squares, captures).capture_all()
    assert captures.n == len(SQUARES)
    kept = []
    for n, want in plain.items():
        kept += zip(model.encode(pictures[-n:]), want)
    assert captures.replays == len(SQUARES), "more pictures than any graph has go without"
    for got, want in kept:  # all of them: one pass does not overwrite what another made
        torch.testing.assert_close(got, want)


def test_a_server_captures_before_its_engine_is_there(checkpoints, monkeypatch):
    """Lanes ask the engine whether the other one is busy, also while graphs are captured."""
    decodes, squares = Captures(), Captures()
    chat = [{"role": "user", "content": [{"type": "image", "image": Image.fromarray(make_picture(1, 56))}]}]
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    found = []
    for capture in (False, True):
        monkeypatch.setattr(assembling, "capture_for", lambda _, on=capture: decodes if on else None)
        monkeypatch.setattr(assembling, "capture_squares_for", lambda _, on=capture: squares if on else None)
        with LLM(checkpoints(), device="cpu", overlap="free", threads=1) as llm:
            (answer,) = llm.chat([chat], greedy, use_tqdm=False)
            found.append(answer.outputs[0].token_ids)
    assert found[0] == found[1]
    assert decodes.n == len(ROWS) and squares.n == len(SQUARES) and decodes.replays and squares.replays == 1


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


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory\nmore"), torch.AcceleratorError("no")])
def test_a_capture_that_fails_is_said_and_steps_go_without(checkpoints, rig, caplog, error):
    captures = []

    def fails(run):
        captures.append(run())
        if len(captures) == 3:
            raise error
        return (lambda: None), captures[-1]

    broken = Rig(checkpoints(), capture=fails)
    try:
        broken.language.capture()
        (warning,) = caplog.records
        assert "goes without" in warning.message and "\n" not in warning.message and warning.levelname == "WARNING"
        assert outputs(broken) == outputs(rig)
        assert len(captures) == 3
    finally:
        broken.close()


def test_a_device_that_is_lost_while_capturing_ends_the_start(checkpoints, monkeypatch):
    def lost(*args, **kwargs):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    broken = Rig(checkpoints(), capture=lost)
    monkeypatch.setattr(torch, "zeros", lost)
    try:
        with pytest.raises(InternalError) as failed:
            broken.language.capture()
        assert failed.value.code == DEVICE_LOST
    finally:
        broken.close()
