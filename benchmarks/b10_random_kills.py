"""Does any request suffer when instances are killed at random under load?

A real server with emulated devices and an instance per process, a steady load of greedy streams with and without
pictures, of which some clients leave early; every second or two, SIGKILL to one instance that `/v1/instances` names.
Each prompt is asked once before: a disturbed answer has to be the same, token by token, or end with a typed error
before its deadline. At the end every block must be back, and after the server has stopped nothing of it may be left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import orjson
from msgspec import structs
from rich.console import Console
from rich.table import Table

from benchmarks.command import new_console, new_table, options, told
from benchmarks.figure import Panel, save_bars
from benchmarks.record import ROOT, write_result
from benchmarks.runs import hydrainfer_plan, shown
from benchmarks.servers import Server, ServerFailed
from hydrainfer.core import Role, Stage
from hydrainfer.workload.client import ChatClient, Endpoint, RequestRecord
from hydrainfer.workload.results import Percentiles
from hydrainfer.workload.sources import BodyOptions, ChatRequest, EncodedPicture, distinct_chats

GRACE_S = 5.0  # after its deadline: the server's own, and the way to the client
TYPED = ("status", "server")  # kinds of failure that carry the server's own words
SHARED = Path("/dev/shm")


class Outcome(NamedTuple):
    """`record` is None if the client has left."""

    prompt: int
    n_pictures: int
    verdict: str
    record: RequestRecord | None


def make_prompts(args: argparse.Namespace) -> list[ChatRequest]:
    """Half of them without a picture, the others with one or two."""
    rng = random.Random(args.seed)
    found = []
    for i in range(args.prompts):
        (chat,) = distinct_chats(
            1, seed=args.seed * 1000 + i, n_pictures=max(0, i % 4 - 1), width=args.picture_px, height=args.picture_px
        )
        drawn = tuple(EncodedPicture(p.data_url()) for p in chat.pictures)
        n = rng.randint(*args.output_tokens)
        found.append(structs.replace(chat, text=f"{i}: {chat.text}", pictures=drawn, max_tokens=n))
    return found


class Load:
    """Asks and judges. `expected`: the undisturbed answers."""

    def __init__(self, client: ChatClient, model: str, prompts: list[ChatRequest], args: argparse.Namespace) -> None:
        self._client, self._prompts, self._args = client, prompts, args
        self._bodies = [BodyOptions().body(chat, model) for chat in prompts]
        self.expected: list[tuple[int, ...]] = []
        self.outcomes: list[Outcome] = []

    async def ask_undisturbed(self) -> None:
        for i in range(len(self._prompts)):
            record = await self._ask(i)
            if not record.ok or record.token_ids is None or len(record.token_ids) != self._prompts[i].max_tokens:
                raise ServerFailed(f"prompt {i} fails without any disturbance: {record.failure}")
            self.expected.append(record.token_ids)

    async def run(self, until: asyncio.Event) -> None:
        """Open loop, until the event is set; then waits for all that was asked."""
        rng = random.Random(self._args.seed)
        async with asyncio.TaskGroup() as group:
            while not until.is_set():
                leaves = rng.random() < self._args.leaving
                after_s = rng.uniform(0.0, self._args.leave_s) if leaves else None
                group.create_task(self._one(rng.randrange(len(self._prompts)), after_s))
                await asyncio.sleep(rng.expovariate(self._args.rate))

    async def _one(self, i: int, leave_after_s: float | None) -> None:
        asking = asyncio.ensure_future(self._ask(i))
        await asyncio.wait([asking], timeout=leave_after_s)
        if not asking.done():
            asking.cancel()
            await asyncio.wait([asking])
        record = None if asking.cancelled() else asking.result()
        verdict = "left" if record is None else self.verdict(i, record)
        self.outcomes.append(Outcome(i, len(self._prompts[i].pictures), verdict, record))

    async def _ask(self, i: int) -> RequestRecord:
        now_s = time.perf_counter()
        return await self._client.chat(self._bodies[i], index=i, n_asked=self._prompts[i].max_tokens, scheduled_s=now_s)

    def verdict(self, i: int, r: RequestRecord) -> str:
        """`right`, the kind of a typed error, or what must not be."""
        got = r.token_ids or ()
        if got != self.expected[i][: len(got)]:
            return "WRONG TOKENS"
        if r.e2e_s > self._args.deadline_s + GRACE_S:
            return "LATE"
        if r.ok:
            whole = len(got) == len(self.expected[i]) and r.finish_reason == "length"
            return "right" if whole else "CUT SHORT"
        assert r.failure is not None
        if r.failure.kind.value not in TYPED:
            return f"UNTYPED {r.failure.kind.value}"
        when = "" if r.failure.status is not None else " after the first token" if got else " in the stream"
        said = r.failure.message.split(";")[0].removeprefix(f"{r.failure.status}: ")
        return f"error {r.failure.status or ''}{when}: {said}"


class Killer:
    """Ends instances at random; at most `args.down` are down at once, and the last one of a stage is spared but for a
    share of the kills. `kills`: of each the seconds since the start, the name, how many instances were down, and how
    many requests ran there by its last report. `family`: every process of the server that was seen."""

    def __init__(self, server: Server, args: argparse.Namespace) -> None:
        self._server, self._args, self._rng = server, args, random.Random(args.seed + 1)
        self.kills: list[tuple[float, str, int, int]] = []
        self.family: dict[int, list[str]] = {}
        self.shared: set[str] = set()
        self.back_s: list[float] = []
        self._dead: dict[tuple[str, int], float] = {}  # when that incarnation was killed

    async def run(self) -> None:
        start_s = time.perf_counter()
        while len(self.kills) < self._args.kills:
            await asyncio.sleep(self._rng.uniform(*self._args.every_s))
            infos = await asyncio.to_thread(instances, self._server)
            self._watch(infos)
            there = [i for i in infos if i["state"] != "dead"]
            victims = there if self._rng.random() < self._args.last else [i for i in there if spare(i, there)]
            n_down = len(infos) - len(there)
            if not victims or n_down >= self._args.down:
                continue
            victim = self._rng.choice(victims)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim["pid"], signal.SIGKILL)
                now_s = time.perf_counter()
                self._dead[victim["id"], victim["incarnation"]] = now_s
                n_running = victim["load"]["running"] if victim["load"] else 0
                self.kills.append((now_s - start_s, victim["id"], n_down, n_running))

    def _watch(self, infos: list[dict[str, Any]]) -> None:
        family = self._server.family()
        self.family |= family
        self.shared |= {name for pid in family for name in shared_memory(pid)}
        there = {i["id"]: i["incarnation"] for i in infos if i["state"] == "alive"}
        for name, incarnation in list(self._dead):
            if there.get(name, incarnation) != incarnation:
                self.back_s.append(time.perf_counter() - self._dead.pop((name, incarnation)))


def spare(info: dict[str, Any], there: list[dict[str, Any]]) -> bool:
    """Whether the others run all that it runs."""
    others = [Role.parse(i["role"]) for i in there if i["id"] != info["id"]]
    return all(any(r.runs(s) for r in others) for s in Stage if Role.parse(info["role"]).runs(s))


def get(server: Server, path: str) -> bytes:
    with urllib.request.urlopen(server.url + path, timeout=10) as answer:
        return answer.read()


def instances(server: Server) -> list[dict[str, Any]]:
    return orjson.loads(get(server, "/v1/instances"))["data"]


def n_recovered(server: Server) -> int:
    lines = get(server, "/metrics").decode().splitlines()
    return sum(int(float(x.rsplit(" ", 1)[1])) for x in lines if x.startswith("hydrainfer:requests_recovered_total"))


def shared_memory(pid: int) -> set[str]:
    """Names in /dev/shm that the process has open or mapped."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/dev/shm/" in line and "(deleted)" not in line:
                found.add(line.split("/dev/shm/")[1])
    return found


