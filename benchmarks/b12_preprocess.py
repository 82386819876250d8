"""How fast do pictures become what is encoded, against the Hugging Face processor, and who is disturbed meanwhile?

Throughput: JPEG bytes in, arrays out, in batches, contestants in turn within a round, ratios within a round.

- `hf x1`, `hf x2`: the family's `*Pil` image processor, with its rescaling and normalising, in 1 and 2 processes (whose
  results stay where they are: sending them back is not counted).
- `ours x1`, `ours x2`: 1 and 2 media workers; uint8 arrays arrive in this process. We normalise on the device.
- `ours+norm x1`, `x2`: the same, with normalising to float32 in the worker and four times the bytes sent.
- `ours here`: in this thread, as `--media-workers 0` does.
- `floor here`: decoding alone, in this thread.

Disturbance: an event loop of this process that asks to be woken every 2 ms, and a stream of the built-in model by a
server of its own, while 4096 x 4096 JPEGs are prepared by two threads of theirs, by two workers, or not at all.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from PIL import Image
from rich.console import Console

from benchmarks.command import new_console, new_table, options
from benchmarks.comparison import cell
from benchmarks.figure import Panel, save_bars
from benchmarks.preprocessing import (
    FAMILIES,
    LARGE_BYTES,
    SEAL,
    large_array,
    photographs,
    prepare_normalised,
    reference,
)
from benchmarks.record import ROOT, spread, write_result
from benchmarks.servers import Server, free_port
from hydrainfer.ops.build import build_resampler
from hydrainfer.processor import ImageAdapter, ImagePart, MediaLimits, MediaWorkers, decode_image, prepare_image
from hydrainfer.workload.results import Percentiles

TARGET = 3.0  # times the throughput of one Hugging Face process, on two cores
CASES = {"1080p": (1920, 1080), "4096x4096": (4096, 4096)}
TICK_S = 0.002
LIMITS = MediaLimits(resampler=build_resampler())  # as a server has them

# ---- throughput


@contextlib.contextmanager
def contestants(family: str) -> Iterator[dict[str, Callable[[list[bytes]], None]]]:
    """Each prepares a list of pictures."""
    adapter = FAMILIES[family].ours()
    with contextlib.ExitStack() as stack:
        found: dict[str, Callable[[list[bytes]], None]] = {}
        for n in (1, 2):
            pool = stack.enter_context(ProcessPoolExecutor(n, mp_context=get_context("spawn")))
            found[f"hf x{n}"] = partial(_by_pool, pool, family)
            workers = MediaWorkers(n, LIMITS)
            stack.callback(workers.close)
            for name, unit, args in (
                (f"ours x{n}", prepare_image, (adapter, LIMITS, SEAL)),
                (f"ours+norm x{n}", prepare_normalised, (family, adapter, LIMITS)),
            ):
                found[name] = partial(_by_workers, workers, unit, args)
        found["ours here"] = lambda batch: _here(batch, adapter)
        found["floor here"] = _decode
        yield found


def _by_pool(pool: ProcessPoolExecutor, family: str, batch: list[bytes]) -> None:
    _wait([pool.submit(reference, family, d) for d in batch])


def _by_workers(workers: MediaWorkers, unit: Callable[..., Any], args: tuple[Any, ...], batch: list[bytes]) -> None:
    _wait([workers.submit(unit, ImagePart(d, ""), *args) for d in batch])


def _wait(futures: list[Future[Any]]) -> None:
    for future in futures:
        future.result()


def _here(batch: list[bytes], adapter: ImageAdapter) -> None:
    for data in batch:
        prepare_image(ImagePart(data, ""), adapter, LIMITS, SEAL)


def _decode(batch: list[bytes]) -> None:
    for data in batch:
        decode_image(data, LIMITS)


def throughput(family: str, rounds: int, pictures: dict[str, int], console: Console) -> dict[str, Any]:
    samples: dict[str, dict[str, list[float]]] = {case: {} for case in CASES}
    with contestants(family) as runs:
        batches = {}
        for case, size in CASES.items():
            photos = photographs(size)
            batches[case] = [photos[i % len(photos)] for i in range(pictures[case])]
        for run in runs.values():
            run(batches["1080p"][:4])  # processes start, buffers are made
        for rank in range(rounds):
            for case, batch in batches.items():
                names = list(runs)
                for name in names[rank % len(names) :] + names[: rank % len(names)]:
                    begun_s = time.perf_counter()
                    runs[name](batch)
                    per_s = len(batch) / (time.perf_counter() - begun_s)
                    samples[case].setdefault(name, []).append(per_s)
            console.print(f"round {rank + 1} of {rounds}")
    return {
        case: {
            "pictures_per_s": {name: spread(of) for name, of in by_name.items()},
            "ratios": {
                f"{ours} / {hf}": spread([a / b for a, b in zip(by_name[ours], by_name[hf], strict=True)])
                for ours in ("ours x1", "ours x2", "ours+norm x1", "ours+norm x2")
                for hf in ("hf x1", "hf x2")
            },
            "samples": by_name,
        }
        for case, by_name in samples.items()
    }


def difference(family: str) -> dict[str, float]:
    """Between the reference's array and ours after normalising, over all photographs and sizes."""
    made, worst = FAMILIES[family], 0.0
    adapter, theirs = made.ours(), made.theirs()
    for size in CASES.values():
        for data in photographs(size):
            (ours,) = prepare_image(ImagePart(data, ""), adapter, LIMITS, SEAL)
            pixels = theirs(images=Image.open(io.BytesIO(data)), return_tensors="np")["pixel_values"][0]
            got = made.normalised(ours.pixels).transpose(2, 0, 1)
            worst = max(worst, float(np.abs(got - np.asarray(pixels)).max()))
    return {"greatest_after_normalising": worst}


