"""What does going by rank gain over first come, first served?

The production scheduler in the simulator. `burst`: 100 requests at once, every fifth with a picture, to llava-small on
two cores (`configs/costs/llava-small-cpu.yaml`), lanes in turns. `agentic`: to four instances at 0.85 of their
capacity, 60 % sessions that have 4 to 9 thousand tokens to compute, and prompts of log-normal length; `log-normal`:
such prompts alone. Each answers with one token, so the time to it is all that there is. Long prompts have more than
16,000 tokens to compute; sessions are long, too (64 to 128 thousand tokens, of which 93 % were found). `tenants`: four
of the same demand share an instance, together 0.6 or 0.8 of what it can do; then one of them asks for twenty times as
much: what the other three wait for their first tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.table import Table

from benchmarks.command import new_console, new_table, options
from benchmarks.record import ROOT, write_result
from hydrainfer.cache import EmbedSpec, FullSpec
from hydrainfer.core import CostModel, Role, Share
from hydrainfer.planner.nouns import TraceRequest
from hydrainfer.planner.simulation import InstanceModel, ServedRequest, Simulator, as_requests
from hydrainfer.scheduler import STEP_S, Budgets, Policy
from hydrainfer.workload.results import Percentiles

KV = FullSpec.of(layers=12, kv_heads=4, head_dim=64, dtype="float32", block_tokens=16)
EMBED = EmbedSpec.of(width=768, dtype="float32", block_tokens=16)
LLAVA_SMALL = ROOT / "configs" / "costs" / "llava-small-cpu.yaml"
LARGE = CostModel(
    encode_image_s=0.0, step_base_s=0.008, prefill_token_s=1e-4, prefill_attention_s=2e-9, decode_token_s=1e-4
)
POLICIES = {
    "fcfs": (Policy(order="fcfs"), float("inf")),
    "rank": (Policy(), float("inf")),
    "rank, step_s": (Policy(), STEP_S),
    "rank, step_s, a = 0.1": (Policy(ageing=0.1), STEP_S),
}
CHUNK, LONG, LOAD, N_INSTANCES = 8192, 16_000, 0.85, 4
FLOOD_S = 40.0


def burst(policy: Policy, step_s: float, running: int, n_output: int) -> list[ServedRequest]:
    cost = msgspec.yaml.decode(LLAVA_SMALL.read_bytes(), type=CostModel)
    budgets = Budgets(tokens=2048, images=4, running=running, step_s=step_s)
    blocks = {KV: 4096, EMBED: 64 * 36}
    role = Role.parse("EPD")
    instance = InstanceModel(
        name="EPD0", role=role, cost=cost, blocks=blocks, budgets=budgets, policy=policy, overlap="off"
    )
    pictures = [(576,) if i % 5 == 0 else () for i in range(100)]
    trace = [
        TraceRequest(arrival_s=0.001 * i, n_text=10, pictures=p, n_output=n_output) for i, p in enumerate(pictures)
    ]
    return Simulator([instance]).run(as_requests(trace))


def alone_s(n_tokens: int) -> float:
    """How long an instance is busy with a prompt."""
    chunks = [(at, min(CHUNK, n_tokens - at)) for at in range(0, n_tokens, CHUNK)]
    return sum(LARGE.language_s(n, n * (at + n), 0, 0) for at, n in chunks)


def prompts(mix: str, n: int, seed: int) -> Iterator[tuple[TraceRequest, str]]:
    """Each with its kind: small, large, or a session."""
    draw = random.Random(seed)
    lengths: list[tuple[int, str]] = []
    for _ in range(n):
        if mix == "agentic" and draw.random() < 0.6:
            lengths.append((int(draw.uniform(64_000, 128_000) * 0.07), "session"))
        else:
            length = int(min(128_000, max(200, draw.lognormvariate(8.5 if mix == "agentic" else 9.0, 1.25))))
            lengths.append((length, "large" if length > LONG else "small"))
    rate, at_s = LOAD * N_INSTANCES * n / sum(alone_s(length) for length, _ in lengths), 0.0
    for length, kind in lengths:
        at_s += draw.expovariate(rate)
        yield TraceRequest(arrival_s=at_s, n_text=length, n_output=1), kind


def mixed(mix: str, policy: Policy, step_s: float, n: int, seeds: int) -> dict[str, list[ServedRequest]]:
    """All but the first tenth of each run, by kind."""
    budgets, role = Budgets(tokens=CHUNK, step_s=step_s), Role.parse("EPD")
    found: dict[str, list[ServedRequest]] = {"all": []}
    for seed in range(seeds):
        instances = [
            InstanceModel(name=f"EPD{i}", role=role, cost=LARGE, blocks={KV: 200_000}, budgets=budgets, policy=policy)
            for i in range(N_INSTANCES)
        ]
        drawn = list(prompts(mix, n, seed))
        served = Simulator(instances).run(as_requests(t for t, _ in drawn))
        for one, (_, kind) in list(zip(served, drawn, strict=True))[n // 10 :]:
            found["all"].append(one)
            found.setdefault(kind, []).append(one)
    return found


def tenants(factor: float, load: float, n_output: int, seeds: int, named: bool = True) -> list[ServedRequest]:
    """The requests of the tenants of which none asks for `factor` times its share. Not `named`: they are one."""
    budgets, role, others = Budgets(tokens=2048, running=64, step_s=STEP_S), Role.parse("EPD"), []
    alone = sum(map(alone_s, range(200, 2001))) / 1801 + n_output * 3e-4
    for seed in range(seeds):
        trace = []
        for tenant in range(4):
            draw, at_s, rate = random.Random(10 * seed + tenant), 0.0, load / 4 / alone
            while (at_s := at_s + draw.expovariate(rate if tenant else factor * rate)) < FLOOD_S:
                trace.append((TraceRequest(arrival_s=at_s, n_text=draw.randint(200, 2000), n_output=n_output), tenant))
        trace.sort(key=lambda pair: pair[0].arrival_s)
        requests = [
            msgspec.structs.replace(r, share=Share(str(tenant) if named else ""))
            for r, (_, tenant) in zip(as_requests(t for t, _ in trace), trace)
        ]
        instance = InstanceModel(name="EPD0", role=role, cost=LARGE, blocks={KV: 8000}, budgets=budgets)
        served = Simulator([instance]).run(requests)
        others += [s for s, (_, tenant) in zip(served, trace) if tenant]
    return others


def first_tokens(served: list[ServedRequest]) -> Any:
    return msgspec.to_builtins(Percentiles.of(r.token_s[0] - r.arrival_s for r in served))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--requests", type=int, default=1500, help="per run of a mix")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output-tokens", type=int, default=16, help="of each answer in the burst")
    parser.add_argument("--running", type=int, nargs="+", default=[64, 96], help="--max-running, in the burst")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name, (policy, step_s) in POLICIES.items():
        rows = results[name] = {}
        for running in args.running:
            served = burst(policy, step_s, running, args.output_tokens)
            rows[f"burst, {running} at once"] = {
                "small": first_tokens([r for r in served if not r.request.media]),
                "large": first_tokens([r for r in served if r.request.media]),
                "end_s": max(r.token_s[-1] for r in served),
            }
        for mix in ("agentic", "log-normal"):
            by_kind = mixed(mix, policy, step_s, args.requests, args.seeds)
            rows[mix] = {kind: first_tokens(some) for kind, some in by_kind.items()}
    console = new_console()
    console.print(table(results))
    results["tenants"] = {}
    for load, n_output in ((0.6, 1), (0.6, 32), (0.8, 1), (0.8, 32)):
        cases = {"alone": (1.0, True), "beside a flood": (20.0, True), "without tenants": (20.0, False)}
        found = {
            name: first_tokens(tenants(f, load, n_output, args.seeds, named)) for name, (f, named) in cases.items()
        }
        results["tenants"][f"load {load}, {n_output} tokens"] = found
        said = "; ".join(f"{name} {waits['p50']:.2f} / {waits['p90']:.2f}" for name, waits in found.items())
        console.print(f"load {load}, {n_output} tokens, three of four tenants: {said}")
    print(f"wrote {write_result('b18_order', __doc__, args, results)}")


def table(results: dict[str, Any]) -> Table:
    title = "time to first token, s: p50 / p90 of texts or short prompts; of pictures or long prompts; of sessions; end"
    shown = new_table(title, ("", *next(iter(results.values()))))
    for name, rows in results.items():
        cells = []
        for row in rows.values():
            kinds = [kind for kind in ("small", "large", "session") if kind in row]
            parts = [f"{row[kind]['p50']:.2f} / {row[kind]['p90']:.2f}" for kind in kinds]
            cells.append("; ".join([*parts, *([f"{row['end_s']:.1f}"] if "end_s" in row else [])]))
        shown.add_row(name, *cells)
    return shown


if __name__ == "__main__":
    main()
