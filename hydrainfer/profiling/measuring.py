"""The measurement of this machine, for plans that need its batch times. Measurements are kept for later plans."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
from rich.console import Console

from hydrainfer.checkpoint import model_folder, name_of
from hydrainfer.config import ServeConfig, cache_folder
from hydrainfer.machine import cpu_name, instruction_sets
from hydrainfer.planner.costs import CostFile, write_cost_file
from hydrainfer.profiling.devices import Measure
from hydrainfer.profiling.progress import OnProgress
from hydrainfer.version import __version__


def measurer(config: ServeConfig, save: Path | None, console: Console, on_progress: OnProgress) -> Measure:
    """A function that measures with the model, device, dtype, kernels and minutes of `config`. It continues earlier
    measurements with the same settings. `save`: a file for the result."""
    minutes = config.measure_minutes

    def measure(model: str, n_threads: int) -> CostFile:
        here = config if model == config.model else msgspec.structs.replace(config, revision=None, mmproj=None)
        here = msgspec.structs.replace(here, model=model, threads=config.threads or n_threads)
        name = name_of(model_folder(here))
        console.print(f"measuring {name} on this machine, for at most {minutes:g} min", markup=False)
        on_progress("load", 0, 0)
        from hydrainfer.assemble.sizes import with_dtype
        from hydrainfer.costing.measure import measure_model  # imports torch, which takes seconds

        measured = with_dtype(here)
        journal = cache_folder() / "measured" / f"{name}-{_key(measured)}.jsonl"
        journal.parent.mkdir(parents=True, exist_ok=True)
        file = measure_model(
            model,
            minutes=minutes,
            journal=journal,
            config=measured,
            on_progress=lambda share, what: on_progress(what, round(100 * share), 100),
        )
        on_progress("prepare", 0, 0)
        if save is not None:
            write_cost_file(save, file, f"Measured by hydrainfer profile {name}.")
            console.print(f"wrote {save}", markup=False, soft_wrap=True)
        return file

    return measure


def _key(config: ServeConfig) -> str:
    """A hash of all that a measurement depends on. Models of the same name in two folders have different keys."""
    import torch

    where = str(model_folder(config).resolve())
    numbers = (config.dtype, config.quantization)
    gpu = ""
    if config.device != "cpu" and torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
    machine = (cpu_name(), instruction_sets(), gpu, str(torch.__version__), __version__)
    what = (where, config.device, *numbers, config.native_kernels, config.block_tokens, config.threads, *machine)
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:12]