def workers_themselves(rounds: int) -> dict[str, Any]:
    """Starting one and its size; a large array from one to here."""
    starts, sizes, moves = [], [], []
    for _ in range(rounds):
        workers = MediaWorkers(1, LIMITS)
        begun_s = time.perf_counter()
        _wait([workers.submit(prepare_image, ImagePart(photographs((64, 64))[0], ""), *_clip_args())])
        starts.append(time.perf_counter() - begun_s)
        status = Path(f"/proc/{workers.pids[0]}/status").read_text().splitlines()
        sizes.append(next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS")))
        for _ in range(3):
            begun_s = time.perf_counter()
            _wait([workers.submit(large_array, ImagePart(b"", ""))])
            moves.append(time.perf_counter() - begun_s)
        workers.close()
    return {"start_s": spread(starts), "rss_bytes": spread(sizes), f"array_of_{LARGE_BYTES}_bytes_s": spread(moves)}


def _clip_args() -> tuple[Any, ...]:
    return FAMILIES["clip-336"].ours(), LIMITS, SEAL


# ---- disturbance


def loop_lag(how: str, duration_s: float) -> dict[str, Any]:
    """How late an event loop of this process wakes, in seconds, while `how` prepares pictures."""
    photos = photographs(CASES["4096x4096"])
    args, stop, n_done = _clip_args(), threading.Event(), [0]
    workers = MediaWorkers(2, LIMITS) if how == "workers" else None

    def keep_busy() -> None:
        while not stop.is_set() and how != "nothing":
            part = ImagePart(photos[n_done[0] % len(photos)], "")
            _ = prepare_image(part, *args) if workers is None else workers.submit(prepare_image, part, *args).result()
            n_done[0] += 1

    async def watch() -> list[float]:
        lags, loop = [], asyncio.get_running_loop()
        await asyncio.sleep(1.0)
        end_s = loop.time() + duration_s
        while (before_s := loop.time()) < end_s:
            await asyncio.sleep(TICK_S)
            lags.append(loop.time() - before_s - TICK_S)
        return lags

    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(keep_busy) for _ in range(2)]
        lags = asyncio.run(watch())
        stop.set()
        _wait(futures)
    if workers is not None:
        workers.close()
    return {"lag_s": msgspec.to_builtins(Percentiles.of(lags)), "pictures_per_s": n_done[0] / (duration_s + 1.0)}