async def wait_whole(server: Server, limit_s: float) -> dict[str, Any]:
    """Until every instance is there, has nothing to do and has all its blocks; what is amiss if that never comes."""
    start_s = time.perf_counter()
    while True:
        infos = await asyncio.to_thread(instances, server)
        amiss = [i["id"] for i in infos if i["state"] != "alive" or i["load"] is None or not whole(i["load"])]
        if not amiss or time.perf_counter() - start_s > limit_s:
            return {"not_whole": amiss, "whole_after_s": time.perf_counter() - start_s, "instances": infos}
        await asyncio.sleep(0.1)


def whole(load: dict[str, Any]) -> bool:
    n_live = load["waiting"] + load["running"] + load["migrating"] + load["arriving"]
    return n_live == 0 and not any(blocks["leased"] for blocks in load["cache_blocks"].values())


def left_behind(server: Server, killer: Killer) -> dict[str, list[str]]:
    """Asked to stop, it must leave nothing of these."""
    killed = server.stop()
    temp = Path(tempfile.gettempdir())
    folders = [*temp.glob(f"hydrainfer-{server.pid}-*"), *temp.glob(f"ray/session_*_{server.pid}")]
    left = server.left_of(killer.family)
    memory = [f"{pid}" for pid in left if any("memfd:hydrainfer" in line for line in maps(pid))]
    return {
        "processes": [str(pid) for pid in sorted({*killed, *left})],
        "shared_memory": sorted(name for name in killer.shared if (SHARED / name).exists()),
        "memfd": memory,
        "folders": [f.name for f in folders],
    }


