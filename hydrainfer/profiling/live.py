"""`--validate K`: runs the best layouts for real and compares each with its simulation at the same rate."""

from __future__ import annotations

import asyncio
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from hydrainfer.core import ConfigError, Layout
from hydrainfer.planner.nouns import CoreTime
from hydrainfer.planner.search import Bounds, Live, Row, Study, attempt, layout_file, measured
from hydrainfer.profiling.question import ProfileSetup, burst_shape
from hydrainfer.workload.deployments import HardwareSlice
from hydrainfer.workload.measuring import Comparison, ComparisonPlan, Effort
from hydrainfer.workload.output import Shown
from hydrainfer.workload.results import BenchResult

_ERROR = 0.25  # if the plan states no model error
_LEAST_S = 18.0
_REQUESTS = 100
# benchmarks/results/b25_server_cpu.json; megapixels are of JPEG pictures
_CLIENT = CoreTime(request_s=0.09e-3, megapixel_s=0.31e-3, token_s=12e-6)


def check_live(asked: ProfileSetup) -> None:
    """Raises `ConfigError` if the devices of the plan are not on this machine, or the workload is a recording with
    times, or has a store, which a run would fill."""
    if asked.question.store is not None:
        raise ConfigError("--validate would fill the store: leave --store or --validate out", param="validate")
    if asked.devices.kind == "gpu":
        import torch

        n_gpus = torch.cuda.device_count()
        if asked.devices.cost is None or n_gpus < asked.question.devices:
            raise ConfigError(
                f"--validate runs layouts on {asked.question.devices} x {asked.devices.device.name}, but there are "
                f"{n_gpus} such GPUs here; validate on that machine, or with --cost-model configs/costs/FILE on "
                "emulated devices",
                param="validate",
            )
    elif asked.devices.kind == "cpu" and asked.devices.cost is None:
        raise ConfigError(
            "--validate needs a device that was measured, not described: leave --hardware out", param="validate"
        )
    if asked.question.arrivals is None and any(chat.at_s is not None for chat in asked.workload.chats(1, 0)):
        raise ConfigError(
            "--validate sends requests by chance, not at the times of a recording: plan with --arrivals poisson",
            param="validate",
        )


def _with_client(study: Study) -> Study:
    """The study with the client of `--validate` on the cores of the server."""
    return msgspec.structs.replace(study, server=msgspec.structs.replace(study.server, client=_CLIENT))


def validate(asked: ProfileSetup, study: Study, rows: Sequence[Row], console: Console) -> tuple[Live, ...]:
    """Run each layout at both ends of the plan's model error around its goodput, predicted with the client on the same
    machine. Layouts that did not start are left out, with a message on the console."""
    comparisons = []
    study = _with_client(study)
    by = 1.0 + (asked.inputs.model_error or _ERROR)
    for row in rows:
        assert row.goodput
        layout = Layout.parse(row.layout)
        bound = Bounds(study).of(layout).rate
        rate = measured(study, layout, bound, min(row.goodput, bound)).goodput
        if not rate:
            console.print(f"{row.layout} carries nothing beside a client on these cores", markup=False)
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{row.layout}.yaml"
            text = layout_file(layout, study, threads=asked.devices.threads, tiers=asked.tiers.options)
            path.write_text(text, "utf-8")
            result = _run(asked, path, (rate / by, rate * by), console)
        if result.runs and result.runs[0].report.ttft_s is not None:  # else the reason was printed
            comparisons.append(_beside(study, row, rate, result))
    return tuple(comparisons)


def _run(asked: ProfileSetup, path: Path, rates: tuple[float, ...], console: Console) -> BenchResult:
    q = asked.question
    flags = asked.flags
    if asked.devices.kind == "emulated":
        flags += ["--device", "emulated", "--cost-model", str(q.cost_model)]
    plan = ComparisonPlan(
        title="validation",
        layouts=(str(path),),
        flags=shlex.join(flags),
        place=HardwareSlice(model=str(q.model), threads_per_instance=asked.devices.threads),
        workload=q.workload,
        data=q.data,
        pictures=q.pictures,
        like=asked.inputs.shape.name,
        target=q.target,
        arrivals=q.arrivals or "poisson",
        burst_shape=burst_shape(q),
        rates=rates,
        rounds=1,
        seed=q.seed + 1,
    )
    effort = Effort(requests=_REQUESTS, min_s=_LEAST_S)
    with Shown(console, asked.inputs.slo) as watch:
        compare = Comparison(plan, asked.workload, asked.inputs.slo, effort, watch, lambda line: console.print(line))
        compare.prepare()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(compare.run())


def _beside(study: Study, row: Row, predicted: float, result: BenchResult) -> Live:
    """The first run, which has the lowest rate, compared with its prediction; and the goodput from all runs."""
    run = result.runs[0]
    layout = Layout.parse(row.layout)
    assert run.rate_per_s is not None and row.goodput is not None
    ahead = attempt(study, layout, run.rate_per_s, hurry=False)
    ttft = run.report.ttft_s
    tpot = run.report.tpot_s
    assert ttft is not None and ahead.ttft_p50 is not None and ahead.ttft_p90 is not None
    goodput = next(iter(result.goodput.values()), None)
    return Live(
        layout=row.layout,
        rate=run.rate_per_s,
        planned=row.goodput,
        goodput=(predicted, goodput.rate_per_s if goodput else 0.0),
        goodput_low=goodput.low if goodput else None,
        goodput_high=goodput.high if goodput else None,
        attainment=(ahead.n_met / ahead.n, run.attainment.met.share if run.attainment else 0.0),
        ttft_p50=(ahead.ttft_p50, ttft.p50),
        ttft_p90=(ahead.ttft_p90, ttft.p90),
        tpot_p50=(ahead.tpot_p50 or 0.0, tpot.p50 if tpot else 0.0),
        tpot_p90=(ahead.tpot_p90 or 0.0, tpot.p90 if tpot else 0.0),
    )
