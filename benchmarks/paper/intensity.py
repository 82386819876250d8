"""Figure 5: arithmetic intensity of the linear operations, by pictures and tokens in a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.paper.draw import COLOURS, figure
from benchmarks.paper.lab import Lab, device
from hydrainfer.planner.costs import ModelShape
from hydrainfer.planner.inputs import shape_of

TITLE = "Figure 5: arithmetic intensity of LLaVA-1.5-7B's linear operations"
PICTURES = (0, 1, 2, 4, 8, 16)
TOKENS = tuple(2**k for k in range(13))
TEXT = """\
Computed from the sizes of the matrices, as in Table 2: 2 operations per weight and row; each matrix is read once, and
12 values per row and layer move. A picture is 577 rows of the vision tower. Both effects that the paper describes are
there, of different size: one picture makes decode of 8 tokens four times as intense, 16 pictures bring any number of
tokens to the ridge (which is that of the peaks); but the loss at prefill is a few percent: there encode is beyond the
ridge as well. It is no argument against encoding beside prefill, only that there is nothing to gain. The
curves take both models' operations for one: whether two streams share a device so is another question (Figure 4, which
is not reproduced: it needs the device)."""


def intensity(shape: ModelShape, pictures: int, tokens: int) -> float:
    """Operations per byte of a batch of both."""
    v = shape.vision
    assert v is not None
    rows, layers = pictures * v.window_rows, sum(map(shape.layer_weights, range(shape.layers)))
    weights = layers * (tokens > 0) + v.weights * (pictures > 0)
    flops = 2 * (layers * tokens + v.row_weights * rows)
    moved = 12 * (shape.layers * shape.hidden * tokens + v.layers * v.hidden * rows)
    return flops / ((weights + moved) * shape.item_bytes)


def simulate(_: Lab, quick: bool) -> dict[str, Any]:  # noqa: ARG001
    shape, h800 = shape_of("llava-1.5-7b"), device("roofline")
    curves = {str(p): [intensity(shape, p, t) for t in TOKENS] for p in PICTURES}
    alone = {str(p): intensity(shape, p, 0) for p in PICTURES if p}
    return {"tokens": TOKENS, "curves": curves, "pictures_alone": alone, "ridge": h800.flops_per_s / h800.bytes_per_s}


def draw(found: dict[str, Any], path: Path) -> None:
    with figure(path, TITLE, 1, 1, 5.6, 3.8) as axes:
        axis = axes[0][0]
        for colour, (pictures, curve) in zip(COLOURS, found["curves"].items()):
            axis.plot(found["tokens"], curve, "o-", color=colour, markersize=3, label=f"{pictures} pictures")
        axis.axhline(found["ridge"], color="black", linestyle=":", linewidth=1)
        axis.text(1, found["ridge"] * 1.07, "ridge of an H800 at its peaks", fontsize=8)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("language tokens in the batch")
        axis.set_ylabel("operations per byte")
        axis.legend(frameon=False, fontsize=8)


def compare(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    curves, last = found["curves"], len(found["tokens"]) - 1
    return [
        (
            "few tokens (decode): memory-bound, more pictures raise the intensity",
            f"8 tokens: {curves['0'][3]:.0f} without, {curves['1'][3]:.0f} with one, {curves['8'][3]:.0f} with 8",
            "holds",
        ),
        (
            "many tokens (prefill): compute-bound, pictures lower it",
            f"4096 tokens: {curves['0'][last]:.0f} without, {curves['8'][last]:.0f} with 8",
            "holds",
        ),
    ]
