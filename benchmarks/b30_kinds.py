"""What do windows, states and experts come to: time per token, and how soon a conversation's next turn begins?

Models of middling size with random weights, in float32 on all cores; what is compared takes turns, medians count.

- gemma3-bench (12 layers, 2 of which see all, windows of 512): a decode behind 16k tokens, and behind 2k, against the
  same model whose layers all see all.
- qwen3_5-bench (12 layers, 9 with states): a decode against transformers' `generate`.
- moe-bench (32 experts of which 4 are chosen): a decode of 1, 4 and 16 requests with one call for all experts of a
  layer, against one for each matrix; in bfloat16, too.
- Both first ones: six turns about a picture, with reuse and without; and the tokens that were computed again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from benchmarks.command import new_console, options
from benchmarks.record import spread, write_result
from benchmarks.stages import DTYPES, Stages
from hydrainfer import LLM, SamplingParams
from hydrainfer.ops import reference, select_ops
from tests.checkpoints import make_picture
from tests.checkpoints_gemma import make_gemma
from tests.checkpoints_qwen import make_qwen
from tests.checkpoints_text import make_text
from tests.parts import parts

CONTEXT = 32768
WIDTH = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "max_position_embeddings": CONTEXT}
GEMMA = WIDTH | {
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 12,
    "layer_types": [f"{'full' if i % 6 == 5 else 'sliding'}_attention" for i in range(12)],
    "sliding_window": 512,
}
QWEN = WIDTH | {
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 12,
    "layer_types": [f"{'full' if i % 4 == 3 else 'linear'}_attention" for i in range(12)],
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
QWEN_EYES = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "depth": 6, "out_hidden_size": 512}
EXPERTS: dict[str, Any] = WIDTH | {
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
    "mlp_only_layers": [],
}
MAKE: dict[str, Callable[[Path], Path]] = {
    "gemma3-bench": partial(make_gemma, text=GEMMA),
    "gemma3-bench-full": partial(make_gemma, text=GEMMA | {"sliding_window": CONTEXT}),
    "qwen3_5-bench": partial(make_qwen, "qwen3_5", text=QWEN, vision=QWEN_EYES, context=CONTEXT),
    "moe-bench": partial(make_text, kind="qwen3_moe", **EXPERTS),
}
N_TURNS, N_SHARED, N_ANSWER, N_ASKED = 6, 600, 16, 24


def model(args: argparse.Namespace, name: str) -> Path:
    path = args.models / name
    return path if (path / "config.json").exists() else MAKE[name](path)


def in_turns(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Any]:
    """Seconds of each, in turns, after a first round that does not count; and the medians in shares of the last's."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, run in runs.items():
            seconds = run()
            if i:
                found[name].append(seconds)
    base = statistics.median(list(found.values())[-1])
    return {n: {"seconds": spread(s), "share": statistics.median(s) / base} for n, s in found.items()}


def windows(args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for n in (2048, 16384):
        names = {"windows": "gemma3-bench", "all see all": "gemma3-bench-full"}
        stages = {k: Stages(model(args, name), "float32", 1, n, args.threads) for k, name in names.items()}
        found[f"decode behind {n}"] = in_turns({k: partial(s.decode, 1) for k, s in stages.items()}, args.rounds)
        for each in stages.values():
            each.close()
    return found


def states(args: argparse.Namespace) -> dict[str, Any]:
    import transformers

    path, n_new = model(args, "qwen3_5-bench"), 16
    torch.set_num_threads(args.threads)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.arange(300, 812)[None]

    def generate(n: int) -> float:
        start_s = time.perf_counter()
        theirs.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=torch.zeros_like(ids),
            do_sample=False,
            min_new_tokens=n,
            max_new_tokens=n,
        )
        return time.perf_counter() - start_s

    ours = Stages(path, "float32", 1, ids.shape[1], args.threads)
    runs = {
        "ours": lambda: statistics.median(ours.decode(1) for _ in range(n_new)),
        "transformers": lambda: (generate(1 + n_new) - generate(1)) / n_new,
    }
    with torch.inference_mode():
        found = in_turns(runs, args.rounds)
    ours.close()
    return {"decode": found}


