"""Checkpoints as `image_backend: pillow` has them, for comparisons with transformers' processors that use Pillow."""

from __future__ import annotations

from pathlib import Path

from hydrainfer.checkpoint import ModelConfig
from hydrainfer.families import parse_config, read_config
from hydrainfer.processor import ModelDescription, load_description


def configured(path: Path) -> ModelConfig:
    """What `read_config` returns, with Pillow's pixels."""
    return read_config(path).by("pillow")


def described(path: Path) -> ModelDescription:
    """What `load_description` returns, with Pillow's pixels."""
    parsed = parse_config(path)
    return load_description(path, parsed=parsed._replace(model=parsed.model.by("pillow")))
