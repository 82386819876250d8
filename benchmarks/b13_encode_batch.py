"""How many pictures per second does each family encode, one at a time and together, of equal and of mixed sizes?

Vision towers of middling size with random weights (width 512, 4 layers; LLaVA-NeXT's is a small one), a real
photograph, the families' own adapters. "Mixed": a batch is made of landscape, portrait, square and small pictures, as
requests of different people bring them. The same eight pictures are encoded whatever the batch, and batches take turns.
Takes four to five minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.table import Table

from benchmarks.command import new_console, options
from benchmarks.figure import save_lines
from benchmarks.floors import waits_for
from benchmarks.record import from_root, spread, write_result
from hydrainfer.core import Role
from hydrainfer.models import Model, PatchedPicture, load_model
from hydrainfer.processor import ImagePart, MediaLimits, Seal, load_description, prepare_image
from tests.checkpoints import make_llava
from tests.checkpoints_next import make_llava_next
from tests.checkpoints_qwen import make_qwen
from tests.equivalence.reference import photo

WIDTH, DEPTH, HEADS = 512, 4, 8
QWEN: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": DEPTH, "embed_dim": WIDTH},
    "qwen2_5_vl": {"depth": DEPTH, "hidden_size": WIDTH, "intermediate_size": 1368, "fullatt_block_indexes": [1, 3]},
    "qwen3_vl": {"depth": DEPTH, "hidden_size": WIDTH, "intermediate_size": 1368, "deepstack_visual_indexes": [1, 2]},
}
CLIP = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
SIZES = ((640, 480), (360, 640), (448, 448), (224, 168))
"""Of the mixed pictures, in turns."""


def checkpoint(family: str, folder: Path) -> Path:
    out = folder / family
    if family == "llava":
        return make_llava(out, image_size=336, vision=CLIP)
    if family == "llava_next":
        return make_llava_next(out)  # its tower is a small one: the figure shows how tiles batch, not their cost
    most = 640 * 480
    return make_qwen(family, out, pixels=(4 * 32 * 32, most), vision={**QWEN[family], "num_heads": HEADS})


class Tower:
    """One family: its model, and pictures as its adapter makes them."""

    def __init__(self, path: Path, device: str) -> None:
        self.model: Model = load_model(path, Role.parse("E"), device, "float32" if device == "cpu" else "bfloat16")
        images = load_description(path).images
        assert images is not None
        self._adapter = images.adapter

    def pictures(self, n: int, mixed: bool) -> list[PatchedPicture]:
        source = photo("coffee.png").convert("RGB")
        found = []
        for i in range(n):
            size = SIZES[i % len(SIZES)] if mixed else SIZES[0]
            part = ImagePart(source.resize(size, Image.Resampling.BICUBIC), "messages")
            (made,) = prepare_image(part, self._adapter, MediaLimits(), Seal(b"", "float32"))
            found.append(PatchedPicture(made.pixels, made.item.grid))
        return found


def measure(args: argparse.Namespace, towers: dict[str, Tower]) -> dict[str, Any]:
    rates: dict[str, dict[int, list[float]]] = {}
    runs: list[tuple[str, int, Callable[[], float]]] = []
    for name, tower in towers.items():
        for mixed in (False, True):
            label = f"{name}, {'mixed' if mixed else 'equal'}"
            every = tower.pictures(max(args.batches), mixed)
            tower.model.encode(every[:1])  # warm
            for n in args.batches:
                groups = [every[i : i + n] for i in range(0, len(every), n)]
                rates.setdefault(label, {})[n] = []
                runs.append((label, n, lambda t=tower, g=groups: _rate_of(t, g)))  # type: ignore[misc]
    for _ in range(args.rounds):
        for label, n, run in runs:
            rates[label][n].append(run())
    return {label: {str(n): spread(r) for n, r in by_n.items()} for label, by_n in rates.items()}


def _rate_of(tower: Tower, groups: list[list[PatchedPicture]]) -> float:
    """The same pictures whatever the batch, so that mixed ones cost the same."""
    start_s = time.perf_counter()
    for group in groups:
        tower.model.encode(group)
    waits_for(tower.model.device)()
    return sum(map(len, groups)) / (time.perf_counter() - start_s)


def show(results: dict[str, Any], batches: list[int]) -> None:
    table = Table("family, pictures", *(f"batch {n}" for n in batches), title="pictures per second, median")
    for label, by_n in results.items():
        table.add_row(label, *(f"{by_n[str(n)]['median']:.2f}" for n in batches))
    new_console().print(table)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--families", nargs="+", default=["llava", "llava_next", *QWEN])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="float32 on a CPU, bfloat16 on CUDA")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        towers = {family: Tower(checkpoint(family, Path(folder)), args.device) for family in args.families}
    results = measure(args, towers)
    show(results, args.batches)
    path = write_result("b13_encode_batch", __doc__, args, results)
    mixed = {label.partition(",")[0]: by_n for label, by_n in results.items() if label.endswith("mixed")}
    lines = {name: [by_n[str(n)]["median"] / by_n["1"]["median"] for n in args.batches] for name, by_n in mixed.items()}
    x = [float(n) for n in args.batches]
    save_lines(
        path.with_suffix(".png"), "Encoding mixed pictures together", "batch", "rate / rate of 1", x, lines, False
    )
    print(f"wrote {from_root(path)}")


if __name__ == "__main__":
    main()