def experts(args: argparse.Namespace) -> dict[str, Any]:
    found, path = {}, model(args, "moe-bench")
    for dtype in ("float32", "bfloat16"):
        ops = select_ops("cpu", DTYPES[dtype], 64, threads=args.threads)
        each = {"one call": ops, "each matrix": replace(ops, experts=reference.experts)}
        stages = {k: Stages(path, dtype, 16, 64, args.threads, ops=o) for k, o in each.items()}
        for n in (1, 4, 16):
            runs = {k: partial(s.decode, n) for k, s in stages.items()}
            found[f"{dtype}, {n} requests"] = in_turns(runs, 2 * args.rounds)
        for one in stages.values():
            one.close()
    return found


def converse(llm: LLM, seed: int) -> list[dict[str, float]]:
    """For each turn, seconds until a first token, prompt tokens, those found, and those that no turn had before."""
    images, stats = parts(llm).intake.processor.model.images, parts(llm).engine.stats
    assert images is not None
    draw = np.random.default_rng(seed)

    def words(n: int) -> list[int]:
        return draw.integers(300, 1500, n).tolist()

    shown = {"image": Image.fromarray(make_picture(seed, 320))}
    no_media = tuple((token, -100.0) for token in images.placeholders)  # an answer is a part of the next prompt
    asked = SamplingParams(temperature=0.0, max_tokens=N_ANSWER, ignore_eos=True, logit_bias=no_media)
    history, answered, turns = [*words(N_SHARED), images.token_id], 0, []
    for _ in range(N_TURNS):
        history += words(N_ASKED)
        prompt = {"prompt_token_ids": history, "multi_modal_data": shown}
        before, start_s = stats().tokens_found, time.perf_counter()
        (first,) = llm.generate([prompt], msgspec.structs.replace(asked, max_tokens=1), use_tqdm=False)
        took_s, n = time.perf_counter() - start_s, len(first.prompt_token_ids)
        found = stats().tokens_found - before
        turns.append({"ttft_s": took_s, "prompt_tokens": n, "found": found, "new": n - answered})
        (out,) = llm.generate([prompt], asked, use_tqdm=False)
        history += out.outputs[0].token_ids
        answered = n + N_ANSWER - 1  # the last token of an answer is not computed
    return turns


def reuse(args: argparse.Namespace, name: str) -> dict[str, Any]:
    path = model(args, name)
    found: dict[bool, list[list[dict[str, float]]]] = {True: [], False: []}
    options: dict[str, Any] = {"threads": args.threads, "max_model_len": 4096, "kv_cache_gib": 0.5}
    llms = {on: LLM(path, prefix_cache=on, **options) for on in found}
    for i in range(args.rounds + 1):
        for on, llm in llms.items():
            turns = converse(llm, i)
            if i:
                found[on].append(turns)
    for llm in llms.values():
        llm.close()
    ttft_s = {
        on: [statistics.median(r[t]["ttft_s"] for r in rounds) for t in range(N_TURNS)] for on, rounds in found.items()
    }
    again = [t["prompt_tokens"] - t["found"] - t["new"] for turns in found[True] for t in turns[1:]]
    return {
        "ttft_s": {"with reuse": ttft_s[True], "without": ttft_s[False]},
        "share": [a / b for a, b in zip(ttft_s[True], ttft_s[False])],
        "most_computed_again": max(again),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", type=Path, default=Path(".cache/models"), help="made if absent")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=["windows", "states", "experts", "reuse"])
    args = parser.parse_args()
    measure: dict[str, Callable[[], Any]] = {
        "windows": lambda: windows(args),
        "states": lambda: states(args),
        "experts": lambda: experts(args),
        "reuse": lambda: {name: reuse(args, name) for name in ("gemma3-bench", "qwen3_5-bench")},
    }
    console, results = new_console(), {}
    for name in args.only or measure:
        results[name] = measure[name]()
        console.print(name, results[name])
    print(f"wrote {write_result('b30_kinds', __doc__, args, results).name}")


if __name__ == "__main__":
    main()
