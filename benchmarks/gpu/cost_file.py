"""What does each batch of this model take on this device? The planner's measurement, as a file for configs/cost_models.

The journal beside it keeps every sample, so that another run goes on where this one was stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hydrainfer.config import ServeConfig
from hydrainfer.costing.measure import Grid, measure_model
from hydrainfer.planner.costs import write_cost_file

TINY = Grid(
    sizes=((56, 56),), pictures=(1,), chunks=(16,), starts=(0,), decodes=(1, 2), contexts=(32,), mixed=(2,),
    beside=((1, 0),), pictures_beside=(1,),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=1.5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dry, journal = args.device == "cpu", args.out.with_suffix(".journal")
    file = measure_model(
        str(args.model),
        minutes=0.02 if dry else args.minutes,
        journal=journal,
        config=ServeConfig(model=str(args.model), device=args.device, threads=1 if dry else None),
        grid=TINY if dry else None,
        transports=() if dry else None,
        on_progress=lambda share, what: print(f"{share:.0%} {what}", flush=True),
    )
    path = args.out.with_suffix(".yaml")
    write_cost_file(path, file)
    print(f"wrote {path}; to keep it, copy it to configs/cost_models")


if __name__ == "__main__":
    main()
