"""How much sooner does the next turn of a chat with a picture begin because its beginning is not computed again?

Servers with and without `--no-prefix-cache`, asked in turns at concurrency 1: six turns about one picture, each with
the answers before it. Times to the first token are the client's; cached tokens are what `usage` says. Then, with reuse,
one choice and eight of a new picture prompt, one token each: the prompt tokens computed, and the time; and with and
without it in turns, requests that have nothing in common, four at a time: what reuse costs those who gain nothing by
it. At last the bookkeeping alone: keys of a prompt, and looking them up, in a cache of all tokens and in three kinds at
once (LFM3's: all tokens, windows, states).
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson
from rich.console import Console

from benchmarks.command import new_console, new_table, options
from benchmarks.figure import Panel, save_bars
from benchmarks.record import write_result
from benchmarks.runs import make_model
from hydrainfer.cache import CacheSet, CacheSpec, FullSpec, StateLayout, specs_of
from hydrainfer.config import load
from hydrainfer.core import LiveSequence, Request, Role, SamplingParams, Stage, chain_of, chain_root
from hydrainfer.scheduler.room import SequenceRoom
from hydrainfer.serving import serve_in_background
from hydrainfer.workload.sources import BodyOptions, distinct_chats

CHOICES = 8
AT_ONCE = 4  # requests that have nothing in common
SETTLED_S = 0.5  # an instance reports what it counts every quarter of a second


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/llava-small"), help="made if absent")
    parser.add_argument("--layouts", nargs="+", default=["1EPD", "1EP1D", "1E1P1D"])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--distinct", type=int, default=12, help="requests with nothing in common, per round")
    return parser.parse_args()


def converse(client: httpx.Client, url: str, body: dict[str, Any], n_turns: int) -> list[dict[str, float]]:
    """One conversation: for each turn, seconds to the first token, prompt tokens and those of them found."""
    said = []
    for _ in range(n_turns):
        usage: dict[str, Any] = {}
        answer, first_s, start_s = "", None, time.perf_counter()
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


def prefilled(client: httpx.Client, url: str) -> float:
    """Prompt tokens that all instances have computed so far."""
    lines = client.get(f"{url}/metrics").raise_for_status().text.splitlines()

    def total(name: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"hydrainfer:{name}"))

    elsewhere = total("prefix_cache_pulled_total") + total("external_prefix_cache_hits_total")
    return total("prefix_cache_queries_total") - total("prefix_cache_hits_total") - elsewhere


def choose(client: httpx.Client, url: str, body: dict[str, Any], n: int) -> tuple[float, float]:
    """Seconds until `n` choices of one token are there, and the prompt tokens computed for them."""
    body = {**body, "n": n, "max_tokens": 1, "stream": False}
    del body["stream_options"]
    n_before = prefilled(client, url)
    start_s = time.perf_counter()
    answer = client.post(f"{url}/v1/chat/completions", json=body).raise_for_status().json()
    taken_s = time.perf_counter() - start_s
    assert len(answer["choices"]) == n
    time.sleep(SETTLED_S)
    return taken_s, prefilled(client, url) - n_before


def serve_all(client: httpx.Client, url: str, bodies: list[dict[str, Any]]) -> float:
    """Seconds until all of `bodies` are answered, `AT_ONCE` at a time."""
    start_s = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for response in pool.map(lambda body: client.post(f"{url}/v1/chat/completions", json=body), bodies):
            response.raise_for_status()
    return time.perf_counter() - start_s


FULL = FullSpec.of(layers=1, kv_heads=1, head_dim=1, dtype="float32")
KINDS = {  # tiny blocks, of which only the numbers matter
    "bookkeeping": (FULL,),
    "bookkeeping, three kinds": specs_of(
        Role.parse("PD"),
        windows=(0, 256, 0),
        kv_heads=1,
        local_kv_heads=1,
        head_dim=1,
        value_dim=1,
        embed_width=None,
        dtype="float32",
        state=StateLayout((2,), (6, 1)),
    ),
}


def bookkeeping(specs: Sequence[CacheSpec], n_tokens: int = 4096, n_times: int = 200) -> dict[str, float]:
    """Median seconds for the keys of a prompt that is computed, and for the first and the next look-up of it."""
    room = SequenceRoom(CacheSet(dict.fromkeys(specs, 2 * n_tokens // FULL.block_tokens)), 0)
    ids = tuple(range(n_tokens + 1))
    visit = (Stage.PREFILL, Stage.DECODE)
    taken: dict[str, list[float]] = {"keys_s": [], "look_up_s": [], "next_look_up_s": []}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start_s = time.perf_counter()
        result = call()
        taken[name].append(time.perf_counter() - start_s)
        return result

    for i in range(n_times + 1):
        keys = timed("keys_s", lambda: chain_of(chain_root(b""), ids, FULL.block_tokens))
        request = Request(id=f"r{i}", prompt_ids=ids, sampling=SamplingParams(), max_tokens=9, seed=0, keys=keys)
        seq = LiveSequence(request, (0.0, 0), 0.0)
        hit = timed("look_up_s", partial(room.finder.match, seq, visit))
        timed("next_look_up_s", partial(room.finder.match, seq, visit))
        assert hit.n_tokens == (n_tokens if i else 0)
        assert room.reserve(seq, hit, visit)
        while seq.n_computed < n_tokens:  # in chunks, where a window holds no more
            seq.n_computed = min(n_tokens, seq.hold.capacity)
            room.settle(seq)
        room.release(seq)
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}


def figure(results: dict[str, Any], layouts: list[str], path: Path) -> None:
    panels = []
    for layout in layouts:
        rounds = {name: results[f"{layout} {key}"]["rounds"] for name, key in (("reuse", "on"), ("none", "off"))}
        turns = range(len(next(iter(rounds.values()))[0]))
        series = {name: [[one[t]["ttft_s"] * 1e3 for one in found] for t in turns] for name, found in rounds.items()}
        panels.append(Panel(f"{layout}: TTFT by turn, ms", [str(t + 1) for t in turns], series))
    save_bars(path, "Six turns about one picture", panels)


def main() -> None:
    args = arguments()
    make_model(args.model)
    console = new_console()
    results: dict[str, Any] = {}
    options = BodyOptions(include_usage=True, ignore_eos=True, temperature=0.0)
    chats = distinct_chats(args.rounds + 1, seed=1, max_tokens=args.max_tokens)
    shown = new_table(
        "TTFT of each turn, ms, median of rounds", ("layout", "reuse", *(str(i + 1) for i in range(args.turns)))
    )
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
            for reuse, kept in rounds.items():
                ttft_s = [statistics.median(one[t]["ttft_s"] for one in kept) for t in range(args.turns)]
                shown.add_row(layout, "on" if reuse else "off", *(f"{t * 1e3:.0f}" for t in ttft_s))
                key = f"{layout} {'on' if reuse else 'off'}"
                results[key] = {"ttft_s": ttft_s, "rounds": kept}
            on, off = (results[f"{layout} {key}"]["ttft_s"] for key in ("on", "off"))
            results[f"{layout} later turns"] = max(a / b for a, b in zip(on[1:], off[1:]))
            url, instance = servers[True]
            fresh = [orjson.loads(options.body(c, instance.name)) for c in distinct_chats(2 * args.rounds, seed=2)]
            runs = {n: [choose(client, url, body, n) for body in fresh[i::2]] for i, n in enumerate((1, CHOICES))}
            one, many = ([statistics.median(run[k] for run in runs[n]) for k in (0, 1)] for n in runs)
            ratios = {"seconds": many[0] / one[0], "prefilled": many[1] / one[1]}
            results[f"{layout} choices"] = {"runs": {str(n): found for n, found in runs.items()}, **ratios}
            drawn = iter(distinct_chats(2 * args.rounds * args.distinct, seed=3, max_tokens=args.max_tokens))
            taken: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(args.rounds):
                for reuse, (url, instance) in servers.items():
                    bodies = [orjson.loads(options.body(next(drawn), instance.name)) for _ in range(args.distinct)]
                    taken[reuse].append(serve_all(client, url, bodies))
            alike = statistics.median(off / on for on, off in zip(taken[True], taken[False]))
            results[f"{layout} nothing in common"] = {"on_s": taken[True], "off_s": taken[False], "throughput": alike}
            console.print(f"{layout}: {alike:.3f} of the throughput without reuse, of requests with nothing in common")
            console.print(
                f"{layout}: later turns at most {results[f'{layout} later turns']:.2f} of the TTFT without reuse; "
                f"{CHOICES} choices: {ratios['prefilled']:.2f} of one's prefill, {ratios['seconds']:.2f} of its time"
            )
    console.print(shown)
    for kind, specs in KINDS.items():
        results[kind] = bookkeeping(specs)
        console.print(kind, {name: f"{seconds * 1e6:.1f} µs" for name, seconds in results[kind].items()})
    path = write_result("b20_prefix", __doc__, args, results)
    figure(results, args.layouts, path.with_suffix(".png"))
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