def maps(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []


async def experiment(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    flags = ["--layout", args.layout, "--launcher", "ray", "--device", "emulated", "--cost-model", str(args.cost_model)]
    flags += ["--request-timeout-s", str(args.deadline_s), *args.flags.split()]
    plan = hydrainfer_plan(args.layout, args, flags)
    console.print(f"starting {shown(plan.command)}", soft_wrap=True)
    with (
        tempfile.TemporaryDirectory() as logs,
        Server(plan.name, plan.command, plan.port, Path(logs) / "server", plan.env) as server,
    ):
        await server.wait_healthy(args.start_limit_s)
        target = Endpoint(base_url=server.url, model=await server.model(), timeout_s=args.deadline_s + 2 * GRACE_S)
        async with ChatClient(target, time.perf_counter) as client:
            load, killer, enough = (
                Load(client, target.model, make_prompts(args), args),
                Killer(server, args),
                asyncio.Event(),
            )
            await load.ask_undisturbed()
            console.print(f"{len(load.expected)} undisturbed answers; killing", soft_wrap=True)
            start_s = time.perf_counter()
            loading = asyncio.create_task(load.run(enough))
            await killer.run()
            kill_s = time.perf_counter() - start_s
            enough.set()
            await loading
            server.check_alive()
            end = await wait_whole(server, args.start_limit_s)
            recovered = n_recovered(server)
        left = left_behind(server, killer)
    return {
        "summary": {
            "seconds": kill_s,
            "kills": len(killer.kills),
            "kills_by_instance": dict(sorted(Counter(kill[1] for kill in killer.kills).items())),
            "recovered": recovered,
            **summary(load.outcomes),
            "instance_back_s": msgspec.to_builtins(Percentiles.of(killer.back_s)),
            "not_whole": end["not_whole"],
            "whole_after_s": end["whole_after_s"],
            "left": left,
            "exit_status": server.status,
        },
        "command": shown(plan.command),
        "kills": killer.kills,
        "instances_at_end": end["instances"],
    }


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    right = [o.record for o in outcomes if o.verdict == "right" and o.record is not None]
    failed = [o.record for o in outcomes if o.verdict.startswith("error") and o.record is not None]
    return {
        "requests": len(outcomes),
        "with_pictures": sum(o.n_pictures > 0 for o in outcomes),
        "verdicts": dict(Counter(o.verdict for o in outcomes).most_common()),
        "tokens_right": sum(len(r.token_ids or ()) for r in right),
        "latency_s": msgspec.to_builtins(Percentiles.of(r.e2e_s for r in right)),
        "first_token_s": msgspec.to_builtins(Percentiles.of(r.ttft_s for r in right if r.ttft_s is not None)),
        "error_after_s": msgspec.to_builtins(Percentiles.of(r.e2e_s for r in failed)),
    }


def violations(s: dict[str, Any]) -> list[str]:
    """One line for each thing that a run must not have; none if all is well."""
    found = [
        f"{n} requests: {verdict}" for verdict, n in s["verdicts"].items() if verdict.isupper() or "UNTYPED" in verdict
    ]
    found += [f"{name} is not whole" for name in s["not_whole"]]
    found += [f"{kind} left: {', '.join(names)}" for kind, names in s["left"].items() if names]
    return found + ([f"the server ended with {s['exit_status']}"] if s["exit_status"] else [])


def table(s: dict[str, Any], layout: str) -> Table:
    title = f"{layout}, emulated, {s['kills']} kills in {s['seconds']:.0f} s"
    shown = new_table(title, ("what", "count or time"))
    rows = [("requests", s["requests"]), ("recovered", s["recovered"]), *s["verdicts"].items()]
    for name, p in (
        ("latency", s["latency_s"]),
        ("first token", s["first_token_s"]),
        ("back after", s["instance_back_s"]),
    ):
        if p:
            rows.append((f"{name} p50 / p99, s", f"{p['p50']:.2f} / {p['p99']:.2f}"))
    for name, value in rows:
        shown.add_row(name, str(value))
    return shown


def figure(path: Path, s: dict[str, Any], layout: str) -> None:
    spreads = {"latency": s["latency_s"], "first token": s["first_token_s"], "instance back": s["instance_back_s"]}
    times = {f"{name} {q}": [p[q]] for name, p in spreads.items() if p for q in ("p50", "p99")}
    ends = {verdict.split(":")[0]: [n] for verdict, n in s["verdicts"].items()}
    panels = {"requests": ends, "seconds": times}
    title = f"{layout}, {s['kills']} random kills"
    save_bars(path, title, [Panel(of, list(x), {layout: list(x.values())}) for of, x in panels.items()])


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/demo"), help="made if absent")
    parser.add_argument("--layout", default="2E2P2D")
    parser.add_argument(
        "--cost-model", type=Path, default=ROOT / "configs" / "costs" / "illustrative-h100-llava-7b.yaml"
    )
    parser.add_argument("--flags", default="", help="more flags for `hydrainfer serve`, as one string")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kills", type=int, default=55)
    parser.add_argument("--every-s", type=float, nargs=2, default=(1.0, 2.0), help="between kills, at random")
    parser.add_argument("--down", type=int, default=3, help="instances down at once, at most")
    parser.add_argument("--last", type=float, default=0.1, help="share of kills that may take the last one of a stage")
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, nargs=2, default=(32, 320), help="at random")
    parser.add_argument("--picture-px", type=int, default=112)
    parser.add_argument("--leaving", type=float, default=0.1, help="share of clients that leave early")
    parser.add_argument("--leave-s", type=float, default=1.0, help="after this long, at most")
    parser.add_argument("--deadline-s", type=float, default=60.0)
    parser.add_argument("--start-limit-s", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    args, console = arguments(), new_console()
    with told(console):
        if not (args.model / "config.json").exists():
            subprocess.run([sys.executable, "-m", "tests.checkpoints", str(args.model)], check=True)
        results = asyncio.run(experiment(args, console))
    console.print(table(results["summary"], args.layout))
    path = write_result("b10_random_kills", __doc__, args, results)
    figure(path.with_suffix(".png"), results["summary"], args.layout)
    console.print(f"wrote {path} and {path.with_suffix('.png').name}")
    wrong = violations(results["summary"])
    console.print("\n".join(wrong) or "nothing is lost, wrong or left behind", style="red" if wrong else "green")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
