"""The published models of `models.yaml`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

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
    return {name: _model(name, entry) for name, entry in read_yaml(MODELS).items()}


def shape(name: str) -> DecoderShape:
    """The layers of this model of models.yaml."""
    return published()[name].shape


@cache
def h200() -> Hardware:
    """Eight H200 as one device. The peaks are published, the shares of them that an engine reaches are assumed."""
    return read_hardware("h200").joined(N_DEVICES)


def _model(name: str, entry: dict[str, object]) -> Published:
    beside = {key: entry.pop(key) for key in ("source", "parameters", "assumed") if key in entry}
    return converted({"shape": {"name": name, **entry}, **beside}, Published, str(MODELS), name)
