"""`hydrainfer serve --layout auto` and `--token-budget auto`: plan, and return the configuration with the plan's
values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from hydrainfer.checkpoint import locate_model, model_folder, name_of, read_config
from hydrainfer.config import Loaded, ServeConfig, cache_folder, inline_slo
from hydrainfer.core import ConfigError, Layout
from hydrainfer.planner.search import PLANNED, layout_file
from hydrainfer.profiling.answer import answer, winners_file
from hydrainfer.profiling.commands import shown
from hydrainfer.profiling.measuring import measurer
from hydrainfer.profiling.options import ProfileQuestion
from hydrainfer.profiling.question import ProfileSetup, prepare

_BUDGETS = ("token_budget", "image_budget")
_PLANNING = ("devices", "workload", "slo", "measure_minutes")
_UNPLANNED = (
    *("order", "encode_gate", "encode_wait_s", "batching", "headroom_tokens", "step_s", "image_token_budget"),
    *("kv_cache_gib", "image_cache_gib", "landing_gib", "elastic_memory", "prefix_cache", "block_tokens"),
    *("gpu_share", "gpu_memory_fraction", "balancing", "launcher", "media_workers", "overlap"),
)
"""Options that a server uses as given, while plans assume their defaults."""


def settle(loaded: Loaded, console: Console) -> Loaded:
    """The configuration with planned values in place of "auto"; unchanged if nothing is "auto". Raises `ConfigError`,
    also if nothing can meet the SLO."""
    config = loaded.config
    autos = [name for name in _BUDGETS if getattr(config, name) == "auto"]
    given = [name for name, source in loaded.provenance.items() if source != "default"]
    if config.layout != "auto" and not autos:
        limits = inline_slo(config.slo)  # a server keeps these without a plan, too
        if idle := [name for name in _PLANNING if name in given and not (name == "slo" and limits)]:
            said = f"--{_flag(idle[0])} is for --layout auto, or --token-budget auto"
            if idle[0] == "slo":
                said = said.replace("--slo", f"--slo {config.slo} names a preset or a file, which", 1)
                said += "; a server keeps limits in seconds, such as --slo ttft=2,tpot=0.05"
            raise ConfigError(said, param=idle[0])
        return loaded
    if config.layout == "auto":
        if fixed := [name for name in (*_BUDGETS, "max_running") if name in given and name not in autos]:
            raise ConfigError(f"--layout auto chooses --{_flag(fixed[0])} as well; leave it out", param=fixed[0])
        n_devices = config.devices or _n_gpus(config)
    elif Path(config.layout).suffix in (".yaml", ".yml"):
        raise ConfigError(f"with --{_flag(autos[0])} auto, name a layout such as 1E1PD, not a file", param=autos[0])
    elif config.devices is not None:
        raise ConfigError("--devices is for --layout auto; this layout says how many there are", param="devices")
    else:
        n_devices = len(Layout.parse(config.layout).instances)
    named = () if config.overlap == "auto" else ("overlap",)  # the file leaves these to the flag
    asked = prepare(_question(config, n_devices), measurer(config, None, console))
    if unplanned := ", ".join(f"--{_flag(name)}" for name in _UNPLANNED if name in given):
        console.print(f"the plan counts with the defaults of {unplanned}", markup=False, soft_wrap=True)
    if config.layout == "auto":
        text = _best(asked, console, [name for name in PLANNED if name not in named])
    else:
        only = [name for name in (*autos, "overlap") if name not in named]
        text = layout_file(Layout.parse(config.layout), asked.study(), threads=asked.threads, only=only)
    path = cache_folder() / "layouts" / f"{name_of(locate_model(asked.question.model))}-{n_devices}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    on_cpu = asked.kind == "cpu" and config.device != "emulated"
    settled = msgspec.structs.replace(
        config,
        layout=str(path),
        slo=asked.slo.inline if on_cpu else config.slo,
        device="cpu" if on_cpu else config.device,
        dtype=config.dtype if config.device == "emulated" else asked.dtype or config.dtype,
        cost_model=config.cost_model if config.device == "emulated" else None,
        **{f.name: f.default for f in msgspec.structs.fields(ServeConfig) if f.name in autos},  # the file sets these
    )
    sources = {"layout": "planned"} | dict.fromkeys((*autos, "cost_model"), "default")
    return Loaded(settled, loaded.provenance | sources)


def _best(asked: ProfileSetup, console: Console, only: Sequence[str]) -> str:
    """The file of the best layout, with `only` these options."""
    with shown(console) as on_progress:
        plan, study = answer(asked, on_progress=on_progress, command="hydrainfer serve --layout auto")
    text = winners_file(plan, study, asked, only)
    best = plan.choice
    if text is None or best is None:
        raise ConfigError(f"no layout carries anything of {plan.workload['dataset']} within {plan.slo}", param="slo")
    console.print(
        f"planned {best.layout}, of {len(plan.layouts)} layouts: {best.goodput:.3g} requests/s of "
        f"{plan.workload['dataset']} within {plan.slo}; it carries no more because of {best.limited_by}",
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
    folder = model_folder(config) if config.revision or config.mmproj else locate_model(config.model)
    sees = read_config(folder).vision is not None
    return ProfileQuestion(
        model=str(folder) if config.revision or config.mmproj else config.model,
        devices=n_devices,
        cost_model=Path(config.cost_model) if config.cost_model else None,
        dtype=None if config.dtype == "auto" else config.dtype,
        quantization=config.quantization,
        workload=config.workload or ("textcaps" if sees else "text"),
        slo=config.slo or "",
    )