async def stream_beside(how: str, duration_s: float, flags: list[str]) -> dict[str, Any]:
    """Times between tokens of one stream, while two clients send pictures one after the other."""
    port = free_port()
    n_workers = "2" if how == "workers" else "0"
    command = [str(Path(sys.executable).with_name("hydrainfer")), "serve", "--port", str(port), *flags]
    command += ["--media-workers", n_workers, "--media-memory-mib", "0"]
    text = [{"role": "user", "content": "Tell me a long story."}]
    photos = [base64.b64encode(p).decode() for p in photographs(CASES["4096x4096"])]
    gaps: list[float] = []
    n_done = [0]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder, Server(how, command, port, Path(folder) / "log", env) as server:
        await server.wait_healthy(120)
        end_s = time.perf_counter() + duration_s
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def pictures() -> None:
                while time.perf_counter() < end_s and how != "nothing":
                    url = {"url": f"data:image/jpeg;base64,{photos[n_done[0] % len(photos)]}"}
                    content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "What is this?"}]
                    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
                    (await client.post("/v1/chat/completions", json=body)).raise_for_status()
                    n_done[0] += 1

            async def tokens() -> None:
                body = {"messages": text, "max_tokens": 400, "ignore_eos": True, "stream": True}
                while time.perf_counter() < end_s:
                    before_s = None
                    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                        async for line in answer.aiter_lines():
                            if line.startswith("data: {"):
                                now_s = time.perf_counter()
                                gaps.extend([now_s - before_s] if before_s else [])
                                before_s = now_s

            await asyncio.gather(tokens(), pictures(), pictures())
    return {"gap_s": msgspec.to_builtins(Percentiles.of(gaps)), "pictures_per_s": n_done[0] / duration_s}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="clip-336")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pictures", type=int, nargs=2, default=[48, 12], help="in a batch, per size")
    parser.add_argument("--disturb-s", type=float, default=15.0, help="length of each run of that; 0: none")
    parser.add_argument("--disturb-rounds", type=int, default=3)
    parser.add_argument("--serve-flags", default="", help="more options for the server that streams")
    args = parser.parse_args()
    console = new_console()
    results: dict[str, Any] = {"target_ratio": TARGET, "difference": difference(args.family)}
    results["throughput"] = throughput(args.family, args.rounds, dict(zip(CASES, args.pictures, strict=True)), console)
    results["workers"] = workers_themselves(args.rounds)
    results["disturbance"] = []
    for rank in range(args.disturb_rounds if args.disturb_s else 0):
        for how in ("nothing", "threads", "workers"):
            run = {"how": how, "round": rank, **loop_lag(how, args.disturb_s)}
            run["stream"] = asyncio.run(stream_beside(how, args.disturb_s, args.serve_flags.split()))
            results["disturbance"].append(run)
            lag, gap = run["lag_s"], run["stream"]["gap_s"]
            console.print(
                f"{how}: event loop late by p99 {lag['p99'] * 1e3:.1f} ms, between tokens p50 {gap['p50'] * 1e3:.1f}, "
                f"p99 {gap['p99'] * 1e3:.1f} ms"
            )
    show(results, console)
    path = write_result("b12_preprocess", __doc__, args, results)
    draw(path.with_suffix(".png"), results)
    console.print(f"wrote {path}", highlight=False)


def show(results: dict[str, Any], console: Console) -> None:
    table = new_table("pictures/s, median (least–greatest)", ("", *CASES))
    for what in ("pictures_per_s", "ratios"):
        for name in results["throughput"]["1080p"][what]:
            table.add_row(name, *(cell(results["throughput"][case][what][name]) for case in CASES))
        table.add_section()
    console.print(table)


def draw(path: Path, results: dict[str, Any]) -> None:
    panels = []
    for case, found in results["throughput"].items():
        names = ("hf x1", "hf x2", "ours x1", "ours x2", "ours+norm x2")
        panels.append(Panel(f"{case} JPEG, pictures/s", [case], {n: [found["samples"][n]] for n in names}))
    runs = results["disturbance"]
    if runs:
        hows = ("nothing", "threads", "workers")
        for title, value in (
            ("event loop late, p99, ms", lambda r: r["lag_s"]["p99"] * 1e3),
            ("between tokens, p99, ms", lambda r: r["stream"]["gap_s"]["p99"] * 1e3),
        ):
            panels.append(Panel(title, [""], {how: [[value(r) for r in runs if r["how"] == how]] for how in hows}))
    save_bars(path, "Preprocessing", panels)


if __name__ == "__main__":
    main()
