"""Figure 9: what the data sets ask of LLaVA-NeXT-7B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.paper.draw import COLOURS, figure
from benchmarks.paper.lab import DATASETS, MODELS, Lab, study_for, table_3, trace
from benchmarks.paper.lab import Case as Study
from hydrainfer.planner.inputs import summary
from hydrainfer.planner.search import Bounds

TITLE = "Figure 9: the workload of LLaVA-NeXT-7B by data set"
TEXT = """\
The workloads are synthetic (configs/workloads): picture sizes are those of the data sets, answer lengths are assumed.
The paper recorded its own from the model, and its figure is not to be had as numbers, so nothing can be checked but
what the text says: MME has hardly any decode. Pictures are some 2,200 to 2,400 tokens for LLaVA-NeXT: prompts are
long and answers short, so that prefill is nearly all of the work of every data set but TextCaps, where decode is a
third of it, and VizWiz, where they are about equal. Encode is a twelfth of prefill everywhere. That is the reason for
much of what follows."""


def simulate(_: Lab, quick: bool) -> dict[str, Any]:  # noqa: ARG001
    found: dict[str, Any] = {}
    for model in MODELS:
        for dataset in DATASETS:
            numbers = summary(trace(model, dataset))
            work = Bounds(study_for(Study(model, dataset, table_3(model, dataset)))).mean
            found.setdefault(model, {})[dataset] = numbers | {
                f"{stage}_s": getattr(work, f"{stage}_s") for stage in ("encode", "prefill", "decode")
            }
    return found


def draw(found: dict[str, Any], path: Path) -> None:
    with figure(path, TITLE, 1, 3) as axes:
        one = found["llava-next-7b"]
        names = list(one)
        panels = (
            ("prompt tokens", {"picture": "picture_mean", "text": "text_mean"}, 1.0),
            ("answer tokens", {"mean": "output_mean", "90 %": "output_p90"}, 1.0),
            (
                "ms of an H800 per request (roofline)",
                {stage: f"{stage}_s" for stage in ("encode", "prefill", "decode")},
                1e3,
            ),
        )
        for axis, (title, series, scale) in zip(axes[0], panels):
            width = 0.8 / len(series)
            for rank, (label, key) in enumerate(series.items()):
                at = [i + (rank - (len(series) - 1) / 2) * width for i in range(len(names))]
                axis.bar(at, [one[n][key] * scale for n in names], width * 0.92, color=COLOURS[rank], label=label)
            axis.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
            axis.set_title(title, fontsize=10)
            axis.set_ylim(top=1.4 * axis.get_ylim()[1])
            axis.legend(frameon=False, fontsize=8, loc="upper left")


def compare(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    mme, textcaps = (found["llava-next-7b"][name] for name in ("mme", "textcaps"))
    return [
        (
            "MME: classification with minimal decode",
            f"{mme['output_mean']:.1f} answer tokens, decode {mme['decode_s'] / mme['prefill_s']:.1%} of prefill",
            "holds (assumed lengths)",
        ),
        (
            "TextCaps (values are in the picture only)",
            f"{textcaps['picture_mean']:.0f} picture, {textcaps['text_mean']:.0f} text, "
            f"{textcaps['output_mean']:.0f} answer tokens: {textcaps['encode_s'] * 1e3:.0f} + "
            f"{textcaps['prefill_s'] * 1e3:.0f} + {textcaps['decode_s'] * 1e3:.0f} ms",
            "cannot be compared",
        ),
    ]
