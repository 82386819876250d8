"""Reading of cost models, such as that of an emulated device."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Any

import msgspec

from hydrainfer.config.read import read_yaml
from hydrainfer.config.schema import ServeConfig
from hydrainfer.core import ConfigError, CostModel

_FIELDS = {f.name: f for f in msgspec.structs.fields(CostModel)}


def cost_model_of(config: ServeConfig) -> CostModel | None:
    """The cost model of an emulated device; None for a real one. Raises `ConfigError` if one is given without the
    other, or for errors in the file."""
    emulated = config.device == "emulated"
    if emulated and config.cost_model is None:
        raise ConfigError(
            "--device emulated needs --cost-model FILE, such as configs/costs/fast.yaml", param="cost_model"
        )
    if config.cost_model is None:
        return None
    if not emulated:
        raise ConfigError(
            f"--cost-model is for --device emulated, or to plan with (--layout auto, --token-budget auto); the device "
            f"is {config.device}",
            param="cost_model",
        )
    return read_cost_model(Path(config.cost_model).expanduser())


def read_cost_model(path: Path) -> CostModel:
    """The cost model in a YAML or JSON file; for a file of a measurement (configs/cost_models), its `cost`. Raises
    `ConfigError` that names file, key and rule in one line."""
    content = read_yaml(path)
    found = content.get("cost")
    terms = found if isinstance(found, dict) else content
    values = {str(key): _number(path, str(key), value) for key, value in terms.items()}
    missing = [name for name, f in _FIELDS.items() if f.required and name not in values]
    if missing:
        raise ConfigError(f"{path}: {' and '.join(missing)} missing from the cost model", param=missing[0])
    return CostModel(**values)


def _number(path: Path, key: str, value: Any) -> float:
    if key not in _FIELDS:
        near = difflib.get_close_matches(key, _FIELDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(_FIELDS)}"
        raise ConfigError(f"{path}: unknown key {key!r}; {hint}", param=key)
    least = 1.0 if key.endswith("overlap_slowdown") else 0.0
    try:  # text is accepted, too: in YAML 1.1, 1e-3 is a string
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and number >= least):
        raise ConfigError(f"{path}: {key} must be a finite number of at least {least:g}, got {value!r}", param=key)
    return number
