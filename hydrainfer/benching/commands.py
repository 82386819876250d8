"""`hydrainfer bench run`, `bench compare` and `trace`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from hydrainfer.benching.options import (
    DataOption,
    JsonOption,
    LikeOption,
    MinSecondsOption,
    OutOption,
    PartsOption,
    PicturesOption,
    RequestsOption,
    SeedOption,
    SloOption,
    TimeoutOption,
    WorkloadOption,
    min_seconds_of,
    named,
    numbers,
    objective_of,
    run_to_end,
    sorted_out,
)
from hydrainfer.config import is_slo_part
from hydrainfer.core import ConfigError

URL = "http://127.0.0.1:8000"
INTERRUPTED, GONE = 130, 1


class _RunByDefault(TyperGroup):
    """`bench URL …` is `bench run URL …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault,
    no_args_is_help=False,
    help="How much load a server carries within SLOs, and which stage breaks first. `bench URL` is `bench run URL`.",
)


@app.command()
def run(
    urls: Annotated[list[str] | None, typer.Argument(help=f"The server, without /v1 (default {URL}).")] = None,
    model: Annotated[str, typer.Option(help="Its name; default: the first the server has.")] = "",
    api_key: Annotated[str | None, typer.Option(help="Bearer token.", envvar="OPENAI_API_KEY")] = None,
    workload: WorkloadOption = "textcaps",
    data: DataOption = None,
    pictures: PicturesOption = None,
    like: LikeOption = None,
    slo: SloOption = None,
    goodput: PartsOption = None,
    rate: Annotated[str | None, typer.Option(help="Requests per second, one or several: 1,2,4.")] = None,
    concurrency: Annotated[str | None, typer.Option(help="Closed loop: clients at once, one or several.")] = None,
    arrivals: Annotated[str, typer.Option(help="poisson, constant, gamma or replay.")] = "poisson",
    burst_shape: Annotated[float, typer.Option(help="Of gamma arrivals: below 1 is burstier than Poisson.")] = 0.5,
    arrival_trace: Annotated[Path | None, typer.Option(help="Replay these times (Azure, BurstGPT, Mooncake).")] = None,
    speed: Annotated[float, typer.Option(help="Replay so many times as fast.")] = 1.0,
    requests: RequestsOption = 100,
    min_seconds: MinSecondsOption = None,
    runs: Annotated[int, typer.Option(help="Each load so often, with another seed each.", min=1)] = 1,
    first_rate: Annotated[float | None, typer.Option(help="Where the search starts; default: from one alone.")] = None,
    max_rate: Annotated[float, typer.Option(help="Where the search ends.")] = 1e4,
    tolerance: Annotated[float, typer.Option(help="How exact the search is, relative.")] = 0.05,
    seed: SeedOption = 0,
    timeout_s: TimeoutOption = 600.0,
    name: Annotated[str, typer.Option(help="What to call the server in the report.")] = "server",
    json: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Load one server: at the rates given, or in search of the highest at which 90 % of requests meet their SLO."""
    from hydrainfer.workload.arrivals import Replay
    from hydrainfer.workload.bench import Asked, Load, bench
    from hydrainfer.workload.client import Target
    from hydrainfer.workload.output import Shown
    from hydrainfer.workload.session import Effort
    from hydrainfer.workload.sources import read_arrivals, read_workload

    addresses, parts = sorted_out(urls, goodput)
    spec = read_workload(workload, data=data, pictures=pictures)
    objective = objective_of(parts, slo, like, spec.dataset, needed=rate is None and concurrency is None)
    replay = None
    if arrival_trace is not None:
        times = tuple(a.at_s for a in read_arrivals(arrival_trace))
        replay = Replay(times, speed, str(arrival_trace))
    elif arrivals == "replay":
        times = tuple(c.at_s for c in spec.chats(requests, seed, like) if c.at_s is not None)
        replay = Replay(times, speed, workload)
    asked = Asked(
        workload=spec,
        like=like,
        slo=objective,
        load=Load(
            kind="poisson" if arrivals == "replay" else arrivals,
            burst_shape=burst_shape,
            rates=numbers(rate, "rate"),
            concurrency=tuple(int(n) for n in numbers(concurrency, "concurrency")),
            replay=replay,
            first_rate=first_rate,
            max_rate=max_rate,
            tolerance=tolerance,
        ),
        effort=Effort(
            requests=requests,
            min_s=min_seconds_of(min_seconds, objective) if replay is None else 0.0,
            timeout_s=timeout_s,
        ),
        seed=seed,
        runs=runs,
        name=name,
    )
    target = Target(base_url=addresses[0] if addresses else URL, model=model, api_key=api_key)
    console = Console(stderr=True, highlight=False)
    console.print(f"workload {spec.dataset} ({spec.source}), seed {seed}, SLO {objective or 'none'}", markup=False)
    with Shown(console, objective) as watch:
        result = run_to_end(lambda: bench(asked, target, watch))
    _finish(result, out, json)


@app.command()
def compare(
    model: Annotated[Path | None, typer.Argument(help="Checkpoint for the layouts; default: the built-in one.")] = None,
    config: Annotated[Path | None, typer.Option(help="A file of benchmarks/compare; options go before it.")] = None,
    layouts: Annotated[str | None, typer.Option(help="Started here in turn: 2EPD,1EP1D,1E1PD, or files.")] = None,
    server: Annotated[list[str] | None, typer.Option(help="One that runs already: NAME=URL. Repeatable.")] = None,
    start: Annotated[list[str] | None, typer.Option(help="One to start: NAME=COMMAND with {port}. Repeatable.")] = None,
    flags: Annotated[str | None, typer.Option(help="More flags of `hydrainfer serve`, for all layouts.")] = None,
    cores: Annotated[str | None, typer.Option(help="What each deployment gets as a whole, e.g. 0-3.")] = None,
    gpus: Annotated[str | None, typer.Option(help="Likewise, for CUDA_VISIBLE_DEVICES.")] = None,
    threads_per_instance: Annotated[
        int | None, typer.Option(help="Default: as many as there are cores.", min=1)
    ] = None,
    workload: Annotated[str | None, typer.Option(help="As of `bench run`; default textcaps.")] = None,
    data: DataOption = None,
    pictures: PicturesOption = None,
    like: LikeOption = None,
    slo: SloOption = None,
    goodput: PartsOption = None,
    rates: Annotated[str | None, typer.Option(help="Requests per second, all in every round: 1,2,4.")] = None,
    rounds: Annotated[int | None, typer.Option(help="With another seed each.", min=1)] = None,
    requests: Annotated[int | None, typer.Option(help="Per run, at least.", min=1)] = None,
    min_seconds: MinSecondsOption = None,
    seed: Annotated[int | None, typer.Option(help="Of the traffic.", min=0)] = None,
    json: JsonOption = False,
    out: Annotated[Path, typer.Option(help="Folder for result.json, runs.csv and report.html.")] = Path("comparison"),
) -> None:
    """Compare layouts and servers on the same hardware with the same traffic, in turns; ends with a page to look at."""
    from hydrainfer.workload.compare import Comparison, read_plan
    from hydrainfer.workload.output import Shown
    from hydrainfer.workload.session import Effort
    from hydrainfer.workload.sources import read_workload

    given: dict[str, Any] = {
        "layouts": layouts.split(",") if layouts else None,
        "servers": named(server, "url") + named(start, "start") or None,
        "flags": flags,
        "workload": workload,
        "data": data,
        "pictures": pictures,
        "like": like,
        "slo": " ".join(goodput) if goodput else slo,
        "rates": numbers(rates, "rates") or None,
        "rounds": rounds,
        "requests": requests,
        "min_s": min_seconds,
        "seed": seed,
    }
    place = {"model": str(model) if model else None, "cores": cores, "gpus": gpus}
    place["threads_per_instance"] = threads_per_instance  # type: ignore[assignment]
    given = {k: v for k, v in given.items() if v is not None}
    plan = read_plan(config, given | {"place": {k: v for k, v in place.items() if v is not None}})
    spec = read_workload(plan.workload, data=plan.data, pictures=plan.pictures)
    said = plan.slo.split()
    are_parts = bool(said) and all(is_slo_part(part) for part in said)
    objective = objective_of(
        said if are_parts else [], None if are_parts else plan.slo or None, plan.like, spec.dataset, True
    )
    if objective is None:
        raise ConfigError("a comparison needs an SLO: --goodput 'ttft:250 tpot:40' (ms), --slo or --like", param="slo")
    console = Console(stderr=True, highlight=False)
    effort = Effort(requests=plan.requests, min_s=min_seconds_of(plan.min_s, objective), timeout_s=plan.timeout_s)
    with Shown(console, objective) as watch:
        say: Callable[[str], None] = lambda line: console.print(line, markup=False, soft_wrap=True)  # noqa: E731
        comparison = Comparison(plan, spec, objective, effort, watch, say)
        result = run_to_end(comparison.run)
    _finish(result, out, json)


def _finish(result: Any, out: Path | None, as_json: bool) -> None:
    """Show and write what there is; exit 1 if the server is gone, 130 if interrupted."""
    from hydrainfer.workload.output import conclusions, tables_of, write_files

    console = Console(stderr=as_json, highlight=False)
    if not console.is_terminal:
        console.width = 150
    for table in tables_of(result) if result.runs else ():
        console.print(table)
    for line in conclusions(result):
        console.print(line, markup=False, soft_wrap=True)
    if out is not None:
        paths = write_files(result, out)
        console.print(f"wrote {', '.join(str(p) for p in paths)}", markup=False, soft_wrap=True)
    elif not as_json:
        console.print("[dim]next: the same with --out DIR for a page with figures[/dim]")
    if as_json:
        sys.stdout.write(result.to_json().decode())
    if result.stopped:
        raise typer.Exit(INTERRUPTED if "interrupted" in result.stopped else GONE)


def trace(
    workload: Annotated[str, typer.Argument(help="A name or file of configs/workloads.")],
    out: Annotated[Path, typer.Option("--out", help="The recording, .jsonl.")],
    url: Annotated[
        str | None, typer.Option(help="Ask this server how long its answers are; without: as drawn.")
    ] = None,
    model: Annotated[str, typer.Option(help="Its name; default: the first the server has.")] = "",
    api_key: Annotated[str | None, typer.Option(help="Bearer token.", envvar="OPENAI_API_KEY")] = None,
    data: DataOption = None,
    pictures: PicturesOption = None,
    like: LikeOption = None,
    requests: Annotated[int, typer.Option(help="How many.", min=1)] = 500,
    concurrency: Annotated[int, typer.Option(help="Clients at once.", min=1)] = 8,
    max_tokens: Annotated[int | None, typer.Option(help="Of an answer; default: the workload's.", min=1)] = None,
    seed: SeedOption = 0,
    timeout_s: TimeoutOption = 600.0,
) -> None:
    """Record a workload once, with the length of every answer, so that every server can be given the same load."""
    from hydrainfer.workload.client import Target
    from hydrainfer.workload.output import Shown
    from hydrainfer.workload.sources import Recording, read_workload, write_recording
    from hydrainfer.workload.tracing import first_pass

    console = Console(highlight=False)
    if out.suffix != ".jsonl":
        raise ConfigError(f"a recording is a .jsonl file, not {out}", param="out")
    spec = read_workload(workload, data=data, pictures=pictures)
    chats = spec.chats(requests, seed, like)
    if url is None:
        recording = Recording(dataset=spec.dataset, seed=seed, chats=tuple(chats))
    else:
        target = Target(base_url=url, model=model, api_key=api_key, timeout_s=timeout_s)
        with Shown(console, None) as watch:
            recording = run_to_end(
                lambda: first_pass(spec.dataset, target, chats, max_tokens or spec.max_tokens, concurrency, seed, watch)
            )
    write_recording(out, recording)
    n, longest = len(recording.chats), max((c.max_tokens for c in recording.chats), default=0)
    console.print(f"wrote {out}: {n} requests, answers of up to {longest} tokens", soft_wrap=True)
    for count, what in ((recording.n_cut_short, "answers reached the limit"), (recording.n_failed, "requests failed")):
        if count:
            console.print(f"{count} {what}")
    console.print(f"[dim]next: hydrainfer bench URL --workload {out} --goodput ttft:250 tpot:40[/dim]", soft_wrap=True)
