"""Models as numbers for the planner, from their configuration alone: no weights, no tokenizer needed, no device.

A model is a checkpoint directory or the name of one of configs/models, which hold the published config.json and
preprocessor_config.json of the models that the paper measures (LLaVA-NeXT-7B is the one on Vicuna).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hydrainfer.assemble.fits import fit_anyres, fit_qwen
from hydrainfer.core import CheckpointError, ConfigError
from hydrainfer.models.config import read_json, require
from hydrainfer.planner.shape import ModelShape, VisionShape
from hydrainfer.planner.workloads import Prompts, words_to_tokens
from hydrainfer.processor import ChatMessage, ImagePart, ModelDescription, TextPart, load_description
from hydrainfer.processor.clip import llava_images
from hydrainfer.processor.prompt import encode

Fit = Callable[[int, int], int]
_REFERENCE = (1024, 768)  # pixels; the commonest picture of the paper's data sets


class _Family(NamedTuple):
    """How one kind of config.json is read. `fit`: embedding tokens of a picture of a width and height. `n_template`:
    tokens of the chat template, with the system text that it puts in; `n_around`: beside each picture."""

    vision: Callable[[Any, Fit], VisionShape]
    fit: Callable[[Any, dict[str, Any]], Fit]
    n_template: int
    n_around: int = 0


def locate_model(name: str) -> Path:
    """A checkpoint directory, or that of a shipped configuration. Raises `ConfigError` that names those there are."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    folders = [root / "configs/models" for root in (Path(__file__).parents[2], Path(sys.prefix) / "share/hydrainfer")]
    found = {p.parent.name: p.parent for folder in reversed(folders) for p in sorted(folder.glob("*/config.json"))}
    if name in found:
        return found[name]
    known = ", ".join(sorted(found)) or "none"
    raise ConfigError(f"no model {name!r}: give a checkpoint directory, or one of {known}", param="model")


def shape_of(name: str, dtype: str | None = None) -> ModelShape:
    """`dtype`: what it will run in, if not what it was saved in. Raises `ConfigError` or `CheckpointError`."""
    path = locate_model(name)
    config = _config(path)
    text = config.get_text_config()
    family = _family(config, path)
    require(bool(getattr(text, "num_hidden_layers", 0)), path, "config.json describes no decoder")
    heads = text.num_attention_heads
    saved = str(getattr(config, "dtype", None) or getattr(text, "dtype", None) or "bfloat16")
    return ModelShape(
        name=path.name,
        dtype=dtype or saved.removeprefix("torch."),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab=text.vocab_size,
        context=text.max_position_embeddings,
        tied=any(getattr(c, "tie_word_embeddings", False) for c in (config, text)),
        vision=family.vision(config, _fit(family, config, path)) if family is not None else None,
    )


def prompts_of(name: str) -> Prompts:
    """How the model counts: pictures by its own rules; text by its tokenizer and template or, where a configuration is
    all there is, by words. Raises `ConfigError` or `CheckpointError`."""
    path = locate_model(name)
    config = _config(path)
    family = _family(config, path)
    fit = _fit(family, config, path) if family is not None else None
    if (path / "tokenizer.json").is_file():
        return Prompts(name=path.name, picture=fit, text=_exactly(load_description(path)), n_context=_context(config))
    n_template, n_around = (family.n_template, family.n_around) if family is not None else (12, 0)

    def text(words: str, n_pictures: int) -> int:
        return n_template + n_around * n_pictures + words_to_tokens(words)

    return Prompts(name=path.name, picture=fit, text=text, n_context=_context(config))


def _context(config: Any) -> int:
    return config.get_text_config().max_position_embeddings


def _exactly(model: ModelDescription) -> Callable[[str, int], int]:
    def text(words: str, n_pictures: int) -> int:
        pictures = [ImagePart("", "messages")] * n_pictures
        message = ChatMessage("user", (*pictures, TextPart(words)))
        rendered = model.template.render([message]) if model.template is not None else words
        ids = encode(rendered, model)
        return len(ids) - (n_pictures if model.template is not None else 0)

    return text


def _config(path: Path) -> Any:
    """transformers' view of config.json, for its defaults."""
    from transformers import AutoConfig

    read_json(path / "config.json")  # complains in one line
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as e:
        first = " ".join(str(e).split())[:200]
        raise CheckpointError(f"{path}: config.json is not valid: {first}") from None


