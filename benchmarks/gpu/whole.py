"""What does one way to split the work carry with 7B shapes, and what does a decode step cost the host?

`--make FOLDER` writes the checkpoint that step `whole` shares. Otherwise a batch of chats with a picture each is
answered on one device in one `--way`: by one EPD instance with an overlap mode, or by E, P and D in this process. The
first batch warms up.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image

from benchmarks.gpu.parts import WAYS
from benchmarks.gpu.shapes import INDEX, device_of, make_checkpoint
from benchmarks.record import write_result
from hydrainfer import LLM, SamplingParams
from hydrainfer.core import Lane
from hydrainfer.runtime.lane import LaneThread


def chats(n: int, size: int, seed: int) -> list[list[dict[str, Any]]]:
    draw = np.random.default_rng(seed)
    pictures = [Image.fromarray(draw.integers(0, 256, (size, size, 3), dtype=np.uint8)) for _ in range(n)]
    text = {"type": "text", "text": "What is in this picture?"}
    return [[{"role": "user", "content": [{"type": "image", "image": p}, text]}] for p in pictures]


class Steps:
    """Decode steps as a lane launches them. On a CPU a launch is the step."""

    def __init__(self) -> None:
        self.host_s: list[float] = []
        self.marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within it, every lane of this process is watched."""
        name = "_launch" if torch.cuda.is_available() else "_execute"
        launch = getattr(LaneThread, name)

        def timed(lane: LaneThread, item: Any, *stream: torch.cuda.Stream) -> None:
            if item.batch.lane is not Lane.LANGUAGE or not item.batch.decodes_only:
                return launch(lane, item, *stream)
            events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) if stream else ()
            for event in events[:1]:
                event.record(*stream)
            start_s = time.perf_counter()
            launch(lane, item, *stream)
            self.host_s.append(time.perf_counter() - start_s)
            for event in events[1:]:
                event.record(*stream)
            if stream:
                self.marks.append((events[0], events[1]))
            return None

        with mock.patch.object(LaneThread, name, timed):
            yield

    def summary(self) -> dict[str, float]:
        """Medians in milliseconds: of the lane's thread per step; on the device of a step, and of the time between two
        steps, in which nothing of this lane ran."""
        found = {"steps": float(len(self.host_s))}
        if self.host_s:
            found["host_ms"] = 1e3 * statistics.median(self.host_s)
        if len(self.marks) > 1:
            torch.cuda.synchronize()
            pairs = list(zip(self.marks, self.marks[1:]))
            found["device_ms"] = statistics.median(start.elapsed_time(end) for start, end in self.marks)
            found["gap_ms"] = statistics.median(before[1].elapsed_time(after[0]) for before, after in pairs)
        return found


def measure(model: Path, options: dict[str, Any], n: int, size: int, n_tokens: int) -> dict[str, Any]:
    sampling = SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)
    start_s = time.perf_counter()
    with LLM(str(model), **options) as llm:
        ready_s = time.perf_counter() - start_s
        llm.chat(chats(n, size, 0), sampling, use_tqdm=False)
        steps = Steps()
        with steps.watched():
            start_s = time.perf_counter()
            answers = llm.chat(chats(n, size, 1), sampling, use_tqdm=False)
            took_s = time.perf_counter() - start_s
        in_steps = steps.summary()
    produced = sum(len(a.outputs[0].token_ids) for a in answers)
    carried = {"seconds": took_s, "tokens_per_s": produced / took_s, "requests_per_s": n / took_s}
    peak = {"reserved_gib": torch.cuda.max_memory_reserved() / 2**30} if torch.cuda.is_available() else {}
    return {"ready_s": ready_s, **carried, "decode": in_steps, **peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--make", type=Path, help="write the checkpoint here, unless it is there")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.make is not None:
        if not (args.make / INDEX).exists():
            make_checkpoint(args.make, device_of(args.device))
        return
    dry = args.device == "cpu"
    n, size, n_tokens = (2, 56, 4) if dry else (64, 336, 64)
    common = {"device": args.device, **({"threads": 1} if dry else {"dtype": "bfloat16"})}
    results = measure(args.model, common | WAYS[args.way], n, size, n_tokens)
    settings = {"device": args.device, "way": args.way, "requests": n, "output_tokens": n_tokens}
    write_result("gpu.whole", __doc__, settings, results, args.out)
    print(f"{args.way}: {results}")


if __name__ == "__main__":
    main()
