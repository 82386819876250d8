"""Does landing in host memory gain in real processes what it gains in the simulator?

The bursts of `b26_landing` at 1EP1D (no pictures, so 1P1D), each instance a process of its own behind one server
(`--launcher ray --device emulated`), with and without `--host-cache-gib`, in turns. The device is `--slow` times slower
and the bursts as much farther apart, so that server and client have time beside it. The simulator then serves the same
requests at the times at which they were sent. Told, in seconds of that device: what `b26_landing` tells. It takes
11 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import orjson
from rich.console import Console

from benchmarks.b18_order_real import FIRST_ID, N_WORDS, small_model
from benchmarks.b26_landing import BUDGETS, CASES, SHOWN, figures, read_cost, room_for, simulate, stalled_s, trace
from benchmarks.command import new_console, new_table, options
from benchmarks.record import write_result
from benchmarks.runs import make_model, shown, start
from hydrainfer.cache import CacheSpec
from hydrainfer.core import CostModel, EventKind, LifecycleEvent, Role, Stage
from hydrainfer.families import read_config
from hydrainfer.models import cache_specs
from hydrainfer.planner.nouns import Link, TraceRequest

QUESTION = (__doc__ or "").partition("\n")[0]
HEADROOM = CASES["bursts"][1]


class Answer(NamedTuple):
    """One request as its client saw it. `timings`: where its time went, as the server says."""

    request: TraceRequest
    arrival_s: float
    token_s: list[float]
    timings: dict[str, float]


def slowed(cost: CostModel, by: float) -> CostModel:
    terms = {k: v * by for k, v in msgspec.to_builtins(cost).items() if k.endswith("_s")}
    return msgspec.structs.replace(cost, **terms)


def drawn(args: argparse.Namespace, seed: int) -> list[TraceRequest]:
    """The bursts, `args.slow` times as far apart."""
    requests = trace("bursts", args.bursts, seed)
    return [msgspec.structs.replace(r, arrival_s=args.slow * r.arrival_s) for r in requests]


async def ask(port: int, request: TraceRequest, ids: list[int], start_s: float) -> Answer:
    """Streams one completion. Raises if it is not answered in full."""
    body = {"model": "model", "prompt": ids, "max_tokens": request.n_output, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "timings": True, "return_token_ids": True}
    content = orjson.dumps(body)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent_s = time.perf_counter()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    token_s: list[float] = []
    usage: dict[str, Any] = {}
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            chunk = orjson.loads(line[6:])
            n_tokens = sum(len(choice.get("token_ids") or ()) for choice in chunk.get("choices", ()))
            token_s += [time.perf_counter() - start_s] * n_tokens
            usage = chunk.get("usage") or usage
    writer.close()
    if len(token_s) != request.n_output or not usage.get("hydrainfer"):
        raise RuntimeError(f"{len(token_s)} of {request.n_output} tokens came: {usage}")
    return Answer(request, sent_s - start_s, token_s, usage["hydrainfer"])


async def send(port: int, trace: list[TraceRequest], seed: int) -> list[Answer]:
    rng, tasks = random.Random(seed), []
    prompts = [[rng.randrange(FIRST_ID, FIRST_ID + N_WORDS) for _ in range(r.n_text)] for r in trace]
    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for request, ids in zip(trace, prompts, strict=True):
            await asyncio.sleep(max(0.0, start_s + request.arrival_s - time.perf_counter()))
            tasks.append(group.create_task(ask(port, request, ids, start_s)))
    return [task.result() for task in tasks]


def measured(answers: list[Answer]) -> dict[str, Any]:
    """As `b26_landing.figures`; prefill waits and goes on as the server's timings say."""
    served = [(a.arrival_s, a.token_s) for a in answers]
    events = list[LifecycleEvent]()
    for i, a in enumerate(answers):
        begin_s = a.arrival_s + a.timings["prefill_queue_s"]
        times = (a.arrival_s, begin_s, begin_s + a.timings["prefill_s"])
        kinds = (EventKind.QUEUED, EventKind.STARTED, EventKind.ENDED)
        events += [LifecycleEvent(str(i), kind, at_s, Stage.PREFILL) for kind, at_s in zip(kinds, times, strict=True)]
    preemptions = sum(a.timings["n_preemptions"] for a in answers)
    end_s = max(a.token_s[-1] for a in answers)
    return figures(served, [{"stalled_s": stalled_s(events), "preemptions": preemptions, "end_s": end_s}])


def simulated(answers: list[Answer], spec: CacheSpec, cost: CostModel, landing: bool) -> dict[str, Any]:
    """The same requests as the simulator has it."""
    requests = [msgspec.structs.replace(a.request, arrival_s=a.arrival_s) for a in answers]
    served, seen = simulate("bursts", landing, requests, cost, spec, Link())
    return figures([(r.arrival_s, r.token_s) for r in served], [seen])


async def experiment(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    cost = slowed(read_cost(), args.slow)
    rounds: list[dict[str, Any]] = []
    commands: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(args.model, Path(folder) / "model")
        config = read_config(model)
        (spec,) = (s for s in cache_specs(config, Role.parse("D"), config.dtype, 16) if Stage.DECODE in s.stages)
        room, host = room_for(spec, "bursts")
        file = Path(folder) / "cost.yaml"
        file.write_bytes(msgspec.yaml.encode({k: v for k, v in msgspec.to_builtins(cost).items() if v}))
        words = [str(model), "--served-model-name", "model", "--device", "emulated", "--cost-model", str(file)]
        words += ["--layout", "1EP1D", "--launcher", "ray", "--dtype", str(config.dtype).removeprefix("torch.")]
        words += ["--token-budget", str(BUDGETS.tokens), "--max-running", str(BUDGETS.running)]
        words += ["--headroom-tokens", str(HEADROOM), "--max-queue-s", "1000", "--no-prefix-cache"]
        words += ["--kv-cache-gib", str(room * spec.block_bytes / 2**30)]
        for rank in range(args.rounds):
            found: dict[str, Any] = {}
            for name in ("none", "landing"):
                more = ["--host-cache-gib", str(host * spec.block_bytes / 2**30)] if name == "landing" else []
                with start(name, words + more, Path(folder) / f"{name}-{rank}", console) as server:
                    await server.wait_healthy(300.0)
                    port = urlsplit(server.url).port or 80
                    await send(port, [TraceRequest(arrival_s=0.0, n_text=800, n_output=128)] * 2, 0)
                    answers = await send(port, drawn(args, args.seed + rank), args.seed + rank)
                    server.check_alive()
                twin = simulated(answers, spec, cost, name == "landing")
                found[name] = {"measured": measured(answers), "simulated": twin}
                commands[name] = shown(server.command).replace(folder, "FOLDER")
            table = new_table(QUESTION, ("", *SHOWN))
            for name, row in found.items():
                for how, told in row.items():
                    table.add_row(f"{name}, {how}", *(f"{of(told):.2f}" for of in SHOWN.values()))
            console.print(table)
            rounds.append(found)
    return {"blocks": {"cache": room, "landing": host}, "commands": commands, "rounds": rounds}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/llava-small"), help="made if absent")
    parser.add_argument("--bursts", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--slow", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    make_model(args.model)
    results = asyncio.run(experiment(args, new_console()))
    print(f"wrote {write_result('b26_landing_real', __doc__, args, results)}")


if __name__ == "__main__":
    main()
