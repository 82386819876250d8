"""The architectures that can be served: the name in config.json → how to read it, name its tensors and build it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hydrainfer.config import read_json
from hydrainfer.core import CheckpointError
from hydrainfer.models import decoder, llava, llava_next, qwen
from hydrainfer.models.config import ModelConfig, require


class Family(NamedTuple):
    """One architecture. `read(hf_config, path)` checks and describes; `canonical(name)` maps a checkpoint's tensor name
    to ours; `vision` (None: takes text only) and `language` build empty towers from `(config, ops, dtype, device)`."""

    read: Callable[[Any, Path], ModelConfig]
    canonical: Callable[[str], str]
    vision: Callable[..., Any] | None
    language: Callable[..., Any]


_TEXT_ONLY = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
FAMILIES = {
    "LlavaForConditionalGeneration": Family(llava.read, llava.canonical, llava.LlavaVision, decoder.language),
    "LlavaNextForConditionalGeneration": Family(
        llava_next.read, llava.canonical, llava_next.LlavaNextVision, decoder.language
    ),
    **{name: Family(qwen.read, qwen.canonical, qwen.vision, decoder.language) for name in qwen.ARCHITECTURES.values()},
    **{
        name: Family(decoder.read_as(name, model_type), decoder.canonical, None, decoder.language)
        for name, model_type in _TEXT_ONLY.items()
    },
}


def read_config(path: str | Path) -> ModelConfig:
    """Describe a Hugging Face checkpoint directory. Raises `CheckpointError` in one line."""
    return parse_config(path).model


class ParsedConfig(NamedTuple):
    """config.json, read once: what it says of the model, and `hf`, all of it as transformers' own object."""

    model: ModelConfig
    hf: Any


def parse_config(path: str | Path) -> ParsedConfig:
    """Read the config.json of a checkpoint directory. Raises `CheckpointError` in one line."""
    path = Path(path).expanduser()
    require(path.exists(), path, "no such directory; pass a Hugging Face checkpoint directory")
    require(path.is_dir(), path, "is not a directory; pass a Hugging Face checkpoint directory")
    raw = read_json(path / "config.json")
    names = raw.get("architectures") or [f"model_type {raw.get('model_type')!r}"]
    family = FAMILIES.get(str(names[0]))
    supported = ", ".join(FAMILIES)
    require(family is not None, path, f"architecture {names[0]} is not supported; supported: {supported}")
    assert family is not None
    hf = _hf_config(path)
    return ParsedConfig(family.read(hf, path), hf)


def family_of(config: ModelConfig) -> Family:
    return FAMILIES[config.architecture]


def _hf_config(path: Path) -> Any:
    """transformers' view of config.json, for its defaults."""
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(path)
    except Exception as e:  # huggingface_hub's strict dataclasses raise kinds of their own
        first = " ".join(str(e).split())[:200] or type(e).__name__
        raise CheckpointError(f"{path}: config.json is not valid: {first}") from None
