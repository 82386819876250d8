"""`hydrainfer profile`: which layout carries most of a workload within its SLOs, and why."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hydrainfer.core import ConfigError

if TYPE_CHECKING:
    from hydrainfer.planner.search import Progress as OnProgress

NOTHING = 1  # exit status: no layout carries anything within the SLO
_PANELS = {"what": "What to plan for", "how": "How it is searched", "out": "What comes out", "here": "This machine"}


def profile(
    model: Annotated[str, typer.Argument(help="A checkpoint, or a name of configs/models such as llava-next-7b.")],
    devices: Annotated[int, typer.Option(help="How many there are.", rich_help_panel=_PANELS["what"])],
    hardware: Annotated[
        str | None,
        typer.Option(help="Described by configs/hardware, e.g. h800, or a file.", rich_help_panel=_PANELS["what"]),
    ] = None,
    cost_model: Annotated[
        Path | None,
        typer.Option(help="Measured before, or of emulated devices.", rich_help_panel=_PANELS["what"]),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(help="A name or file of configs/workloads, or a recording.", rich_help_panel=_PANELS["what"]),
    ] = "textcaps",
    data: Annotated[
        str | None, typer.Option(help="A local copy of the dataset.", rich_help_panel=_PANELS["what"])
    ] = None,
    pictures: Annotated[
        str | None, typer.Option(help="The folder of its pictures.", rich_help_panel=_PANELS["what"])
    ] = None,
    slo: Annotated[
        str,
        typer.Option(
            help="ttft=8,tpot=0.08 (s), or a preset of configs/slo; default: that of the model.",
            rich_help_panel=_PANELS["what"],
        ),
    ] = "",
    target: Annotated[
        float, typer.Option(help="Share of the requests that have to meet it.", rich_help_panel=_PANELS["what"])
    ] = 0.9,
    objective: Annotated[
        str,
        typer.Option(
            help="goodput; devices: fewest for --rate; ttft or tpot: least p90 at --rate.",
            rich_help_panel=_PANELS["what"],
        ),
    ] = "goodput",
    rate: Annotated[
        float | None, typer.Option(help="Requests per second, for those.", rich_help_panel=_PANELS["what"])
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; default: as saved.", rich_help_panel=_PANELS["what"]),
    ] = None,
    requests: Annotated[
        int, typer.Option(help="Of the simulated trace.", min=1, rich_help_panel=_PANELS["how"])
    ] = 1000,
    seed: Annotated[int, typer.Option(help="Of the trace.", min=0, rich_help_panel=_PANELS["how"])] = 0,
    processes: Annotated[
        int | None, typer.Option(help="That simulate; default: one per core.", min=1, rich_help_panel=_PANELS["how"])
    ] = None,
    exhaustive: Annotated[
        bool, typer.Option(help="Measure every layout to the end; takes long.", rich_help_panel=_PANELS["how"])
    ] = False,
    grid: Annotated[
        bool, typer.Option(help="Also the best method over tighter and looser SLOs.", rich_help_panel=_PANELS["how"])
    ] = False,
    validate: Annotated[
        int, typer.Option(help="Run so many of the best for real.", min=0, rich_help_panel=_PANELS["here"])
    ] = 0,
    measure_minutes: Annotated[
        float, typer.Option(help="For measuring this machine.", rich_help_panel=_PANELS["here"])
    ] = 5.0,
    save_cost_model: Annotated[
        Path | None, typer.Option(help="Write the measurement here, .yaml.", rich_help_panel=_PANELS["here"])
    ] = None,
    top: Annotated[int, typer.Option(help="Layouts to show.", min=1, rich_help_panel=_PANELS["out"])] = 12,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for plan.json, report.html, report.png, layout.yaml.", rich_help_panel=_PANELS["out"]
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="The plan as JSON on standard output.", rich_help_panel=_PANELS["out"])
    ] = False,
) -> None:
    """Choose among all layouts of N devices by simulating the real scheduler; no GPU is needed for hardware that is
    described. Without --hardware or --cost-model this machine is measured first."""
    from hydrainfer.config import load
    from hydrainfer.planner.objectives import Objective
    from hydrainfer.profiling.answer import answer, winners_file
    from hydrainfer.profiling.files import write_plan
    from hydrainfer.profiling.live import check_live
    from hydrainfer.profiling.live import validate as run_live
    from hydrainfer.profiling.measuring import measurer
    from hydrainfer.profiling.question import Question, prepare
    from hydrainfer.profiling.tables import conclusions, ranked
    from hydrainfer.workload.bench import command_line

    if objective not in get_args(Objective):
        raise ConfigError(
            f"--objective is one of {', '.join(get_args(Objective))}, not {objective!r}", param="objective"
        )
    here = {"model": model, "measure_minutes": measure_minutes} | ({"dtype": dtype} if dtype else {})
    log = Console(stderr=True, highlight=False)
    asked = prepare(
        Question(
            model=model,
            devices=devices,
            hardware=hardware,
            cost_model=cost_model,
            dtype=None if dtype == "auto" else dtype,
            workload=workload,
            data=data,
            pictures=pictures,
            slo=slo,
            target=target,
            requests=requests,
            seed=seed,
            objective=objective,  # type: ignore[arg-type]
            rate=rate,
        ),
        measurer(load(here).config, save_cost_model, log),
    )
    if validate:
        check_live(asked)
    with shown(log) as on_progress:
        plan, study = answer(
            asked,
            n_processes=processes,
            exhaustive=exhaustive,
            on_progress=on_progress,
            command=command_line(sys.argv),
            ratios=out is not None,
            grid=grid,
        )
    if validate:
        best = [row for row in plan.layouts if row.goodput][:validate]
        plan = msgspec.structs.replace(plan, live=run_live(asked, study, best, log))
    console = log if json else Console(highlight=False)
    if not console.is_terminal:
        console.width = 150
    console.print(ranked(plan, top))
    for line in conclusions(plan, top):
        console.print(line, markup=False, soft_wrap=True)
    if out is not None:
        paths = write_plan(plan, winners_file(plan, study, asked), out)
        console.print(f"wrote {', '.join(map(str, paths))}", markup=False, soft_wrap=True)
        if plan.best is not None:
            console.print(f"[dim]next: hydrainfer serve {model} --layout {out / 'layout.yaml'}[/dim]", soft_wrap=True)
    elif not json:
        console.print("[dim]next: the same with --out DIR for the layout's file and a page with figures[/dim]")
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode() + "\n")
    if plan.best is None:
        raise typer.Exit(NOTHING)


@contextmanager
def shown(console: Console) -> Iterator[OnProgress]:
    """A bar where somebody looks."""
    columns = (TextColumn("{task.description}"), BarColumn(30), TextColumn("{task.completed}/{task.total}"))
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)
