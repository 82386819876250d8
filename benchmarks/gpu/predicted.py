"""Does the cost file of step `whole` predict what the same step measured? The simulator serves the same chats with it.

The chats come at once. Predicted are the instances alone: what is measured also resizes pictures and makes text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.shapes import CONFIGS
from benchmarks.record import RESULTS, write_result
from hydrainfer.assemble.sizes import budgets_of
from hydrainfer.config import ServeConfig
from hydrainfer.core import Layout
from hydrainfer.planner.costs import Hardware, blocks_of, read_cost_file
from hydrainfer.planner.inputs import shape_of
from hydrainfer.planner.nouns import TraceRequest
from hydrainfer.planner.simulation import InstanceModel, Simulator, as_requests

MODEL = "llava-1.5-7b"
PICTURE, TEXT = 576, 24  # tokens of a chat of `whole`
WAYS: dict[str, Any] = {"off": ("1EPD", "off"), "free": ("1EPD", "free")}


def predicted_s(cost_file: Path, layout: str, overlap: Any, n: int, n_output: int) -> float:
    """The virtual seconds until `n` chats that come at once have their answers."""
    file, role = read_cost_file(cost_file), Layout.parse(layout).instances[0]
    device = Hardware(
        name="measured",
        flops_per_s=1.0,  # the times are the file's
        bytes_per_s=1.0,
        link_bytes_per_s=1.0,
        memory_bytes=float(file.hardware["gpu_memory_bytes"]),
    )
    instance = InstanceModel(
        name="EPD0",
        role=role,
        cost=file.cost,
        blocks=blocks_of(shape_of(str(CONFIGS / MODEL), file.dtype), device, role),
        budgets=budgets_of(ServeConfig(model=MODEL), overlap),
        overlap=overlap,
    )
    chats = [TraceRequest(arrival_s=0.0, n_text=TEXT, pictures=(PICTURE,), n_output=n_output) for _ in range(n)]
    return max(served.token_s[-1] for served in Simulator([instance]).run(as_requests(chats)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cost", type=Path, default=Path("configs/cost_models/llava-1.5-7b-h200.yaml"))
    parser.add_argument("--results", type=Path, default=RESULTS / "gpu", help="of step `whole`")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu" / "predicted.json")
    args = parser.parse_args()
    results = {}
    for way, (layout, overlap) in WAYS.items():
        whole = json.loads((args.results / f"whole_{way}.json").read_text())
        settings, measured_s = whole["settings"], whole["results"]["seconds"]
        seconds = predicted_s(args.cost, layout, overlap, settings["requests"], settings["output_tokens"])
        results[way] = {"predicted_s": seconds, "measured_s": measured_s, "ratio": seconds / measured_s}
        print(f"{way}: {seconds:.2f} s predicted, {measured_s:.2f} s measured, {seconds / measured_s:.2f} ×")
    write_result("gpu.predicted", __doc__, args, results)


if __name__ == "__main__":
    main()
