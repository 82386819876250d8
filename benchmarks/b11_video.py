"""How much faster do several decoders get the frames of a video than one?

Videos made here (a photograph that drifts, H.264), 32 frames spread evenly over each, as a model samples them: PyAV and
decord, one decoder thread and several, in turns. Opening (checks and the table of frames) is measured apart: it happens
once per video, whatever decodes. The frames of every run are compared with those of the first.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import time
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image
from rich.console import Console

from benchmarks.command import new_console, options, say_noise
from benchmarks.figure import Panel, save_bars
from benchmarks.record import spread, write_result
from benchmarks.servers import CpuWatch
from hydrainfer.processor import VideoLimits, open_video

SIZES = {"360p": (640, 360), "720p": (1280, 720)}
LIMITS = VideoLimits(decode_s=300.0)


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--backends", nargs="+", choices=["pyav", "decord"], default=["pyav", "decord"])
    parser.add_argument("--decoders", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--frames", type=int, default=32, help="asked for, spread evenly")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each video, at 30 frames/s")
    parser.add_argument("--key-frames", type=int, default=90, help="frames from one key frame to the next, at most")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def make_video(size: tuple[int, int], seconds: float, key_frames: int) -> bytes:
    """H.264 in MP4, 30 frames/s: a part of a photograph that drifts, with a little noise."""
    from skimage import data

    width, height = size
    n = int(seconds * 30)
    photo = np.asarray(Image.fromarray(data.astronaut()).resize((width + 256, height + 256)))
    noise = np.random.default_rng(0).integers(0, 8, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=30, options={"preset": "veryfast", "g": str(key_frames)})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(n):
            x, y = (int(128 + 127 * f(i / 40)) for f in (np.sin, np.cos))
            image = np.minimum(photo[y : y + height, x : x + width], 247) + np.roll(noise, i * 17, 1)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def experiment(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for size in args.sizes:
        data = make_video(SIZES[size], args.seconds, args.key_frames)
        video = open_video(data, LIMITS)
        indices = np.linspace(0, video.facts.n_frames - 1, args.frames).astype(int).tolist()
        first = video.read(indices)
        facts[size] = {"bytes": len(data), **video.facts._asdict()}
        ways = [(b, n) for b in args.backends for n in args.decoders]
        for rank in range(-1, args.rounds):  # the first warms up
            for i in range(len(ways)):
                backend, n_decoders = ways[(i + rank) % len(ways)]
                watch = CpuWatch([])
                start_s = time.perf_counter()
                video = open_video(data, LIMITS, backend=backend)
                opened_s = time.perf_counter()
                frames = video.read(indices, n_decoders=n_decoders)
                read_s = time.perf_counter() - opened_s
                others = watch.stop().others
                assert np.array_equal(frames, first), f"{backend} with {n_decoders} decoders gives other frames"
                if rank >= 0:
                    run = {"size": size, "backend": backend, "decoders": n_decoders, "round": rank}
                    took = {"open_s": opened_s - start_s, "read_s": read_s, "frames_per_s": args.frames / read_s}
                    runs.append({**run, **took, "other_cores": others})
        console.print(f"{size}: done")
    return {"videos": facts, "summary": summary(runs), "runs": runs}


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per size, backend and number of decoders: frames/s, and the gain over one decoder within a round."""
    found = []
    keys = list(dict.fromkeys((r["size"], r["backend"], r["decoders"]) for r in runs))
    serial = {(r["size"], r["backend"], r["round"]): r["read_s"] for r in runs if r["decoders"] == 1}
    for size, backend, decoders in keys:
        of = [r for r in runs if (r["size"], r["backend"], r["decoders"]) == (size, backend, decoders)]
        gains = [serial[size, backend, r["round"]] / r["read_s"] for r in of if (size, backend, r["round"]) in serial]
        found.append(
            {
                "size": size,
                "backend": backend,
                "decoders": decoders,
                "frames_per_s": spread([r["frames_per_s"] for r in of]),
                "open_s": spread([r["open_s"] for r in of]),
                "gain": spread(gains),
                "other_cores": max(r["other_cores"] for r in of),
            }
        )
    return found


def figure(results: dict[str, Any], args: argparse.Namespace, path: Path) -> None:
    panels = []
    for size in args.sizes:
        series = {
            f"{n} decoder{'s' if n > 1 else ''}": [
                [
                    r["frames_per_s"]
                    for r in results["runs"]
                    if (r["size"], r["backend"], r["decoders"]) == (size, backend, n)
                ]
                for backend in args.backends
            ]
            for n in args.decoders
        }
        panels.append(Panel(f"{size}, frames/s", args.backends, series))
    save_bars(path, f"{args.frames} frames of a video", panels)


def main() -> None:
    args, console = arguments(), new_console()
    if "decord" in args.backends and importlib.util.find_spec("decord") is None:
        console.print("decord is not installed (the `video` extra): left out", style="red")
        args.backends.remove("decord")
    results = experiment(args, console)
    path = write_result("b11_video", __doc__, args, results)
    figure(results, args, path.with_suffix(".png"))
    for line in results["summary"]:
        rate, gain = line["frames_per_s"], line["gain"]
        gained = f", {gain['median']:.2f} x one decoder" if gain else ""
        console.print(
            f"{line['size']} {line['backend']:<6} {line['decoders']} decoders: {rate['median']:.1f} frames/s "
            f"({rate['min']:.1f}–{rate['max']:.1f}){gained}; open {line['open_s']['median'] * 1e3:.0f} ms"
        )
    noise = max(line["other_cores"] for line in results["summary"])
    say_noise(console, noise)
    console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
