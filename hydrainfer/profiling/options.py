"""The question to `hydrainfer profile`; its fields are the flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from hydrainfer.config import MEASURE_MINUTES
from hydrainfer.config.schema import Quantization
from hydrainfer.core import ConfigError
from hydrainfer.flags import check_out, flag

_WHAT, _HOW, _HERE, _OUT = "What to plan for", "How it is searched", "This machine", "What comes out"


REQUESTS = 1000
"""The requests of the first run at a rate, by default, if the workload has as many."""


class ProfileQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The question to plan for. `hardware`: a description; `cost_model`: a measurement (configs/cost_models), or the
    assumed times of emulated devices (configs/costs); without both, this machine is measured. `slo`: parts such as
    ttft=8,tpot=0.08, or a preset; empty for the preset of this model and workload. `rate`: for the objectives that need
    one."""

    model: Annotated[str, flag("", "A checkpoint, builtin, or a name of configs/models such as llava-next-7b.")]
    devices: Annotated[int, flag(_WHAT, "Number of devices to plan for.", show_default=False)] = 0
    clusters: Annotated[
        str | None,
        flag(_WHAT, "Plan for these in place of devices: a home cluster, far ones that prefill, and links; a file."),
    ] = None
    hardware: Annotated[
        str | None, flag(_WHAT, "Described by configs/hardware, e.g. h800, or a file; unlike ones: h20:4,h800:4.")
    ] = None
    cost_model: Annotated[Path | None, flag(_WHAT, "Measured before, or of emulated devices.")] = None
    workload: Annotated[str, flag(_WHAT, "A name or file of configs/workloads, or a recording.")] = "textcaps"
    weights: Annotated[
        str, flag(_WHAT, "Weight format on described devices: as-dtype, fp8, int8 or int4 (the decoder's layers).")
    ] = "as-dtype"
    tensor_parallel: Annotated[int, flag(_WHAT, "Described devices that make up one instance.", ge=1)] = 1
    price: Annotated[
        str | None,
        flag(
            _WHAT,
            "Price of one device for one hour, in any currency: 2.5, or h20=1.2,h800=2.5. Adds what requests cost.",
        ),
    ] = None
    data: Annotated[str | None, flag(_WHAT, "A local copy of the dataset.")] = None
    pictures: Annotated[str | None, flag(_WHAT, "The folder of its pictures.")] = None
    arrivals: Annotated[str | None, flag(_WHAT, "poisson, constant or gamma; default: as recorded, else poisson.")] = (
        None
    )
    burst_shape: Annotated[
        float | None, flag(_WHAT, "Of gamma arrivals: below 1 is burstier than Poisson; default 0.5.")
    ] = None
    engine: Annotated[str, flag(_WHAT, "hydrainfer, vllm or sglang, or a file like configs/engines.")] = "hydrainfer"
    slo: Annotated[
        str, flag(_WHAT, "ttft=8,tpot=0.08 (s), or a preset of configs/slo; default: that of the model.")
    ] = ""
    target: Annotated[float, flag(_WHAT, "Share of the requests that have to meet it.")] = 0.9
    objective: Annotated[
        str,
        flag(
            _WHAT,
            "goodput; devices: fewest for --rate; ttft or tpot: least p90 at --rate; with --clusters: goodput or cost.",
        ),
    ] = "goodput"
    rate: Annotated[float | None, flag(_WHAT, "Requests per second, for the objectives devices, ttft and tpot.")] = None
    dtype: Annotated[str | None, flag(_WHAT, "float32, bfloat16 or float16; default: as saved.")] = None
    quantization: Annotated[
        Quantization, flag(_WHAT, "int8: the decoder's matrices in 8 bits, as `serve` makes them; for CPUs.")
    ] = "none"
    drafts: Annotated[
        str, flag(_WHAT, "off, or right=SHARE: steps verify drafts, of which so many are right (docs/drafts.md).")
    ] = "off"
    max_drafts: Annotated[int, flag(_WHAT, "Drafts of a sequence in one step.", ge=1)] = 7
    host_cache_gib: Annotated[
        float, flag(_WHAT, "Host memory of an instance, as `serve` takes it (docs/tiers.md).", ge=0)
    ] = 0.0
    store: Annotated[
        str | None,
        flag(_WHAT, "A store that all instances share, as `serve` takes it: dir:/path?gib=50. It is not filled."),
    ] = None
    store_gib_per_s: Annotated[
        float | None, flag(_WHAT, "How fast an instance reads from it; default: measured, if it is there.")
    ] = None
    requests: Annotated[
        int | None,
        flag(_HOW, f"Requests in the simulated trace; default: {REQUESTS}, or all that a recording has.", ge=1),
    ] = None
    seed: Annotated[int, flag(_HOW, "Of the trace.", ge=0)] = 0


class Profile(ProfileQuestion, frozen=True, kw_only=True):
    """A question, with options for the search and for the output."""

    processes: Annotated[int | None, flag(_HOW, "Processes that simulate; default: one per core.", ge=1)] = None
    exhaustive: Annotated[bool, flag(_HOW, "Measure every layout to the end; takes long.")] = False
    grid: Annotated[bool, flag(_HOW, "Also the best method over tighter and looser SLOs.")] = False
    validate: Annotated[
        int, flag(_HERE, "Number of the best layouts to run for real; without a number, 1.", ge=0, bare="1")
    ] = 0
    measure_minutes: Annotated[
        float | None, flag(_HERE, f"At most, for measuring this machine; default: {MEASURE_MINUTES:g}.")
    ] = None
    save_cost_model: Annotated[Path | None, flag(_HERE, "Write the measurement here, .yaml.")] = None
    top: Annotated[int, flag(_OUT, "Layouts to show.", ge=1)] = 12
    out: Annotated[Path | None, flag(_OUT, "Folder for plan.json, report.html, layout.yaml.")] = None
    json: Annotated[bool, flag(_OUT, "The plan as JSON on standard output.", param_decls=["--json"])] = False


def changed_flags(q: Profile) -> list[str]:
    """The names of the fields that are not at their defaults."""
    return [field.name for field in msgspec.structs.fields(Profile) if getattr(q, field.name) != field.default]


def check_flags(q: Profile) -> None:
    """Raises `ConfigError` for flags that have no effect with the other flags, if there is nothing to plan for, and if
    `--out` cannot be a folder."""
    if not q.devices:
        raise ConfigError("give --devices N, the number to plan for, or --clusters FILE", param="devices")
    times = "--hardware" if q.hardware is not None else "--cost-model" if q.cost_model is not None else None
    for name, given in (("save-cost-model", q.save_cost_model), ("measure-minutes", q.measure_minutes)):
        if given is not None and times is not None:
            raise ConfigError(
                f"--{name} is for measuring this machine, and with {times} nothing is measured: leave one of them out",
                param=name.replace("-", "_"),
            )
    if q.exhaustive and q.objective != "goodput":
        raise ConfigError(
            "--exhaustive is for --objective goodput: all layouts that may carry --rate are tried anyway; leave it out",
            param="exhaustive",
        )
    if q.rate is not None and q.objective == "goodput":
        raise ConfigError(
            "--rate is for the objectives devices, ttft and tpot: --objective goodput finds the rate; leave it out",
            param="rate",
        )
    if q.grid and q.out is None and not q.json:
        raise ConfigError("--grid is for the page and the JSON: give --out DIR or --json as well", param="grid")
    if q.out is not None:
        check_out(q.out)