def _family(config: Any, path: Path) -> _Family | None:
    """None for a model without eyes."""
    if getattr(config, "vision_config", None) is None:
        return None
    family = _FAMILIES.get(config.model_type)
    require(
        family is not None,
        path,
        f"cannot plan for model type {config.model_type!r}; known are {', '.join(_FAMILIES)} and text models",
    )
    return family


def _fit(family: _Family, config: Any, path: Path) -> Fit:
    given: dict[str, Any] = {}
    if (path / "preprocessor_config.json").is_file():
        given = read_json(path / "preprocessor_config.json")
    elif (path / "processor_config.json").is_file():
        given = read_json(path / "processor_config.json").get("image_processor") or {}
    return family.fit(config, given)


# ---- the families


def _clip(config: Any, fit: Fit) -> VisionShape:
    """LLaVA-1.5: one square; every patch row and the class row pass all layers up to the one whose output is taken."""
    v, width = config.vision_config, config.get_text_config().hidden_size
    wanted = config.vision_feature_layer
    chosen = list(wanted) if isinstance(wanted, list | tuple) else [wanted]
    layers = max(i if i >= 0 else v.num_hidden_layers + 1 + i for i in chosen)
    rows = (v.image_size // v.patch_size) ** 2 + 1
    n_tokens = fit(*_REFERENCE)
    return VisionShape(
        layers=layers,
        hidden=v.hidden_size,
        row_weights=3 * v.patch_size**2 * v.hidden_size
        + layers * (4 * v.hidden_size**2 + 2 * v.hidden_size * v.intermediate_size),
        token_weights=v.hidden_size * len(chosen) * width + width**2,
        rows_per_token=rows / n_tokens,
        window_rows=rows,
        picture_tokens=n_tokens,
    )


def _anyres(config: Any, fit: Fit) -> VisionShape:
    """LLaVA-NeXT: the picture and its tiles, a square each, of which padding is cut off after the tower. Patches per
    token are those of a picture of 4:3, five squares; a square one has a fifth fewer for its tokens, one of 3:2 a tenth
    more."""
    one = _clip(config, lambda *_: (config.vision_config.image_size // config.vision_config.patch_size) ** 2)
    side = config.vision_config.image_size
    squares = 1 + max(h * w for h, w in config.image_grid_pinpoints) // side**2
    largest = max(fit(w, h) for h, w in config.image_grid_pinpoints)
    return VisionShape(
        layers=one.layers,
        hidden=one.hidden,
        row_weights=one.row_weights,
        token_weights=one.token_weights,
        rows_per_token=squares * one.window_rows / fit(*_REFERENCE),
        window_rows=one.window_rows,
        picture_tokens=largest,
    )


def _qwen(config: Any, fit: Fit) -> VisionShape:  # the largest picture is a matter of limits
    """Qwen2-VL: patches of two frames (a still picture counts as two), all of a picture attend to each other, a square
    of them becomes a token."""
    v = config.vision_config
    hidden, merged = v.embed_dim, v.embed_dim * v.spatial_merge_size**2
    inner = int(hidden * v.mlp_ratio)
    return VisionShape(
        layers=v.depth,
        hidden=hidden,
        row_weights=3 * v.temporal_patch_size * v.patch_size**2 * hidden
        + v.depth * (4 * hidden**2 + 2 * hidden * inner),
        token_weights=merged**2 + merged * v.hidden_size,
        rows_per_token=float(v.spatial_merge_size**2),
        picture_tokens=fit(10_000, 10_000),
    )


def _fit_clip(config: Any, given: dict[str, Any]) -> Fit:
    adapter = llava_images(config.to_dict(), given)
    return lambda width, height: adapter.fit(width, height).n_tokens


_FAMILIES = {
    # BOS, USER:, the newline after the picture, ASSISTANT:
    "llava": _Family(_clip, _fit_clip, 10),
    # the same, after "A chat between a curious human and an artificial intelligence assistant. ..."
    "llava_next": _Family(_anyres, fit_anyres, 45),
    # "You are a helpful assistant." and three turns' marks
    "qwen2_vl": _Family(_qwen, fit_qwen, 20, 2),
}
