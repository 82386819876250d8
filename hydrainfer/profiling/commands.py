"""`hydrainfer profile`: finds the layout that carries most of a workload within its SLOs, and what limits it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from hydrainfer.core import ConfigError
from hydrainfer.flags import command_of, with_flags
from hydrainfer.profiling.options import Profile, check_flags
from hydrainfer.profiling.progress import OnProgress, shown

if TYPE_CHECKING:
    from hydrainfer.planner.search import LayoutPlan, Study
    from hydrainfer.profiling.question import ProfileSetup

NOTHING = 1  # exit status: no layout carries anything within the SLO
ProfileCommand = command_of(Profile)


@with_flags(Profile, "model")
def profile(**flags: Any) -> None:
    """Choose among all layouts of N devices by simulating the real scheduler; no GPU is needed for hardware that is
    described. Without --hardware or --cost-model this machine is measured first."""
    from hydrainfer.checkpoint import locate_model, name_of
    from hydrainfer.families import architecture_of

    q = Profile(**flags)
    log = Console(stderr=True, highlight=False)
    if q.clusters is not None:
        _profile_clusters(q, log)
        return
    folder = locate_model(q.model)
    architecture_of(folder)  # an unknown architecture is refused before the rest is imported
    check_flags(q)
    log.print(f"planning for {name_of(folder)}, devices: {q.devices}", markup=False)
    with shown(log, "start") as on_progress:
        asked, plan, study = _answered(q, log, on_progress)
    if q.validate:
        chosen = ""
        if plan.choice:
            chosen = plan.choice.layout
        able = [row for row in plan.layouts if row.goodput]
        best = sorted(able, key=lambda row: row.layout != chosen)[: q.validate]
        from hydrainfer.profiling.live import validate

        plan = msgspec.structs.replace(plan, live=validate(asked, study, best, log))
    _finish(plan, study, asked, q, log)


def _answered(q: Profile, log: Console, on_progress: OnProgress) -> tuple[ProfileSetup, LayoutPlan, Study]:
    """The question with all that its answer needs, the plan, and the study behind it. Raises `ConfigError`."""
    from hydrainfer.config import load
    from hydrainfer.planner.search import Objective
    from hydrainfer.profiling.answer import answer
    from hydrainfer.profiling.live import check_live
    from hydrainfer.profiling.measuring import measurer
    from hydrainfer.profiling.question import prepare
    from hydrainfer.workload.measuring import command_line

    if q.objective not in get_args(Objective):
        raise ConfigError(
            f"--objective is one of {', '.join(get_args(Objective))}, not {q.objective!r}", param="objective"
        )
    settings = {
        "model": q.model,
        "measure_minutes": q.measure_minutes,
        "dtype": q.dtype,
        "quantization": q.quantization,
    }
    here = {name: value for name, value in settings.items() if value is not None}
    question = q
    if q.dtype == "auto":
        question = msgspec.structs.replace(q, dtype=None)
    on_progress("prepare", 0, 0)
    asked = prepare(question, measurer(load(here).config, q.save_cost_model, log, on_progress))
    if q.validate:
        check_live(asked)
    plan, study = answer(
        asked,
        n_processes=q.processes,
        exhaustive=q.exhaustive,
        on_progress=on_progress,
        command=command_line(sys.argv),
        ratios=q.out is not None,
        grid=q.grid,
    )
    return asked, plan, study


def _profile_clusters(q: Profile, log: Console) -> None:
    """Plan over clusters; exit with `NOTHING` if nothing meets the SLO."""
    log.print(f"planning for the clusters of {q.clusters}", markup=False, soft_wrap=True)
    from hydrainfer.profiling.cluster_answer import answer_clusters
    from hydrainfer.profiling.cluster_question import prepare_clusters
    from hydrainfer.reports.plan import cluster_conclusions, cluster_table, write_cluster_plan
    from hydrainfer.workload.measuring import command_line

    asked = prepare_clusters(q)
    with shown(log) as on_progress:
        plan = answer_clusters(asked, on_progress=on_progress, command=command_line(sys.argv))
    console = _show(cluster_table(plan), cluster_conclusions(plan), q, log)
    if q.out is not None:
        paths = write_cluster_plan(plan, q.out)
        console.print(f"wrote {', '.join(map(str, paths))}", markup=False, soft_wrap=True)
    elif not q.json:
        console.print("[dim]for a page with curves, run the same with --out DIR[/dim]")
    if q.json:
        _write_json(plan)
    if not plan.met:
        raise typer.Exit(NOTHING)


def _finish(plan: LayoutPlan, study: Study, asked: ProfileSetup, q: Profile, log: Console) -> None:
    """Show and write the plan; exit with `NOTHING` if no layout carries anything."""
    from hydrainfer.profiling.answer import winners_file
    from hydrainfer.reports.plan import conclusions, ranked, write_plan
    from hydrainfer.workload.output import next_line, say_next

    console = _show(ranked(plan, q.top), conclusions(plan, q.top), q, log)
    if q.out is not None:
        serving = None
        if plan.best is not None and asked.servable:
            serving = _serving(asked, q.out / "layout.yaml")
            plan = msgspec.structs.replace(plan, launch=next_line(*serving))
        paths = write_plan(plan, winners_file(plan, study, asked), q.out)
        console.print(f"wrote {', '.join(map(str, paths))}", markup=False, soft_wrap=True)
        if serving is not None:
            say_next(console, *serving)
    elif not q.json:
        console.print("[dim]for the layout's file and a page with figures, run the same with --out DIR[/dim]")
    if q.json:
        _write_json(plan)
    if plan.best is None:
        raise typer.Exit(NOTHING)


def _show(table: Table, lines: Iterable[str], q: Profile, log: Console) -> Console:
    """Print a plan's table and sentences; returns the console for more, which is `log` if JSON goes to standard
    output."""
    console = log if q.json else Console(highlight=False)
    if not console.is_terminal:
        console.width = 150
    if table.row_count:
        console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    return console


def _write_json(plan: msgspec.Struct) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode() + "\n")


def _serving(asked: ProfileSetup, layout: Path) -> tuple[list[str], str]:
    """The command that serves the planned layout, and a note on what to fill in if the model is only a configuration,
    which cannot be served."""
    from hydrainfer.checkpoint import has_weights, locate_model

    q = asked.question
    path = locate_model(asked.question.model)
    emulated = asked.devices.kind == "emulated"
    model = q.model
    note = ""
    needed = "weights"
    if emulated:
        needed = "tokenizer"
    if not ((path / "tokenizer.json").is_file() if emulated else has_weights(path)):
        model = "CHECKPOINT"
        note = f"CHECKPOINT: the directory with {path.name}'s {needed}"
    words = ["hydrainfer", "serve", model, "--layout", str(layout)]
    words += ["--device", "emulated", "--cost-model", str(q.cost_model)] if emulated else []
    flags = asked.flags
    if "--slo" not in flags:
        flags += ["--slo", asked.inputs.slo.inline]
    return words + flags, note
