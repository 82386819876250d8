"""Which tables and figures of Prefill-as-a-Service follow from its throughput model, and from the shapes of models?

`python -m benchmarks.prfaas [part ...]` computes them without a device: in seconds, but the parts `sim_…`, which serve
the case study in the simulator, take minutes. Writes a JSON per part, figures, and README.md over all that are there.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import process_time
from typing import Any

from benchmarks.prfaas import (
    fig2,
    fig5a,
    fig5b,
    hydra_fig7,
    mimo_cost,
    mimo_kv,
    mimo_prefix,
    price,
    sim_bandwidth,
    sim_far,
    sim_hits,
    sim_rates,
    sim_rules,
    sim_step,
    table3,
    table3_shapes,
    table6,
)
from benchmarks.prfaas.report import Part, write_readme
from benchmarks.record import RESULTS, write_result

PARTS: dict[str, Part] = {
    "table6": table6,
    "table3": table3,
    "table3_shapes": table3_shapes,
    "fig2": fig2,
    "fig5a": fig5a,
    "fig5b": fig5b,
    "price": price,
    "mimo_cost": mimo_cost,
    "mimo_kv": mimo_kv,
    "mimo_prefix": mimo_prefix,
    "hydra_fig7": hydra_fig7,
    "sim_rates": sim_rates,
    "sim_bandwidth": sim_bandwidth,
    "sim_step": sim_step,
    "sim_rules": sim_rules,
    "sim_hits": sim_hits,
    "sim_far": sim_far,
}
FIGURES: dict[str, Any] = {name: part for name, part in PARTS.items() if part.HAS_FIGURE}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prfaas", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS / "prfaas", help="the folder to write to")
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    for name in args.parts or PARTS:
        begin_s = process_time()
        results = PARTS[name].compute()
        results["cpu_s"] = round(process_time() - begin_s, 1)
        path = write_result("prfaas", PARTS[name].TITLE, {"part": name}, results, args.out / f"{name}.json")
        if name in FIGURES:
            FIGURES[name].draw(results, path.with_suffix(".png"))
        print(f"wrote {path} after {results['cpu_s']:.0f} s of a core")
    print(f"wrote {write_readme(args.out, PARTS)}")


if __name__ == "__main__":
    main()
