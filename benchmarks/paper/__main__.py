"""Simulate the paper's figures: `python -m benchmarks.paper [figure ...]`, of which `--quick` makes small ones.

Simulations are kept in .cache/paper, so that a figure can be made again in no time; `--fresh` runs them again. Writes
a JSON and a PNG per figure, and README.md over all that are there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

from benchmarks.paper import ablation, attainment, batching, breakdown, intensity, load, methods, ratios
from benchmarks.paper.lab import CACHE, Lab
from benchmarks.paper.report import Figure, write_readme
from benchmarks.record import RESULTS, write_result

FIGURES: dict[str, Figure] = {
    "fig05": intensity,
    "fig06": batching,
    "fig09": load,
    "fig14": ablation,
    "fig11": ratios,
    "fig13": breakdown,
    "fig12": methods,
    "fig10-next": attainment.NEXT,
    "fig10-qwen2": attainment.QWEN,
    "fig10-1.5": attainment.FIRST,
    "fig10-next-additive": attainment.NEXT_ADDITIVE,
    "fig10-qwen2-additive": attainment.QWEN_ADDITIVE,
    "fig10-1.5-additive": attainment.FIRST_ADDITIVE,
}
QUICK_REQUESTS = 300


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("figures", nargs="*", metavar="figure", help=f"of {', '.join(FIGURES)}; default: all")
    parser.add_argument("--quick", action="store_true", help="fewer cases and shorter runs, for a look")
    parser.add_argument("--fresh", action="store_true", help="forget the simulations that were kept")
    parser.add_argument("--requests", type=int, default=1000, help="of a run, where the figure does not say")
    parser.add_argument("--out", type=Path, default=RESULTS / "paper")
    args = parser.parse_args()
    if unknown := set(args.figures) - FIGURES.keys():
        parser.error(f"no figure {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}")
    if args.fresh:
        shutil.rmtree(CACHE, ignore_errors=True)
    lab = Lab(QUICK_REQUESTS if args.quick else args.requests)
    settings = {"quick": args.quick, "requests": lab.n_requests}
    for name in args.figures or FIGURES:
        figure, began_s = FIGURES[name], time.process_time()
        found = figure.simulate(lab, args.quick)
        path = write_result("paper", figure.TITLE, settings | {"figure": name}, found, args.out / f"{name}.json")
        figure.draw(json.loads(path.read_text())["results"], path.with_name(f"{name}.png"))
        print(f"wrote {path} ({time.process_time() - began_s:.0f} s of CPU)", flush=True)
    print(f"wrote {write_readme(args.out, FIGURES)}")


if __name__ == "__main__":
    main()
