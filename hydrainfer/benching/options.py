"""The flags of the verbs, and how their values are read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from hydrainfer.config import Slo, inline_slo, is_slo_part, locate, parse_slo, read_slo
from hydrainfer.core import ConfigError
from hydrainfer.flags import flag

if TYPE_CHECKING:  # takes long to import
    from hydrainfer.workload.sources import Workload

URL = "http://127.0.0.1:8000"
_SERVER, _SENT, _SLO, _LOAD = "The server", "What is sent", "What is wanted of it", "How it is loaded"
_SEARCH, _OUT, _COMPARED, _HARDWARE = "The search for goodput", "What comes out", "What is compared", "Hardware"

WorkloadName = Annotated[str, flag(_SENT, "A name or file of configs/workloads, or a recording.")]
Data = Annotated[str | None, flag(_SENT, "A local copy of the dataset; see datasets/README.md.")]
Pictures = Annotated[str | None, flag(_SENT, "The folder of the dataset's pictures.")]
Like = Annotated[str | None, flag(_SENT, "Answers as long as this model's, and its SLOs (configs/slo).")]
Seed = Annotated[int, flag(_SENT, "The same seed sends the same requests at the same times.", ge=0)]
Preset = Annotated[
    str | None, flag(_SLO, "ttft=0.25,tpot=0.04 (s), or a preset of configs/slo, with :DATASET if not the workload's.")
]
Parts = Annotated[list[str] | None, flag(_SLO, "SLOs in ms: ttft:250 tpot:40 e2e:2000.")]
MinSeconds = Annotated[float | None, flag(_LOAD, "The least length of a run; auto: 10, or 5 TTFT SLOs.")]
Timeout = Annotated[float, flag(_LOAD, "A request without an end by then has failed.")]
ModelName = Annotated[str, flag(_SERVER, "Its name; default: the first the server has.")]
ApiKey = Annotated[str | None, flag(_SERVER, "Bearer token.", envvar=["HYDRAINFER_API_KEY", "OPENAI_API_KEY"])]
_FOLDER = flag(_OUT, "Folder for result.json, runs.csv and report.html.")
JsonFlag = Annotated[
    bool, flag(_OUT, "The result as JSON on standard output; all else goes to stderr.", param_decls=["--json"])
]


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `bench run`."""

    urls: Annotated[list[str] | None, flag("", f"The server (default {URL}).")] = None
    model: ModelName = ""
    api_key: ApiKey = None
    name: Annotated[str, flag(_SERVER, "What to call the server in the report.")] = "server"
    workload: WorkloadName = "textcaps"
    data: Data = None
    pictures: Pictures = None
    like: Like = None
    seed: Seed = 0
    slo: Preset = None
    goodput: Parts = None
    rate: Annotated[str | None, flag(_LOAD, "Requests per second, one or several: 1,2,4.")] = None
    concurrency: Annotated[str | None, flag(_LOAD, "Closed loop: clients at once, one or several.")] = None
    arrivals: Annotated[str, flag(_LOAD, "poisson, constant, gamma or replay.")] = "poisson"
    burst_shape: Annotated[float, flag(_LOAD, "Of gamma arrivals: below 1 is burstier than Poisson.")] = 0.5
    arrival_trace: Annotated[Path | None, flag(_LOAD, "Replay these times (Azure, BurstGPT, Mooncake).")] = None
    speed: Annotated[float, flag(_LOAD, "The speed of a replay, as a multiple of the recorded one.")] = 1.0
    requests: Annotated[int, flag(_LOAD, "Per run, at least.")] = 100
    min_seconds: MinSeconds = None
    runs: Annotated[int, flag(_LOAD, "How often each load is run, with another seed each time.", ge=1)] = 1
    timeout_s: Timeout = 600.0
    first_rate: Annotated[float | None, flag(_SEARCH, "Where the search starts; default: from one alone.")] = None
    max_rate: Annotated[float, flag(_SEARCH, "Where the search ends.")] = 1e4
    tolerance: Annotated[float, flag(_SEARCH, "How exact the search is, relative.")] = 0.05
    search_minutes: Annotated[float, flag(_SEARCH, "Minutes that a search may take, decided or not.", ge=0)] = 4.0
    json: JsonFlag = False
    out: Annotated[Path | None, _FOLDER] = None


