"""The options that the verbs share, and how what was typed is read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hydrainfer.config import Slo, is_slo_part, locate, parse_slo, read_slo
from hydrainfer.core import ConfigError

WorkloadOption = Annotated[str, typer.Option("--workload", help="A name or file of configs/workloads, or a recording.")]
DataOption = Annotated[str | None, typer.Option("--data", help="A local copy of the dataset; see datasets/README.md.")]
PicturesOption = Annotated[str | None, typer.Option("--pictures", help="The folder of the dataset's pictures.")]
LikeOption = Annotated[
    str | None, typer.Option("--like", help="Answers as long as this model's, and its SLOs (configs/slo).")
]
SloOption = Annotated[
    str | None, typer.Option("--slo", help="A name or file of configs/slo, with :DATASET if not the workload's.")
]
PartsOption = Annotated[list[str] | None, typer.Option("--goodput", help="SLOs in ms: ttft:250 tpot:40 e2e:2000.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder for result.json, runs.csv and report.html.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="The result as JSON on standard output; all else goes to stderr.")
]
RequestsOption = Annotated[int, typer.Option("--requests", help="Per run, at least.")]
MinSecondsOption = Annotated[
    float | None, typer.Option("--min-seconds", help="A run lasts so long; auto: 10, or 5 TTFT SLOs.")
]
SeedOption = Annotated[
    int, typer.Option("--seed", help="The same seed sends the same requests at the same times.", min=0)
]
TimeoutOption = Annotated[float, typer.Option("--timeout-s", help="A request without an end by then has failed.")]


def named(given: Sequence[str] | None, what: str) -> list[dict[str, str]]:
    """`NAME=VALUE` each. Raises `ConfigError`."""
    pairs = [text.partition("=") for text in given or ()]
    if any(not (name and value) for name, _, value in pairs):
        raise ConfigError(f"write NAME={what.upper()}, not {', '.join(given or ())}", param="server")
    return [{"name": name, what: value} for name, _, value in pairs]


def min_seconds_of(given: float | None, slo: Slo | None) -> float:
    """So long that a queue which outgrows the TTFT SLO is seen to."""
    if given is not None:
        return given
    return max(10.0, 5 * slo.ttft_s) if slo and slo.ttft_s else 10.0


def run_to_end(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work())


def sorted_out(words: Sequence[str] | None, goodput: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """`--goodput ttft:250 tpot:40` leaves its second word among the addresses."""
    words = list(words or [])
    parts = [*(goodput or []), *(w for w in words if is_slo_part(w))]
    addresses = [w for w in words if not is_slo_part(w)]
    if len(addresses) > 1:
        raise ConfigError(f"one server at a time, not {', '.join(addresses)}; several: hydrainfer bench compare")
    return addresses, parts


def objective_of(parts: Sequence[str], slo: str | None, like: str | None, dataset: str, needed: bool) -> Slo | None:
    if parts and slo:
        raise ConfigError("give --goodput or --slo, not both", param="slo")
    if parts:
        return parse_slo(parts)
    if slo is None and like is None:
        return None
    name, _, key = (slo or like or "").partition(":")
    try:
        return read_slo(locate("slo", name), key or dataset)
    except ConfigError:
        if slo is None and not needed:  # `like` said how long answers are; no preset, no judgement
            return None
        raise


def numbers(text: str | None, what: str) -> tuple[float, ...]:
    try:
        return tuple(float(x) for x in re.split(r"[,\s]+", text.strip()) if x) if text else ()
    except ValueError:
        raise ConfigError(f"--{what} takes numbers such as 1,2,4, not {text!r}", param=what) from None
