"""`hydrainfer bench run`, `bench compare` and `trace`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from hydrainfer.benching.options import (
    URL,
    Compare,
    RunOptions,
    Trace,
    check_like,
    min_seconds_of,
    numbers,
    objective_of,
    run_to_end,
    sorted_out,
)
from hydrainfer.benching.vllm_names import ours
from hydrainfer.core import ConfigError
from hydrainfer.flags import check_out, with_flags

if TYPE_CHECKING:  # these take long to import
    from hydrainfer.config import Slo
    from hydrainfer.workload.measuring import Asked
    from hydrainfer.workload.sources import Workload

INTERRUPTED, FAILED = 130, 1
_FEWEST = 8  # requests that `bench` sends one at a time before its first run


class _RunByDefault(TyperGroup):
    """A command group in which `bench URL …`, and vLLM's `bench serve …`, mean `bench run …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = args[1:] if args[:1] == ["serve"] else args
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault,
    no_args_is_help=False,
    help="How much load a server carries within SLOs, and which stage breaks first. `bench URL` is `bench run URL`.",
)


class _Run(TyperCommand):
    """`bench run`, which takes the options of `vllm bench serve`, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words, notes = ours(args)
        for note in notes:
            typer.echo(f"note: {note}", err=True)
        return super().parse_args(ctx, words)


@app.command(cls=_Run)
@with_flags(RunOptions, "urls")
def run(**flags: Any) -> None:
    """Load one server: at the rates given, or in search of the highest at which 90 % of requests meet their SLO."""
    from hydrainfer.workload.client import Endpoint
    from hydrainfer.workload.measuring import bench
    from hydrainfer.workload.output import Shown
    from hydrainfer.workload.sources import read_workload

    options = RunOptions(**flags)
    addresses, parts = sorted_out(options.urls, options.goodput)
    spec = read_workload(options.workload, data=options.data, pictures=options.pictures)
    check_like(options.like, spec)
    needed = options.rate is None and options.concurrency is None
    objective = objective_of(parts, options.slo, options.like, spec.dataset, needed)
    asked = _asked(options, spec, objective)
    if options.out is not None:
        check_out(options.out)
    target = Endpoint(base_url=addresses[0] if addresses else URL, model=options.model, api_key=options.api_key)
    console = Console(stderr=True, highlight=False)
    console.print(
        f"workload {spec.dataset} ({spec.source}), seed {options.seed}, SLO {objective or 'none'}", markup=False
    )
    with Shown(console, objective) as watch:
        result = run_to_end(lambda: bench(asked, target, watch))
    _finish(result, options.out, options.json)


def _asked(given: RunOptions, spec: Workload, objective: Slo | None) -> Asked:
    from hydrainfer.workload.measuring import Asked, Effort, LoadPlan
    from hydrainfer.workload.sources import Replay, read_arrivals

    replay = None
    source = str(given.arrival_trace or given.workload)
    if given.arrival_trace is not None:
        replay = Replay(tuple(a.at_s for a in read_arrivals(given.arrival_trace)), given.speed, source)
    elif given.arrivals == "replay":
        chats = spec.chats(given.requests, given.seed, given.like)
        times = tuple(c.at_s for c in chats if c.at_s is not None)
        if not times:
            raise ConfigError(f"{source} has no times of arrival; give --arrival-trace FILE", param="arrivals")
        replay = Replay(times, given.speed, source)
    load = LoadPlan(
        kind="poisson" if given.arrivals == "replay" else given.arrivals,
        burst_shape=given.burst_shape,
        rates=numbers(given.rate, "rate"),
        concurrency=tuple(int(n) for n in numbers(given.concurrency, "concurrency")),
        replay=replay,
        first_rate=given.first_rate,
        max_rate=given.max_rate,
        tolerance=given.tolerance,
        limit_s=60 * given.search_minutes,
    )
    min_s = 0.0
    if replay is None:
        min_s = min_seconds_of(given.min_seconds, objective)
    effort = Effort(requests=given.requests, min_s=min_s, timeout_s=given.timeout_s)
    rest = {name: getattr(given, name) for name in ("like", "seed", "runs", "name")}
    return Asked(workload=spec, slo=objective, load=load, effort=effort, **rest)


@app.command()
@with_flags(Compare, "model")
def compare(**flags: Any) -> None:
    """Compare layouts and servers on the same hardware with the same traffic, in turns; ends with a page to look at."""
    from hydrainfer.checkpoint import is_hub_name, locate
    from hydrainfer.families import architecture_of
    from hydrainfer.workload.measuring import Comparison, Effort, read_plan
    from hydrainfer.workload.output import Shown
    from hydrainfer.workload.sources import read_workload

    options = Compare(**flags)
    plan = read_plan(options.config, options.as_plan())
    if plan.layouts and plan.place.model is not None and not is_hub_name(plan.place.model):
        architecture_of(locate(plan.place.model))
    spec = read_workload(plan.workload, data=plan.data, pictures=plan.pictures)
    objective = objective_of([], plan.slo or None, plan.like, spec.dataset, True)
    if objective is None:
        raise ConfigError("a comparison needs an SLO: --goodput 'ttft:250 tpot:40' (ms), --slo or --like", param="slo")
    check_out(options.out)
    console = Console(stderr=True, highlight=False)
    effort = Effort(requests=plan.requests, min_s=min_seconds_of(plan.min_s, objective), timeout_s=plan.timeout_s)
    with Shown(console, objective) as watch:
        say: Callable[[str], None] = lambda line: console.print(line, markup=False, soft_wrap=True)  # noqa: E731
        comparison = Comparison(plan, spec, objective, effort, watch, say)
        result = run_to_end(comparison.run)
    _finish(result, options.out, options.json)


def _finish(result: Any, out: Path | None, as_json: bool) -> None:
    """Show and write the result; exit 1 if the server is gone or nothing was measured, 130 if interrupted."""
    from hydrainfer.reports.bench import answer, conclusions, tables_of, write_files

    console = Console(stderr=as_json, highlight=False)
    if not console.is_terminal:
        console.width = 150
    for line in answer(result):
        console.print(line, style="bold", markup=False, soft_wrap=True)
    for table in tables_of(result) if result.runs else ():
        console.print(table)
    for line in conclusions(result):
        console.print(line, markup=False, soft_wrap=True)
    if out is not None:
        paths = write_files(result, out)
        console.print(f"wrote {', '.join(str(p) for p in paths)}", markup=False, soft_wrap=True)
    elif not as_json and result.runs:
        console.print("[dim]for a page with figures, run the same with --out DIR[/dim]")
    if as_json:
        sys.stdout.write(result.to_json().decode())
    if result.stopped:
        raise typer.Exit(_status(result.stopped))
    if not result.runs or all(server.failed for server in result.servers):
        raise typer.Exit(FAILED)


@with_flags(Trace, "workload")
def trace(**flags: Any) -> None:
    """Record a workload once, with the length of every answer, so that every server can be given the same load."""
    from hydrainfer.workload.client import Endpoint
    from hydrainfer.workload.measuring import FirstPass, first_pass
    from hydrainfer.workload.output import Shown
    from hydrainfer.workload.sources import Recording, read_workload, write_recording

    options = Trace(**flags)
    console = Console(highlight=False)
    out = options.out
    url = options.url
    if out.suffix != ".jsonl":
        raise ConfigError(f"a recording is a .jsonl file, not {out}", param="out")
    check_out(out.parent)
    spec = read_workload(options.workload, data=options.data, pictures=options.pictures)
    check_like(options.like, spec)
    chats = spec.chats(options.requests, options.seed, options.like)
    if url is None:
        made = FirstPass(Recording(dataset=spec.dataset, seed=options.seed, chats=tuple(chats)), (), "")
    else:
        target = Endpoint(base_url=url, model=options.model, api_key=options.api_key, timeout_s=options.timeout_s)
        limit = options.max_tokens or spec.max_tokens
        with Shown(console, None) as watch:
            made = run_to_end(
                lambda: first_pass(spec.dataset, target, chats, limit, options.concurrency, options.seed, watch)
            )
    if not made.recording.chats:
        why = made.stopped or _reasons(made.failures)[0]
        raise ConfigError(f"none of {len(chats)} requests was answered, so {out} is not written: {why}", param="out")
    write_recording(out, made.recording)
    _tell(console, made, out, url, options.model)
    if made.stopped:
        raise typer.Exit(_status(made.stopped))


def _tell(console: Console, made: Any, out: Path, url: str | None, model: str) -> None:
    """Print what the recording holds, what is missing and why, and how to use it."""
    from hydrainfer.workload.measuring import LoadPlan
    from hydrainfer.workload.output import say_next

    lengths = [c.max_tokens for c in made.recording.chats]
    lines = [f"wrote {out}: {len(lengths)} requests, answers of up to {max(lengths)} tokens"]
    if made.recording.n_cut_short:
        lines.append(f"{made.recording.n_cut_short} answers reached the limit")
    lines += _reasons(made.failures) + ([f"stopped before the end: {made.stopped}"] if made.stopped else [])
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if len(lengths) < _FEWEST:
        console.print(f"[dim]for `hydrainfer bench`, record at least {_FEWEST}: --requests[/dim]")
        return
    words = ["hydrainfer", "bench", url or URL, *(["--model", model] if model else []), "--workload", str(out)]
    longer = 2 ** (LoadPlan().max_runs - 1)  # the last run at a rate, as a multiple of the first
    n_first = len(lengths) // longer
    words += ["--goodput", "ttft:250", "tpot:40", "--max-rate", f"{n_first / 10:g}"]  # the first runs last 10 s
    say_next(console, words + (["--requests", str(n_first)] if n_first < 100 else []))


def _reasons(failures: Sequence[Any]) -> list[str]:
    """One line for each kind of failure."""
    kinds: dict[Any, list[Any]] = {}
    for failure in failures:
        kinds.setdefault((failure.kind, failure.status), []).append(failure.message)
    return [f"{len(said)} requests failed, the first with: {said[0]}" for said in kinds.values()]


def _status(stopped: str) -> int:
    return INTERRUPTED if "interrupted" in stopped else FAILED
