"""`hydrainfer serve --layout auto` and `--token-budget auto`: plan, and return the configuration with the plan's
values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from hydrainfer.checkpoint import locate_model, model_folder, name_of
from hydrainfer.config import Loaded, ServeConfig, cache_folder, inline_slo
from hydrainfer.core import ConfigError, Guessing, Layout
from hydrainfer.families import read_config
from hydrainfer.planner.search import PLANNED, layout_file
from hydrainfer.profiling.answer import answer, winners_file
from hydrainfer.profiling.measuring import measurer
from hydrainfer.profiling.options import ProfileQuestion
from hydrainfer.profiling.progress import shown
from hydrainfer.profiling.question import ProfileSetup, prepare

_BUDGETS = ("token_budget", "image_budget")
_PLANNING = ("devices", "workload", "slo", "measure_minutes")
_UNPLANNED = (
    *("order", "encode_gate", "encode_wait_s", "batching", "headroom_tokens", "step_s", "image_token_budget"),
    *("kv_cache_gib", "image_cache_gib", "elastic_memory", "prefix_cache", "block_tokens"),
    *("gpu_share", "gpu_memory_fraction", "balancing", "launcher", "media_workers", "overlap"),
)
"""Options that a server uses as given, while plans assume their defaults."""


def settle(loaded: Loaded, console: Console) -> Loaded:
    """The configuration with planned values in place of "auto"; unchanged if nothing is "auto". Raises `ConfigError`,
    also if nothing can meet the SLO."""
    config = loaded.config
    autos = [name for name in _BUDGETS if getattr(config, name) == "auto"]
    explicit = [name for name, source in loaded.provenance.items() if source != "default"]
    if config.layout != "auto" and not autos:
        _check_planning_options(config, explicit)
        return loaded
    n_devices = _n_devices(config, autos, explicit)
    with shown(console) as on_progress:
        asked = prepare(_question(config, n_devices), measurer(config, None, console, on_progress))
    if unplanned := ", ".join(f"--{_flag(name)}" for name in _UNPLANNED if name in explicit):
        console.print(f"the plan counts with the defaults of {unplanned}", markup=False, soft_wrap=True)
    text = _layout(config, autos, asked, console)
    path = cache_folder() / "layouts" / f"{name_of(locate_model(asked.question.model))}-{n_devices}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    sources = {"layout": "planned"} | dict.fromkeys((*autos, "cost_model"), "default")
    return Loaded(_settled(config, autos, asked, path), loaded.provenance | sources)


def _check_planning_options(config: ServeConfig, explicit: Sequence[str]) -> None:
    """Raises `ConfigError` for options of a plan where nothing is planned."""
    for name in _PLANNING:
        if name not in explicit:
            continue
        message = f"--{_flag(name)} is for --layout auto, or --token-budget auto"
        if name == "slo":
            if inline_slo(config.slo):  # a server keeps limits without a plan, too
                continue
            message = message.replace("--slo", f"--slo {config.slo} names a preset or a file, which", 1)
            message += "; a server keeps limits in seconds, such as --slo ttft=2,tpot=0.05"
        raise ConfigError(message, param=name)


def _n_devices(config: ServeConfig, autos: Sequence[str], explicit: Sequence[str]) -> int:
    """The number of instances to plan for. Raises `ConfigError` for options that exclude each other."""
    if config.layout == "auto":
        for name in (*_BUDGETS, "max_running"):
            if name in explicit and name not in autos:
                raise ConfigError(f"--layout auto chooses --{_flag(name)} as well; leave it out", param=name)
        return config.devices or _n_gpus(config)
    if Path(config.layout).suffix in (".yaml", ".yml"):
        raise ConfigError(f"with --{_flag(autos[0])} auto, name a layout such as 1E1PD, not a file", param=autos[0])
    if config.devices is not None:
        raise ConfigError("--devices is for --layout auto; this layout says how many there are", param="devices")
    return len(Layout.parse(config.layout).instances)


def _layout(config: ServeConfig, autos: Sequence[str], asked: ProfileSetup, console: Console) -> str:
    """The file of the layout, with the planned options. An overlap that was chosen stays with its flag."""
    options: tuple[str, ...] = PLANNED
    if config.layout != "auto":
        options = (*autos, "overlap")
    if config.overlap != "auto":
        options = tuple(name for name in options if name != "overlap")
    if config.layout == "auto":
        return _best(asked, console, options)
    study = asked.inputs.study()
    return layout_file(Layout.parse(config.layout), study, threads=asked.devices.threads, only=options)


def _settled(config: ServeConfig, autos: Sequence[str], asked: ProfileSetup, layout: Path) -> ServeConfig:
    """The configuration that serves this file of a layout."""
    # the file sets the options that were "auto"
    defaults = {f.name: f.default for f in msgspec.structs.fields(ServeConfig) if f.name in autos}
    config = msgspec.structs.replace(config, layout=str(layout), **defaults)
    if config.device == "emulated":
        return config
    if asked.devices.kind == "cpu":
        config = msgspec.structs.replace(config, device="cpu", slo=asked.inputs.slo.inline)
    return msgspec.structs.replace(config, dtype=asked.dtype or config.dtype, cost_model=None)


def _best(asked: ProfileSetup, console: Console, only: Sequence[str]) -> str:
    """The file of the best layout, with `only` these options."""
    with shown(console) as on_progress:
        plan, study = answer(asked, on_progress=on_progress, command="hydrainfer serve --layout auto")
    text = winners_file(plan, study, asked, only)
    best = plan.choice
    if text is None or best is None:
        why = plan.impossible or f"no layout carries anything of {plan.workload['dataset']} within {plan.slo}"
        raise ConfigError(why, param="slo")
    console.print(
        f"planned {best.layout}, of {len(plan.layouts)} layouts: {best.goodput:.3g} requests/s of "
        f"{plan.workload['dataset']} within {plan.slo}; why it carries no more: {best.why}",
        soft_wrap=True,
        markup=False,
    )
    return text


def _n_gpus(config: ServeConfig) -> int:
    import torch

    if config.device in ("auto", "cuda") and torch.cuda.is_available():
        return torch.cuda.device_count()
    raise ConfigError("--layout auto needs --devices, the number of instances, where there is no GPU", param="devices")


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _question(config: ServeConfig, n_devices: int) -> ProfileQuestion:
    model = config.model
    folder = locate_model(model)
    if config.revision or config.mmproj:
        folder = model_folder(config)
        model = str(folder)
    workload = config.workload
    if not workload:
        workload = "text"
        if read_config(folder).vision is not None:
            workload = "textcaps"
    cost_model = None
    if config.cost_model:
        cost_model = Path(config.cost_model)
    dtype = config.dtype
    return ProfileQuestion(
        model=model,
        devices=n_devices,
        cost_model=cost_model,
        dtype=None if dtype == "auto" else dtype,
        quantization=config.quantization,
        workload=workload,
        slo=config.slo or "",
        drafts=config.drafts if Guessing.of(config.drafts, config.max_drafts) else "off",
        max_drafts=config.max_drafts,
        host_cache_gib=config.host_cache_gib,
        store=config.store,
    )
