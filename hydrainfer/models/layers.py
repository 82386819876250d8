"""The interface of an architecture's file, which the table of families names."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, NamedTuple

from hydrainfer.checkpoint import ModelConfig, family_of
from hydrainfer.models.decoder import Decoder
from hydrainfer.models.picture import PassSize, VisionTower


class Layers(NamedTuple):
    """One architecture. `canonical(name)` maps a checkpoint's tensor name to ours; `vision` builds an empty tower from
    (`ModelConfig`, ops, dtype, device); None: the model takes text only. `language` builds an empty decoder from
    (`TextConfig`, ...). `pass_size`: that of the tower of a `VisionConfig`; None without a tower."""

    canonical: Callable[[str], str]
    vision: Callable[..., VisionTower] | None = None
    language: Callable[..., Decoder] = Decoder
    pass_size: Callable[[Any], PassSize] | None = None


def layers_of(config: ModelConfig) -> Layers:
    return resolve_name(family_of(config).layers)
