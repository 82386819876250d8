"""The verbs `hydrainfer bench`, `bench compare` and `trace`: what was typed → what `hydrainfer.workload` is asked for."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from hydrainfer.config import Slo, is_slo_part, locate, parse_slo, read_slo
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
    help="Measure servers: how much load within SLOs, and which stage breaks first. `bench URL …` is `bench run URL …`.",
)
_Workload = Annotated[str, typer.Option("--workload", help="A name or file of configs/workloads, or a recording.")]
_Data = Annotated[str | None, typer.Option("--data", help="A local copy of the dataset; see datasets/README.md.")]
_Pictures = Annotated[str | None, typer.Option("--pictures", help="The folder of the dataset's pictures.")]
_Like = Annotated[str | None, typer.Option("--like", help="Answers as long as this model's, and its SLOs (configs/slo).")]
_Slo = Annotated[str | None, typer.Option("--slo", help="A name or file of configs/slo, with :DATASET if not the workload's.")]
_Parts = Annotated[list[str] | None, typer.Option("--goodput", help="SLOs in ms: ttft:250 tpot:40 e2e:2000.")]
_Out = Annotated[Path | None, typer.Option("--out", help="Folder for result.json, runs.csv and report.html.")]
_Json = Annotated[bool, typer.Option("--json", help="The result as JSON on standard output; all else goes to stderr.")]
_Requests = Annotated[int, typer.Option("--requests", help="Per run, at least.")]
_MinSeconds = Annotated[float | None, typer.Option("--min-seconds", help="A run lasts so long; auto: 10, or 5 TTFT SLOs.")]
_Seed = Annotated[int, typer.Option("--seed", help="The same seed sends the same requests at the same times.", min=0)]
_Timeout = Annotated[float, typer.Option("--timeout-s", help="A request without an end by then has failed.")]


@app.command()
def run(
    urls: Annotated[list[str] | None, typer.Argument(help=f"The server, without /v1 (default {URL}).")] = None,
    model: Annotated[str, typer.Option(help="Its name; default: the first the server has.")] = "",
    api_key: Annotated[str | None, typer.Option(help="Bearer token.", envvar="OPENAI_API_KEY")] = None,
    workload: _Workload = "textcaps",
    data: _Data = None,
    pictures: _Pictures = None,
    like: _Like = None,
    slo: _Slo = None,
    goodput: _Parts = None,
    rate: Annotated[str | None, typer.Option(help="Requests per second, one or several: 1,2,4.")] = None,
    concurrency: Annotated[str | None, typer.Option(help="Closed loop: clients at once, one or several.")] = None,
    arrivals: Annotated[str, typer.Option(help="poisson, constant, gamma or replay.")] = "poisson",
    burst_shape: Annotated[float, typer.Option(help="Of gamma arrivals: below 1 is burstier than Poisson.")] = 0.5,
    arrival_trace: Annotated[Path | None, typer.Option(help="Replay these times (Azure, BurstGPT, Mooncake).")] = None,
    speed: Annotated[float, typer.Option(help="Replay so many times as fast.")] = 1.0,
    requests: _Requests = 100,
    min_seconds: _MinSeconds = None,
    runs: Annotated[int, typer.Option(help="Each load so often, with another seed each.", min=1)] = 1,
    first_rate: Annotated[float | None, typer.Option(help="Where the search starts; default: from one alone.")] = None,
    max_rate: Annotated[float, typer.Option(help="Where the search ends.")] = 1e4,
    tolerance: Annotated[float, typer.Option(help="How exact the search is, relative.")] = 0.05,
    seed: _Seed = 0,
    timeout_s: _Timeout = 600.0,
    name: Annotated[str, typer.Option(help="What to call the server in the report.")] = "server",
    json: _Json = False,
    out: _Out = None,
) -> None:
    """Load one server: at the rates given, or in search of the highest at which 90 % of requests meet their SLO."""
    from hydrainfer.workload.arrivals import Replay
    from hydrainfer.workload.bench import Asked, Load, bench
    from hydrainfer.workload.client import Target
    from hydrainfer.workload.output import Shown
    from hydrainfer.workload.session import Effort
    from hydrainfer.workload.sources import read_arrivals, read_workload

    addresses, parts = _sorted_out(urls, goodput)
    spec = read_workload(workload, data=data, pictures=pictures)
    objective = _objective(parts, slo, like, spec.dataset, needed=rate is None and concurrency is None)
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
            rates=_numbers(rate, "rate"),
            concurrency=tuple(int(n) for n in _numbers(concurrency, "concurrency")),
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
        result = _run_to_end(lambda: bench(asked, target, watch))
    _finish(result, out, json)


def min_seconds_of(given: float | None, slo: Slo | None) -> float:
    """So long that a queue which outgrows the TTFT SLO is seen to."""
    if given is not None:
        return given
    return max(10.0, 5 * slo.ttft_s) if slo and slo.ttft_s else 10.0


def _run_to_end(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work())


def _sorted_out(words: Sequence[str] | None, goodput: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """`--goodput ttft:250 tpot:40` leaves its second word among the addresses."""
    words = list(words or [])
    parts = [*(goodput or []), *(w for w in words if is_slo_part(w))]
    addresses = [w for w in words if not is_slo_part(w)]
    if len(addresses) > 1:
        raise ConfigError(f"one server at a time, not {', '.join(addresses)}; several: hydrainfer bench compare")
    return addresses, parts


def _objective(parts: Sequence[str], slo: str | None, like: str | None, dataset: str, needed: bool) -> Slo | None:
    if parts and slo:
        raise ConfigError("give --goodput or --slo, not both", param="slo")
    if parts:
        return parse_slo(parts)
    if slo is None and (like is None or not needed):
        return None
    name, _, key = (slo or like or "").partition(":")
    return read_slo(locate("slo", name), key or dataset)


def _numbers(text: str | None, what: str) -> tuple[float, ...]:
    try:
        return tuple(float(x) for x in re.split(r"[,\s]+", text.strip()) if x) if text else ()
    except ValueError:
        raise ConfigError(f"--{what} takes numbers such as 1,2,4, not {text!r}", param=what) from None


def _finish(result: Any, out: Path | None, as_json: bool) -> None:
    """Show and write what there is; exit 1 if the server is gone, 130 if interrupted."""
    from hydrainfer.workload.output import conclusions, tables_of, write_files

    console = Console(stderr=as_json, highlight=False)
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
    url: Annotated[str | None, typer.Option(help="Ask this server how long its answers are; without: as drawn.")] = None,
    model: Annotated[str, typer.Option(help="Its name; default: the first the server has.")] = "",
    api_key: Annotated[str | None, typer.Option(help="Bearer token.", envvar="OPENAI_API_KEY")] = None,
    data: _Data = None,
    pictures: _Pictures = None,
    like: _Like = None,
    requests: Annotated[int, typer.Option(help="How many.", min=1)] = 500,
    concurrency: Annotated[int, typer.Option(help="Clients at once.", min=1)] = 8,
    max_tokens: Annotated[int | None, typer.Option(help="Of an answer; default: the workload's.", min=1)] = None,
    seed: _Seed = 0,
    timeout_s: _Timeout = 600.0,
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
            recording = _run_to_end(
                lambda: first_pass(spec.dataset, target, chats, max_tokens or spec.max_tokens, concurrency, seed, watch)
            )
    write_recording(out, recording)
    n, longest = len(recording.chats), max((c.max_tokens for c in recording.chats), default=0)
    console.print(f"wrote {out}: {n} requests, answers of up to {longest} tokens", soft_wrap=True)
    for count, what in ((recording.n_cut_short, "answers reached the limit"), (recording.n_failed, "requests failed")):
        if count:
            console.print(f"{count} {what}")
    console.print(f"[dim]next: hydrainfer bench URL --workload {out} --goodput ttft:250 tpot:40[/dim]", soft_wrap=True)

