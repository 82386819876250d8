"""Does going by rank gain in real processes what it gains in the simulator?

The agentic mix of `b18_order` at 0.85 of the capacity of four instances, each a process of its own behind one server
(`--launcher ray --device emulated`). Every length is divided by `--scale` and the device is slower by as much, so that
times are those of `b18_order`. The simulator then serves the same requests at the times at which they were sent. Told:
TTFT by kind, measured and simulated, first come, first served and by rank. It takes 17 minutes: the queues that make
the difference take some hundred requests to form, and whether they do differs much from seed to seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import orjson
from rich.console import Console

from benchmarks.b18_order import CHUNK, KV, LARGE, N_INSTANCES, prompts
from benchmarks.b19_overload import Exchange
from benchmarks.command import new_console, options
from benchmarks.record import write_result
from benchmarks.runs import make_model, shown, start
from hydrainfer.core import CostModel, Role
from hydrainfer.planner.nouns import TraceRequest
from hydrainfer.planner.simulation import InstanceModel, Simulator, as_requests
from hydrainfer.scheduler import STEP_S, Budgets, Policy
from hydrainfer.workload.results import Percentiles

N_WORDS, FIRST_ID = 20_000, 1000  # token ids of prompts
CONTEXT = 32_768
WARMUP = 16  # requests


class Asked(NamedTuple):
    """A request of the mix: its tokens, its kind, when it was sent, when its token came."""

    n_tokens: int
    kind: str
    sent_s: float
    ttft_s: float


def scaled(cost: CostModel, scale: float) -> CostModel:
    """A device on which a prompt that is `scale` times as short takes as long."""
    return msgspec.structs.replace(
        cost,
        prefill_token_s=cost.prefill_token_s * scale,
        prefill_attention_s=cost.prefill_attention_s * scale**2,
    )


def small_model(model: Path, folder: Path) -> Path:
    """The same checkpoint with two layers and a long context: nobody computes with it."""
    folder.mkdir()
    for file in model.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    config["text_config"] |= {"num_hidden_layers": 2, "max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


async def send(port: int, mix: list[tuple[TraceRequest, str]], seed: int) -> list[Asked]:
    """Each request at its time; the whole answer is its first token. Raises if one fails."""
    rng, loop, asked = random.Random(seed), asyncio.get_running_loop(), []
    bodies = []
    for request, _ in mix:
        ids = [rng.randrange(FIRST_ID, FIRST_ID + N_WORDS) for _ in range(request.n_text)]
        fields = {"model": "model", "prompt": ids, "max_tokens": 1, "ignore_eos": True}
        body = orjson.dumps(fields)
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        bodies.append(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    async def one(request: TraceRequest, kind: str, message: bytes) -> None:
        transport, exchange = await loop.create_connection(Exchange, "127.0.0.1", port)
        sent_s = time.perf_counter()
        status, _ = await exchange.ask(message)
        transport.close()
        if status != 200:
            raise RuntimeError(f"a request of {request.n_text} tokens was answered with {status}")
        asked.append(Asked(request.n_text, kind, sent_s - start_s, time.perf_counter() - sent_s))

    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for (request, kind), message in zip(mix, bodies, strict=True):
            await asyncio.sleep(max(0.0, start_s + request.arrival_s - time.perf_counter()))
            tasks.create_task(one(request, kind, message))
    return sorted(asked, key=lambda a: a.sent_s)


def simulated(asked: list[Asked], cost: CostModel, order: str, chunk: int) -> list[Asked]:
    """The same as the simulator has it."""
    budgets, policy = Budgets(tokens=chunk, running=256, step_s=STEP_S), Policy(order=order)  # type: ignore[arg-type]
    role = Role.parse("EPD")
    instances = [
        InstanceModel(name=f"EPD{i}", role=role, cost=cost, blocks={KV: 200_000}, budgets=budgets, policy=policy)
        for i in range(N_INSTANCES)
    ]
    trace = [TraceRequest(arrival_s=a.sent_s, n_text=a.n_tokens, n_output=1) for a in asked]
    served = Simulator(instances).run(as_requests(trace))
    return [a._replace(ttft_s=s.token_s[0] - s.arrival_s) for a, s in zip(asked, served, strict=True)]


def by_kind(asked: list[Asked]) -> dict[str, Any]:
    """Without the first tenth. `long`: sessions and large prompts."""
    kept = asked[len(asked) // 10 :]
    kinds = {"all": kept, "short": [a for a in kept if a.kind == "small"]}
    kinds["long"] = [a for a in kept if a.kind != "small"]
    return {kind: msgspec.to_builtins(Percentiles.of(a.ttft_s for a in some)) for kind, some in kinds.items()}


async def experiment(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    cost, chunk = scaled(LARGE, args.scale), round(CHUNK / args.scale)
    results: dict[str, Any] = {"cost": msgspec.to_builtins(cost), "orders": {}}
    drawn = [
        (msgspec.structs.replace(r, n_text=max(1, round(r.n_text / args.scale))), kind)
        for r, kind in prompts("agentic", args.requests, args.seed)
    ]
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(args.model, Path(folder) / "model")
        file = Path(folder) / "cost.yaml"
        terms = {k: v for k, v in msgspec.to_builtins(cost).items() if v or k == "encode_image_s"}
        file.write_bytes(msgspec.yaml.encode(terms))
        for order in ("fcfs", "rank"):
            words = [str(model), "--served-model-name", "model", "--device", "emulated", "--cost-model", str(file)]
            words += ["--layout", f"{N_INSTANCES}EPD", "--launcher", "ray", "--order", order]
            words += ["--token-budget", str(chunk), "--max-running", "256", "--max-queue-s", "1000"]
            words += ["--kv-cache-gib", str(args.kv_cache_gib), "--image-cache-gib", "0.05"]
            with start(order, words, Path(folder) / f"server-{order}", console) as server:
                await server.wait_healthy(300.0)
                port = urlsplit(server.url).port or 80
                await send(port, [(msgspec.structs.replace(r, arrival_s=0.0), k) for r, k in drawn[:WARMUP]], 0)
                asked = await send(port, drawn, args.seed)
                server.check_alive()
            row = {"measured": by_kind(asked), "simulated": by_kind(simulated(asked, cost, order, chunk))}
            results["orders"][order] = row | {"command": shown(server.command).replace(folder, "FOLDER")}
            for kind, real in row["measured"].items():
                said = row["simulated"][kind]
                parts = [f"{q} {real[q]:.2f} s, simulated {said[q]:.2f}" for q in ("p50", "p90")]
                console.print(f"{order:<5} {kind:<6} {'; '.join(parts)} ({said['p90'] / real['p90'] - 1.0:+.1%})")
    results["rank_over_fcfs_p90"] = {
        kind: {
            how: results["orders"]["rank"][how][kind]["p90"] / results["orders"]["fcfs"][how][kind]["p90"]
            for how in ("measured", "simulated")
        }
        for kind in ("all", "short", "long")
    }
    console.print(results["rank_over_fcfs_p90"])
    return results


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/llava-small"), help="made if absent")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--scale", type=float, default=8.0)
    parser.add_argument("--kv-cache-gib", type=float, default=2.0, help="of an instance")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    make_model(args.model)
    results = asyncio.run(experiment(args, new_console()))
    print(f"wrote {write_result('b18_order_real', __doc__, args, results)}")


if __name__ == "__main__":
    main()
