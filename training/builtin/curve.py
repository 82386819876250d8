"""Draws the log of a run: `python -m training.builtin.curve LOG.jsonl OUT.png`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

_SCORES = ("exists", "count", "colour", "shape", "caption", "position", "digit", "photo")
_STAGES = {  # by a figure that only this stage logs: losses and shares
    "answers": (("answers", "seeing"), _SCORES),
    "right_1": (("loss",), ("right_1", "right_2", "right_3")),
    "kind": (("kind", "colour", "centre", "whole"), ("digits_right",)),
}


def main(log: Path, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [json.loads(line) for line in log.read_text().splitlines()]
    minutes = [r["trained_s"] / 60 for r in rows]
    figure, (losses, scores) = plt.subplots(1, 2, figsize=(11, 4))
    losing, right = next(keys for first, keys in _STAGES.items() if first in rows[0])
    for key in losing:
        losses.plot(minutes, [r.get(key) for r in rows], label=key)
    for key in right:
        scores.plot(minutes, [r.get(key) for r in rows], label=key)
    losses.set(yscale="log", xlabel="minutes of training", ylabel="cross-entropy")
    scores.set(ylim=(0, 1.01), xlabel="minutes of training", ylabel="share right (teacher-forced)")
    for axes in (losses, scores):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=80)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