class Compare(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `bench compare`. A flag that is None takes its value from the file, or from the default in
    `ComparisonPlan`."""

    model: Annotated[str | None, flag("", "For the layouts, as `serve` takes it; default: builtin.")] = None
    config: Annotated[Path | None, flag(_COMPARED, "A file of benchmarks/compare; options go before it.")] = None
    layouts: Annotated[str | None, flag(_COMPARED, "Started here in turn: 2EPD,1EP1D,1E1PD, or files.")] = None
    server: Annotated[list[str] | None, flag(_COMPARED, "One that runs already: NAME=URL. Repeatable.")] = None
    start: Annotated[list[str] | None, flag(_COMPARED, "One to start: NAME=COMMAND with {port}. Repeatable.")] = None
    flags: Annotated[str | None, flag(_COMPARED, "More flags of `hydrainfer serve`, for all layouts.")] = None
    cores: Annotated[str | None, flag(_HARDWARE, "What each deployment gets as a whole, e.g. 0-3.")] = None
    gpus: Annotated[str | None, flag(_HARDWARE, "Likewise, for CUDA_VISIBLE_DEVICES.")] = None
    threads_per_instance: Annotated[int | None, flag(_HARDWARE, "Default: as many as there are cores.", ge=1)] = None
    workload: Annotated[str | None, flag(_SENT, "As of `bench run`; default textcaps.")] = None
    data: Data = None
    pictures: Pictures = None
    like: Like = None
    seed: Annotated[int | None, flag(_SENT, "Of the traffic.", ge=0)] = None
    slo: Preset = None
    goodput: Parts = None
    rates: Annotated[str | None, flag(_LOAD, "Requests per second, all in every round: 1,2,4.")] = None
    rounds: Annotated[int | None, flag(_LOAD, "With another seed each.", ge=1)] = None
    requests: Annotated[int | None, flag(_LOAD, "Per run, at least.", ge=1)] = None
    min_seconds: MinSeconds = None
    json: JsonFlag = False
    out: Annotated[Path, _FOLDER] = Path("comparison")

    def as_plan(self) -> dict[str, Any]:
        """The fields of a `ComparisonPlan` that were given."""
        plan: dict[str, Any] = {
            "layouts": self.layouts.split(",") if self.layouts else None,
            "servers": named(self.server, "url") + named(self.start, "start") or None,
            "slo": " ".join(self.goodput) if self.goodput else self.slo,
            "rates": numbers(self.rates, "rates") or None,
            "min_s": self.min_seconds,
        }
        same = ("flags", "workload", "data", "pictures", "like", "rounds", "requests", "seed")
        plan |= {name: getattr(self, name) for name in same}
        place = {name: getattr(self, name) for name in ("cores", "gpus", "threads_per_instance")}
        place["model"] = self.model
        return _said(plan) | {"place": _said(place)}


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `trace`."""

    workload: Annotated[str, flag("", "A name or file of configs/workloads.")]
    url: Annotated[str | None, flag(_SERVER, "Ask this server how long its answers are; without: as drawn.")] = None
    model: ModelName = ""
    api_key: ApiKey = None
    data: Data = None
    pictures: Pictures = None
    like: Like = None
    requests: Annotated[int, flag(_SENT, "How many.", ge=1)] = 500
    max_tokens: Annotated[int | None, flag(_SENT, "Of an answer; default: the workload's.", ge=1)] = None
    seed: Seed = 0
    concurrency: Annotated[int, flag(_LOAD, "Clients at once.", ge=1)] = 8
    timeout_s: Timeout = 600.0
    out: Annotated[Path, flag(_OUT, "The recording, .jsonl.")]


def _said(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def named(given: Sequence[str] | None, what: str) -> list[dict[str, str]]:
    """The pairs of `NAME=VALUE` words. Raises `ConfigError`."""
    pairs = [text.partition("=") for text in given or ()]
    if any(not (name and value) for name, _, value in pairs):
        raise ConfigError(f"write NAME={what.upper()}, not {', '.join(given or ())}", param="server")
    return [{"name": name, what: value} for name, _, value in pairs]


def min_seconds_of(given: float | None, slo: Slo | None) -> float:
    """The minimum length of a run: long enough for a queue to outgrow the TTFT SLO."""
    if given is not None:
        return given
    if slo and slo.ttft_s:
        return max(10.0, 5 * slo.ttft_s)
    return 10.0


def run_to_end(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work())


def sorted_out(words: Sequence[str] | None, goodput: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The server addresses and the SLO parts among the words. In `--goodput ttft:250 tpot:40`, the second word is
    parsed as an address. Raises `ConfigError` for more than one address."""
    words = list(words or [])
    parts = [*(goodput or []), *(w for w in words if is_slo_part(w))]
    addresses = [w for w in words if not is_slo_part(w)]
    if parts and len(addresses) > 1 and (wrong := [w for w in addresses if re.fullmatch(r"\w+[:=][\d.]+", w)]):
        parse_slo(wrong)  # its error says how to write them
    if len(addresses) > 1:
        raise ConfigError(f"one server at a time, not {', '.join(addresses)}; several: hydrainfer bench compare")
    return addresses, parts


def objective_of(parts: Sequence[str], slo: str | None, like: str | None, dataset: str, needed: bool) -> Slo | None:
    if parts and slo:
        raise ConfigError("give --goodput or --slo, not both", param="slo")
    if (limits := parse_slo(parts) if parts else inline_slo(slo)) is not None:
        return limits
    if slo is None and like is None:
        return None
    name, _, key = (slo or like or "").partition(":")
    try:
        return read_slo(locate("slo", name), key or dataset)
    except ConfigError:
        if slo is None and not needed:  # `like` only sets the answer lengths if it has no SLO preset
            return None
        raise


def check_like(like: str | None, workload: Workload) -> None:
    """Raises `ConfigError` if `like` is a model for which there are neither SLOs nor answer lengths of the workload."""
    if like is None or workload.named_like(like):
        return
    try:
        locate("slo", like.partition(":")[0])
    except ConfigError:
        known = ", ".join(workload.models) or "none with answer lengths"
        raise ConfigError(
            f"--like {like}: this model is not known; {workload.dataset} has {known}", param="like"
        ) from None


def numbers(text: str | None, what: str) -> tuple[float, ...]:
    try:
        if text:
            return tuple(float(x) for x in re.split(r"[,\s]+", text.strip()) if x)
        return ()
    except ValueError:
        raise ConfigError(f"--{what} takes numbers such as 1,2,4, not {text!r}", param=what) from None
