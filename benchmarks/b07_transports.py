"""How fast does each transport move blocks between two processes, against a plain torch copy of the same bytes?

A second process exports a cache and serves it. In every round each transport, and `copy_` between two tensors of this
process with the same runs of neighbours and one thread, moves the same blocks; all pages are touched before. `picture`:
the 576 embedding rows of a LLaVA-1.5-7B picture. `kv`: 1024 tokens of its KV cache in blocks of 16. Once as neighbours,
once scattered (runs of one block). On CUDA the same in 16 bit with the transports that work there.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.command import new_console, new_table, options
from benchmarks.figure import Panel, save_bars
from benchmarks.record import spread, write_result
from hydrainfer.cache import CacheSpec, EmbedSpec, FullSpec
from hydrainfer.judging import at_quantile
from hydrainfer.ops import block_copier
from hydrainfer.storage import BlockStore, Exports, Routes, needs_shared
from hydrainfer.storage.transport import runs

SECRET = b"benchmark"
TRANSPORTS = {"cpu": ("shared-memory", "gloo", "tcp"), "cuda": ("cuda-ipc", "tcp")}
PICTURE_TOKENS, KV_TOKENS = 576, 1024
SLACK = 2  # the caches hold this many times what is moved


def specs(dtype: str, tiny: bool) -> dict[str, tuple[CacheSpec, int]]:
    """Caches of LLaVA-1.5-7B, or with the same blocks of a tiny model, and how many are moved."""
    width, layers, heads = (64, 2, 2) if tiny else (4096, 32, 32)
    embed = EmbedSpec.of(width=width, dtype=dtype, block_tokens=64)
    kv = FullSpec.of(layers=layers, kv_heads=heads, head_dim=128, dtype=dtype, block_tokens=16)
    return {"picture": (embed, embed.blocks_for(PICTURE_TOKENS)), "kv": (kv, kv.blocks_for(KV_TOKENS))}


def store_of(spec: CacheSpec, n: int, device: str, transport: str) -> BlockStore:
    store = BlockStore(spec, SLACK * n, device, shared=needs_shared(transport, torch.device(device)))
    store.touch()
    store.bytes.fill_(7)
    return store


def serve(pipe: Connection, transport: str, device: str, spec: CacheSpec, n: int) -> None:
    torch.set_num_threads(1)
    exports = Exports("E0:1", {"cache": store_of(spec, n, device, transport)}, transport, secret=SECRET)
    pipe.send(exports.handles["cache"])
    pipe.recv()
    exports.close()


class Pair:
    """The other process, and the way to it."""

    def __init__(self, transport: str, device: str, spec: CacheSpec, n: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, transport, device, spec, n), daemon=True)
        self._process.start()
        self._handle = self._pipe.recv()
        self._routes = Routes(transport, device, secret=SECRET, copy_blocks=block_copier(torch.device(device)))

    def copy(self, ids: list[int], store: BlockStore, into: list[int]) -> None:
        self._routes.copy(self._handle, ids, store, into)

    def close(self) -> None:
        self._routes.close()
        self._pipe.send(None)
        self._process.join(10)


def timed_s(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def measure(device: str, name: str, spec: CacheSpec, n: int, rounds: int) -> dict[str, Any]:
    """Per order of blocks and transport: seconds of every round, after one that does not count."""
    target = store_of(spec, n, device, "local")
    beside = store_of(spec, n, device, "local")
    pairs = {t: Pair(t, device, spec, n) for t in TRANSPORTS[device]}
    draw = random.Random(0)
    orders = {"neighbours": list(range(n)), "scattered": draw.sample(range(0, SLACK * n, SLACK), n)}
    into = list(range(n))

    def plain(ids: list[int]) -> None:
        for first, at, k in runs(ids, into):
            target.bytes[at : at + k].copy_(beside.bytes[first : first + k], non_blocking=True)
        if device == "cuda":
            torch.cuda.current_stream().synchronize()

    found: dict[str, dict[str, list[float]]] = {}
    stream = torch.cuda.Stream() if device == "cuda" else None  # as pulls have
    try:
        with torch.inference_mode(), torch.cuda.stream(stream):
            for order, ids in orders.items():
                calls = {"copy_": partial(plain, ids)}
                calls |= {t: partial(p.copy, ids, target, into) for t, p in pairs.items()}
                times: dict[str, list[float]] = {t: [] for t in calls}
                for rank in range(rounds + 1):
                    turn = list(calls)[rank % len(calls) :] + list(calls)[: rank % len(calls)]
                    for t in turn:
                        took_s = timed_s(calls[t])
                        if rank:
                            times[t].append(took_s)
                found[order] = times
    finally:
        for pair in pairs.values():
            pair.close()
    return summary(found, n * spec.block_bytes, {"cache": name, "blocks": n, "block_bytes": spec.block_bytes})


def summary(found: dict[str, dict[str, list[float]]], n_bytes: int, facts: dict[str, Any]) -> dict[str, Any]:
    """`of_copy`: the transport's bandwidth over that of the plain copy, within a round."""
    cells = {
        order: {
            t: {
                "gib_per_s": spread([n_bytes / s / 2**30 for s in seconds]),
                "of_copy": spread([plain / s for plain, s in zip(times["copy_"], seconds)]),
                "p50_ms": at_quantile(sorted(seconds), 0.5) * 1e3,
                "p95_ms": at_quantile(sorted(seconds), 0.95) * 1e3,
            }
            for t, seconds in times.items()
        }
        for order, times in found.items()
    }
    return {**facts, "bytes": n_bytes, "orders": cells, "seconds": found}


def table(results: list[dict[str, Any]]) -> Table:
    shown = new_table(
        "medians over rounds", ("device", "cache", "MiB", "order", "transport", "GiB/s", "of copy_", "p50 ms", "p95 ms")
    )
    for r in results:
        for order, cells in r["orders"].items():
            for t, c in cells.items():
                numbers = (c["gib_per_s"]["median"], c["of_copy"]["median"], c["p50_ms"], c["p95_ms"])
                row = (r["device"], r["cache"], f"{r['bytes'] / 2**20:.1f}", order, t)
                shown.add_row(*row, *(f"{x:.2f}" for x in numbers))
        shown.add_section()
    return shown


def figure(path: Path, results: list[dict[str, Any]]) -> None:
    panels = []
    for r in results:
        transports = list(r["orders"]["neighbours"])
        series = {
            o: [[r["bytes"] / s / 2**30 for s in times[t]] for t in transports] for o, times in r["seconds"].items()
        }
        panels.append(Panel(f"{r['cache']}, {r['bytes'] / 2**20:.0f} MiB, {r['device']}: GiB/s", transports, series))
    save_bars(path, "Moving blocks between two processes", panels)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", choices=["cpu", "cuda", "auto"], default="auto", help="auto: cpu, and cuda if any")
    parser.add_argument("--tiny", action="store_true", help="little blocks: a dry run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])] if args.device == "auto" else [args.device]
    results = []
    for device in devices:
        for name, (spec, n) in specs("float32" if device == "cpu" else "bfloat16", args.tiny).items():
            results.append({"device": device, **measure(device, name, spec, n, args.rounds)})
    console = new_console()
    console.print(table(results))
    path = write_result("b07_transports", __doc__, args, results)
    figure(path.with_suffix(".png"), results)
    console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
