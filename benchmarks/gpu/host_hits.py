"""What does a long prefix cost that comes back from host memory, beside one in the device's cache and none?

A checkpoint with the shapes of a model of about 0.8 billion weights, drawn at random. Each round asks a new long prompt
(cold), the same with another end (the device has it), and, after others have taken its place on the device, the same
with a third end (host memory has it): once loaded layer by layer, once as a whole before the batch.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.record import write_result
from hydrainfer import LLM, SamplingParams
from hydrainfer.assemble import engine as assembly
from hydrainfer.cache import HOST
from hydrainfer.scheduler import Scheduler, Shift
from tests.checkpoints_text import make_text
from tests.parts import parts

SHAPES = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16384,
}
END = 64
SETTLE_S = 0.1
TOKENS = range(10, 250)
SHIFTED = Scheduler.shifted
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Asking:
    """Prompts put to an `LLM`, one at a time."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self._llm, self._draw = llm, random.Random(seed)

    def tokens(self, n: int) -> list[int]:
        return self._draw.choices(TOKENS, k=n)

    def ask(self, ids: list[int]) -> tuple[float, int, int]:
        """Seconds to the first token, the token, and how many tokens of the prompt were found."""
        before, start_s = parts(self._llm).engine.stats().tokens_found, time.perf_counter()
        (out,) = self._llm.generate([{"prompt_token_ids": ids}], ONE, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        return seconds, out.outputs[0].token_ids[0], parts(self._llm).engine.stats().tokens_found - before


def rounds(llm: LLM, n_prompt: int, n_others: int, n_rounds: int, seed: int) -> dict[str, list[float]]:
    asking = Asking(llm, seed)
    found: dict[str, list[float]] = {"cold": [], "device": [], "host": []}
    for i in range(n_rounds + 1):
        prompt = [1, *asking.tokens(n_prompt - 1)]
        ends = [asking.tokens(END) for _ in range(2)]
        cold_s, _, n_cold = asking.ask(prompt + ends[0])
        device_s, token, n_device = asking.ask(prompt + ends[1])
        for _ in range(n_others):
            time.sleep(SETTLE_S)  # what was published is copied down
            asking.ask([1, *asking.tokens(n_prompt - 1)])
        time.sleep(SETTLE_S)
        host_s, again, n_host = asking.ask(prompt + ends[1])
        assert again == token and n_cold < n_prompt / 2 and min(n_device, n_host) > n_prompt - 64, (n_cold, n_host)
        for name, seconds in zip(found, (cold_s, device_s, host_s)) if i else ():  # the first warms up
            found[name].append(1e3 * seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    dry = args.device == "cpu"
    shapes = {} if dry else SHAPES
    n_prompt, n_rounds = (400, 1) if dry else (4096, args.rounds)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_text(Path(folder) / "model", "llama", dtype="float32" if dry else "bfloat16", **shapes)
        block_bytes = (2 * 2 * 2 * 16 * 4 if dry else 16 * 2 * 8 * 128 * 2) * 16
        room = 2.5 * n_prompt / 16 * block_bytes / 2**30
        options = {"kv_cache_gib": room, "host_cache_gib": 8 * room, "max_model_len": n_prompt + 256, "threads": 1}
        by_layer = assembly._layer_loader
        for name in ("layers", "whole", "layers again", "whole again"):
            loader = (lambda *_: {}) if name.startswith("whole") else by_layer
            loads: list[float] = []

            def shifted(
                scheduler: Scheduler, shift: Shift, seconds: float | None, now: float, loads: list[float] = loads
            ) -> bool:
                loads.extend([1e3 * seconds] if shift.source == HOST and seconds is not None else [])
                return SHIFTED(scheduler, shift, seconds, now)

            with (
                mock.patch.object(assembly, "_layer_loader", loader),
                mock.patch.object(Scheduler, "shifted", shifted),
                LLM(str(model), device=args.device, dtype="float32" if dry else "bfloat16", **options) as llm,
            ):
                times = rounds(llm, n_prompt, 3, n_rounds, seed=1)
            results[name] = {kind: {"median_ms": statistics.median(ms), "ms": ms} for kind, ms in times.items()}
            results[name]["load"] = {"median_ms": statistics.median(loads), "ms": loads}
            print(
                name,
                "load",
                round(statistics.median(loads), 2),
                {kind: round(statistics.median(ms), 2) for kind, ms in times.items()},
            )
    settings = {"device": args.device, "tokens": n_prompt, "bytes_per_token": block_bytes // 16, **shapes}
    write_result("gpu.host_hits", __doc__, settings, results, args.out)


if __name__ == "__main__":
    main()
