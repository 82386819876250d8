"""How much sooner does the next turn of a chat with a picture begin because its beginning is not computed again?

Servers with and without `--no-prefix-cache`, asked in turns at concurrency 1: six turns about one picture, each with
the answers before it. Times to the first token are the client's; cached tokens are what `usage` says.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.record import write_result
from benchmarks.runs import make_model
from hydrainfer.config import load
from hydrainfer.serving import serve_in_background
from hydrainfer.workload.sources import BodyOptions, distinct_chats

QUESTION = __doc__.splitlines()[0]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/llava-small"), help="made if absent")
    parser.add_argument("--layouts", nargs="+", default=["1EPD", "1EP1D", "1E1P1D"])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def converse(client: httpx.Client, url: str, body: dict[str, Any], n_turns: int) -> list[dict[str, float]]:
    """One conversation: for each turn, seconds to the first token, prompt tokens and those of them found."""
    said = []
    for _ in range(n_turns):
        answer, first_s, usage, start_s = "", None, {}, time.perf_counter()
        with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = orjson.loads(line[6:])
                usage = chunk.get("usage") or usage
                text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                answer += text
                first_s = first_s or (time.perf_counter() - start_s if text else None)
        assert first_s is not None, "an answer without text"
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        said.append({"ttft_s": first_s, "prompt_tokens": usage["prompt_tokens"], "cached_tokens": cached})
        turn = [{"role": "assistant", "content": answer}, {"role": "user", "content": "And what else is in it?"}]
        body = {**body, "messages": [*body["messages"], *turn]}
    return said


def main() -> None:
    args = arguments()
    make_model(args.model)
    console, results = Console(), {}
    options = BodyOptions(include_usage=True, ignore_eos=True, temperature=0.0)
    chats = distinct_chats(args.rounds + 1, seed=1, max_tokens=args.max_tokens)
    shown = Table(title="TTFT of each turn, ms, median of rounds")
    for column in ("layout", "reuse", *(str(i + 1) for i in range(args.turns))):
        shown.add_column(column, justify="right")
    for layout in args.layouts:
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(httpx.Client(timeout=300))
            servers = {}
            for reuse in (True, False):
                flags = {"model": str(args.model), "layout": layout, "launcher": "inproc", "port": 0}
                loaded = load({**flags, "prefix_cache": reuse})
                servers[reuse] = stack.enter_context(serve_in_background(loaded, Console(quiet=True)))
            rounds: dict[bool, list[list[dict[str, float]]]] = {True: [], False: []}
            for i, chat in enumerate(chats):
                for reuse, (url, instance) in servers.items():
                    body = orjson.loads(options.body(chat, instance.name))
                    found = converse(client, url, body, args.turns)
                    if i:  # the first one warms up
                        rounds[reuse].append(found)
            for reuse, found in rounds.items():
                ttft_s = [statistics.median(one[t]["ttft_s"] for one in found) for t in range(args.turns)]
                shown.add_row(layout, "on" if reuse else "off", *(f"{t * 1e3:.0f}" for t in ttft_s))
                key = f"{layout} {'on' if reuse else 'off'}"
                results[key] = {"ttft_s": ttft_s, "rounds": found}
    console.print(shown)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    print(f"wrote {write_result('b20_prefix', QUESTION, settings, results, args.out)}")


if __name__ == "__main__":
    main()
