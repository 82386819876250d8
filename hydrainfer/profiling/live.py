"""`--validate K`: the best layouts run for real, beside what the simulation says of them at the same rate."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hydrainfer.core import ConfigError, Layout
from hydrainfer.planner.search import Live, Row, Study, attempt, layout_file
from hydrainfer.profiling.question import ProfileSetup
from hydrainfer.workload.deployments import HardwareSlice
from hydrainfer.workload.measuring import Comparison, ComparisonPlan, Effort
from hydrainfer.workload.output import Shown

_SHARE = 0.8  # of the goodput: at the goodput itself, one request in ten may miss, and any deviation shows as a queue
_LEAST_S = 20.0
_REQUESTS = 100


def check_live(asked: ProfileSetup) -> None:
    """Raises `ConfigError` where the devices of the plan are not here."""
    if asked.kind == "gpu":
        import torch

        n_gpus = torch.cuda.device_count()
        if asked.cost is None or n_gpus < asked.question.devices:
            raise ConfigError(
                f"--validate runs layouts on {asked.question.devices} x {asked.device.name}, but there are {n_gpus} "
                "such GPUs here; validate on that machine, or with --cost-model configs/costs/FILE on emulated devices",
                param="validate",
            )
    elif asked.kind == "cpu" and asked.cost is None:
        raise ConfigError(
            "--validate needs a device that was measured, not described: leave --hardware out", param="validate"
        )


def validate(asked: ProfileSetup, study: Study, rows: Sequence[Row], console: Console) -> tuple[Live, ...]:
    """Runs each at 80 % of its goodput for at least 20 s; those that did not start are left out, with a word on the
    console."""
    q, found = asked.question, []
    flags = f"--device emulated --cost-model {q.cost_model}" if asked.kind == "emulated" else ""
    for row in rows:
        assert row.goodput is not None
        layout, rate = Layout.parse(row.layout), row.goodput * _SHARE
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{row.layout}.yaml"
            path.write_text(layout_file(layout, study, threads=asked.threads), "utf-8")
            plan = ComparisonPlan(
                title="validation",
                layouts=(str(path),),
                flags=flags,
                place=HardwareSlice(model=str(q.model), threads_per_instance=asked.threads),
                workload=q.workload,
                data=q.data,
                pictures=q.pictures,
                like=asked.shape.name,
                rates=(rate,),
                rounds=1,
                seed=q.seed + 1,
            )
            effort = Effort(requests=_REQUESTS, min_s=_LEAST_S)
            with Shown(console, asked.slo) as watch:
                compare = Comparison(plan, asked.workload, asked.slo, effort, watch, lambda line: console.print(line))
                compare.prepare()
                with asyncio.Runner() as runner:
                    result = runner.run(compare.run())
        if not result.runs or result.runs[0].report.ttft_s is None:
            continue  # said by then
        run, ahead = result.runs[0], attempt(study, layout, rate, hurry=False)
        ttft, tpot = run.report.ttft_s, run.report.tpot_s
        assert ttft is not None and ahead.ttft_p50 is not None and ahead.ttft_p90 is not None
        found.append(
            Live(
                layout=row.layout,
                rate=rate,
                attainment=(ahead.n_met / ahead.n, run.attainment.met.share if run.attainment else 0.0),
                ttft_p50=(ahead.ttft_p50, ttft.p50),
                ttft_p90=(ahead.ttft_p90, ttft.p90),
                tpot_p50=(ahead.tpot_p50 or 0.0, tpot.p50 if tpot else 0.0),
                tpot_p90=(ahead.tpot_p90 or 0.0, tpot.p90 if tpot else 0.0),
            )
        )
    return tuple(found)
