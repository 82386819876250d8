"""The published models of `models.yaml`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from hydrainfer.config import converted, read_yaml
from hydrainfer.planner.costs import DecoderShape, Hardware, read_hardware

MODELS = Path(__file__).with_name("models.yaml")
N_DEVICES = 8


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """A model, where its numbers are from, which of them are `assumed`, and its published parameters in billions: in
    all, and used per token."""

    shape: DecoderShape
    source: str
    parameters: tuple[float, float]
    assumed: tuple[str, ...] = ()


@cache
def published() -> dict[str, Published]:
    """All models of models.yaml, by name. Raises `ConfigError`."""
    return {name: model_of(name, entry) for name, entry in read_yaml(MODELS).items()}


def shape(name: str) -> DecoderShape:
    """The layers of this model of models.yaml."""
    return published()[name].shape


@cache
def h200() -> Hardware:
    """Eight H200 as one device. The peaks are published, the shares of them that an engine reaches are assumed."""
    return read_hardware("h200").joined(N_DEVICES)


def model_of(name: str, entry: dict[str, Any]) -> Published:
    """A model from its entry of models.yaml. Raises `ConfigError`."""
    beside = ("source", "parameters", "assumed")
    layers = {key: value for key, value in entry.items() if key not in beside}
    facts = {key: entry[key] for key in beside if key in entry}
    return converted({"shape": {"name": name, **layers}, **facts}, Published, str(MODELS), name)
