"""What rates does this device reach, what is installed, and does attention at a new shape wait for a plan?

Copies within the device, from and to pinned memory; large matrix products; masked attention at six shapes that were not
seen before, with cuDNN allowed and not: the first call of each, and the next.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.floors import fastest_s, measure_rates, waits_for
from benchmarks.gpu.shapes import device_of
from benchmarks.record import write_result
from hydrainfer.machine import versions
from hydrainfer.ops import select_ops

GIB = 1 << 30
PACKAGES = ("torch", "flashinfer-python", "apache-tvm-ffi", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "ray", "triton")


def copies(device: torch.device, n_bytes: int) -> dict[str, float]:
    """Bytes per second; within the device each byte is read and written, and counts once."""
    wait = waits_for(device)
    on_cuda = device.type == "cuda"
    a, b = (torch.ones(n_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.ones(n_bytes, dtype=torch.uint8, pin_memory=on_cuda)
    ways = {"within": (a, b), "from_host": (a, host), "to_host": (host, a)}

    def one(to: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        return lambda: (to.copy_(source, non_blocking=True), wait())

    return {name: n_bytes / fastest_s(one(*pair), 5) for name, pair in ways.items()}


def new_shapes(device: torch.device, dtype: torch.dtype, base: int) -> dict[str, list[list[float]]]:
    """[first, next] seconds of masked attention with each of six lengths of context, with cuDNN allowed and not."""
    wait, found = waits_for(device), {}
    for rank, allowed in enumerate((False, True)):
        torch.backends.cuda.enable_cudnn_sdp(allowed)
        times = []
        for i in range(6):
            length = base + 16 * (6 * rank + i)  # as a decode grows
            q = torch.rand(4, 32, 1, 128, device=device, dtype=dtype)
            k = torch.rand(4, 32, length, 128, device=device, dtype=dtype)
            mask = torch.ones(4, 1, 1, length, device=device, dtype=torch.bool)
            took = []
            for _ in range(2):
                wait()
                start_s = time.perf_counter()
                F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
                wait()
                took.append(time.perf_counter() - start_s)
            times.append(took)
        found["cudnn" if allowed else "without"] = times
    torch.backends.cuda.enable_cudnn_sdp(False)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = device_of(args.device)
    dry = args.device == "cpu"
    dtype = torch.float32 if dry else torch.bfloat16
    results: dict[str, Any] = {"versions": versions(PACKAGES), "torch_cuda": torch.version.cuda}

    def keep(name: str, found: Any) -> None:
        results[name] = found
        print(name, found, flush=True)
        settings = {"device": args.device}
        write_result("gpu.truth", __doc__, settings, results, args.out)

    with torch.inference_mode():
        keep("rates", measure_rates(device=device, dtype=dtype, tiny=dry)._asdict())
        keep("copies", copies(device, (1 << 20) if dry else GIB))
        ops = select_ops(device, dtype, 128)
        keep("operators", {"chosen": dict(ops.chosen), "notes": list(ops.notes)})
        keep("new_shapes", new_shapes(device, dtype, 64 if dry else 1024))


if __name__ == "__main__":
    main()
