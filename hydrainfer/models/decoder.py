"""Text-only checkpoints: a decoder by itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hydrainfer.models.config import ModelConfig, dtype_name, require, text_config
from hydrainfer.models.llama import Llama
from hydrainfer.ops import OpSet

_BODY = re.compile(r"^model\.(?=embed_tokens\.|layers\.|norm\.)")


def canonical(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` → `text.layers.0.mlp.up_proj.weight`; unknown names stay."""
    return _BODY.sub("text.", name)


def read_as(architecture: str, model_type: str) -> Callable[[Any, Path], ModelConfig]:
    """A reader that checks and describes a transformers configuration of this type. It raises `CheckpointError`."""

    def read(hf: Any, path: Path) -> ModelConfig:
        fits = hf.model_type == model_type
        require(fits, path, f"{architecture} with model_type {hf.model_type!r} is not supported; use {model_type}")
        text = text_config(hf, path, tied=bool(hf.tie_word_embeddings))
        return ModelConfig(architecture, text, vision=None, media_tokens=(), dtype=dtype_name(hf))

    return read


def language(config: ModelConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> Llama:
    return Llama(config.text, ops, dtype, device)
