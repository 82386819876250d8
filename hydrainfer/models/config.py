"""The configuration of a checkpoint, checked and free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hydrainfer.core import CheckpointError


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. `kind`: "default", "linear" (positions divided by `factor`) or "llama3" (the three after it).
    `sections`: pairs turned by (time, row, column), which sum to head_dim / 2, None with one position per token;
    `interleaved`: they take turns instead of following each other."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    sections: tuple[int, int, int] | None = None
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class TextConfig:
    """A Llama-style decoder. `context` is the longest sequence in tokens; `qk_norm`: queries and keys are normalised
    per head before they are turned."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context: int
    rope: Rope
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class ClipConfig:
    """A CLIP-style vision tower and its projector. `features`: outputs taken, 0 = the embeddings, i = after layer i;
    `keep_class`: does the class token's row stay. Sizes in pixels. `mean`, `std`: of RGB scaled to 0..1."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    norm_eps: float
    image_size: int
    patch_size: int
    activation: str
    features: tuple[int, ...]
    keep_class: bool
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale: float
    projector_activation: str
    projector_bias: bool

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def tokens(self) -> int:
        """Rows of one encoded picture."""
        return self.patches + self.keep_class


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model as this engine sees it. `vision` is its family's own kind, None without one; all have `tokens`, the rows
    of the largest picture. `media_tokens`: ids of the placeholders. `deepstack`: levels of features that the first
    language layers add, beside the embedding itself. `dtype` is what the checkpoint was saved in."""

    architecture: str
    text: TextConfig
    vision: Any
    media_tokens: tuple[int, ...]
    dtype: str
    deepstack: int = 0

    @property
    def embed_width(self) -> int:
        """The width of one row of the embedding cache."""
        return self.text.hidden * (1 + self.deepstack)


@dataclass(frozen=True, slots=True)
class AnyresConfig:
    """LLaVA-NeXT's: a CLIP tower that sees a picture whole and in tiles. `tokens`: rows of the largest picture."""

    clip: ClipConfig
    tokens: int


class _TextKind(NamedTuple):
    """How a decoder of transformers differs from Llama's: biases (None: as `attention_bias` and `mlp_bias` say),
    normalised queries and keys, and which layers slide: all, those that `layer_types` names, or none."""

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    sliding: Literal["none", "all", "named"] = "none"


_TEXT_KINDS = {
    "llama": _TextKind(mlp_bias=None),
    "mistral": _TextKind(qkv_bias=False, out_bias=False, sliding="all"),
    "qwen2": _TextKind(qkv_bias=True, out_bias=False, sliding="named"),
    "qwen3": _TextKind(qk_norm=True, sliding="named"),
    "qwen2_vl_text": _TextKind(qkv_bias=True, out_bias=False),
    "qwen2_5_vl_text": _TextKind(qkv_bias=True, out_bias=False),
    "qwen3_vl_text": _TextKind(qk_norm=True),
}
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
ACTIVATIONS = ("quick_gelu", "gelu", "gelu_pytorch_tanh", "silu", "relu")
ROPE_KINDS = ("default", "linear", "llama3")


def require(ok: bool, path: Path, problem: str) -> None:
    """Raise `CheckpointError` naming the checkpoint unless `ok`."""
    if not ok:
        raise CheckpointError(f"{path}: {problem}")


def pixel_scaling(
    given: Mapping[str, Any], path: Path
) -> tuple[tuple[float, float, float], tuple[float, float, float], float]:
    """(mean, std, rescale factor) of what `preprocessing` found; CLIP's where it is silent."""
    normalise = given.get("do_normalize", True)
    mean = tuple(given.get("image_mean") or _CLIP_MEAN) if normalise else (0.0, 0.0, 0.0)
    std = tuple(given.get("image_std") or _CLIP_STD) if normalise else (1.0, 1.0, 1.0)
    require(len(mean) == 3 and len(std) == 3 and all(std), path, "image_mean and image_std need three values each")
    return mean, std, float(given.get("rescale_factor", 1 / 255)) if given.get("do_rescale", True) else 1.0


def text_config(hf: Any, path: Path, *, tied: bool) -> TextConfig:
    """A decoder's configuration from that of transformers, whose defaults fill what the file leaves out."""
    kind = _TEXT_KINDS.get(hf.model_type)
    supported = ", ".join(_TEXT_KINDS)
    require(kind is not None, path, f"text model {hf.model_type!r} is not supported; supported: {supported}")
    assert kind is not None
    require(hf.hidden_act == "silu", path, f"hidden_act {hf.hidden_act!r} is not supported; supported: silu")
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    kv_heads = hf.num_key_value_heads or hf.num_attention_heads
    require(hf.num_attention_heads % kv_heads == 0, path, f"{hf.num_attention_heads} heads over {kv_heads} KV heads")
    require(head_dim % 2 == 0, path, f"head_dim {head_dim} is odd")
    _check_window(hf, kind, path)

    def bias(fixed: bool | None, field: str) -> bool:
        return bool(getattr(hf, field)) if fixed is None else fixed

    return TextConfig(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        intermediate=hf.intermediate_size,
        layers=hf.num_hidden_layers,
        heads=hf.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=hf.rms_norm_eps,
        context=hf.max_position_embeddings,
        rope=rope_config(hf, path),
        qkv_bias=bias(kind.qkv_bias, "attention_bias"),
        out_bias=bias(kind.out_bias, "attention_bias"),
        mlp_bias=bias(kind.mlp_bias, "mlp_bias"),
        tied=tied,
        qk_norm=kind.qk_norm,
    )


def _check_window(hf: Any, kind: _TextKind, path: Path) -> None:
    """Attention over the last tokens only is not supported where it would leave any out."""
    window = getattr(hf, "sliding_window", None)
    slides = kind.sliding == "all" or (kind.sliding == "named" and "sliding_attention" in (hf.layer_types or ()))
    context = hf.max_position_embeddings
    require(
        not slides or window is None or window >= context,
        path,
        f"sliding_window {window} is smaller than max_position_embeddings {context}, which is not supported; "
        f"supported: null, or a context of at most {window} (lower max_position_embeddings in config.json)",
    )


def dtype_name(hf: Any) -> str:
    """The type that the checkpoint was saved in."""
    return str(hf.dtype).removeprefix("torch.") if hf.dtype is not None else "float16"


def rope_config(hf: Any, path: Path) -> Rope:
    """The rotary embedding, by `rope_parameters` (transformers 5), which also holds older files' `rope_scaling`."""
    given = {name: value for name, value in (getattr(hf, "rope_parameters", None) or {}).items() if value is not None}
    kind = given.get("rope_type") or given.get("type") or "default"
    require(kind in ROPE_KINDS, path, f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    partial = given.get("partial_rotary_factor", 1.0)
    require(partial == 1.0, path, f"partial_rotary_factor {partial} is not supported; supported: 1.0")
    try:
        rope = Rope(theta=float(given.get("rope_theta", 10000.0)), kind=kind)
        if kind == "default":
            return rope
        rope = Rope(theta=rope.theta, kind=kind, factor=float(given["factor"]))
        if kind == "linear":
            return rope
        return Rope(
            theta=rope.theta,
            kind=kind,
            factor=rope.factor,
            low_freq_factor=float(given["low_freq_factor"]),
            high_freq_factor=float(given["high_freq_factor"]),
            original_context=int(given["original_max_position_embeddings"]),
        )
    except KeyError as e:
        raise CheckpointError(f"{path}: rope type {kind!r} lacks {e.args[0]}") from None
