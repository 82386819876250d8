"""What do the overlap modes and a split into three instances carry with 7B shapes in one process?

`--make FOLDER` writes the checkpoint that step 4's experiments share. Otherwise a batch of chats with a picture each is
answered by one EPD instance per overlap mode and by 1E1P1D, in process on one device; the first batch warms up.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.gpu.shapes import device_of, make_checkpoint
from benchmarks.record import write_result
from hydrainfer import LLM, SamplingParams

WAYS: dict[str, dict[str, Any]] = {
    "off": {"overlap": "off"},
    "step": {"overlap": "step"},
    "free": {"overlap": "free"},
    "1E1P1D": {"layout": "1E1P1D", "launcher": "inproc"},
}


def chats(n: int, size: int, seed: int) -> list[list[dict[str, Any]]]:
    draw = np.random.default_rng(seed)
    pictures = [Image.fromarray(draw.integers(0, 256, (size, size, 3), dtype=np.uint8)) for _ in range(n)]
    text = {"type": "text", "text": "What is in this picture?"}
    return [[{"role": "user", "content": [{"type": "image", "image": p}, text]}] for p in pictures]


def measure(model: Path, options: dict[str, Any], n: int, size: int, n_tokens: int) -> dict[str, float]:
    sampling = SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)
    start_s = time.perf_counter()
    with LLM(str(model), **options) as llm:
        ready_s = time.perf_counter() - start_s
        for seed in range(2):
            start_s = time.perf_counter()
            answers = llm.chat(chats(n, size, seed), sampling, use_tqdm=False)
            took_s = time.perf_counter() - start_s
    produced = sum(len(a.outputs[0].token_ids) for a in answers)
    return {"ready_s": ready_s, "seconds": took_s, "tokens_per_s": produced / took_s, "requests_per_s": n / took_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--make", type=Path, help="write the checkpoint here, unless it is there")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.make is not None:
        if not (args.make / "model.safetensors").exists():
            make_checkpoint(args.make, device_of(args.device))
        return
    dry, results = args.device == "cpu", dict[str, Any]()
    n, size, n_tokens = (2, 56, 4) if dry else (64, 336, 64)
    common = {"device": args.device, **({"threads": 1} if dry else {"dtype": "bfloat16"})}
    for name, options in WAYS.items():
        results[name] = measure(args.model, common | options, n, size, n_tokens)
        print(name, results[name], flush=True)
        settings = {"device": args.device, "requests": n, "output_tokens": n_tokens}
        write_result("gpu.whole", __doc__, settings, results, args.out)


if __name__ == "__main__":
    main()
