"""The decoder of a checkpoint, as config.json describes it, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hydrainfer.checkpoint.experts import Experts
from hydrainfer.checkpoint.files import require
from hydrainfer.checkpoint.recurrence import Recurrence
from hydrainfer.checkpoint.rope import ORIGINAL, Rope, rope_config

Sinks = Literal["none", "all", "windows"]
Norms = Literal["before", "around", "after"]
HeadNorms = Literal["none", "head", "row"]


@dataclass(frozen=True, slots=True)
class TextConfig:
    """A Llama-style decoder. `context` is the longest sequence in tokens. `windows`: for each layer, how many tokens a
    token sees there, itself included; 0 for all. `local_rope` and `local_kv_heads` are those of layers with a window;
    layers in `unrotated` rotate nothing. `qk_norm`: queries and keys are normalised before they are rotated, per head
    or over the whole row. `head_dim` is the width of a query or key head, `value_dim` that of a value head.

    Values are multiplied by `value_scale`, attention scores by `attention_scale`, token embeddings by `embed_scale`,
    the outputs of attention and MLP by `residual_scale`, logits by `logit_scale`; scores and logits are then held
    within `attention_cap` and `logit_cap` by tanh, unless these are 0. `growth` (beta, n): queries at position p are
    multiplied by 1 + beta * log(1 + p // n). `sinks`: the layers whose heads have an attention sink.

    `norms`: the inputs of attention and MLP are normalised, their outputs, or both ("around"). `centred_norms`: RMSNorm
    multiplies by one plus its weight. `experts`: those of the layers that have experts instead of one MLP;
    `recurrence`: the layers that have no attention. `gate_dim`: how many gates multiply each head's attention output:
    `head_dim` (stored after the head's queries), 1 (from a matrix of its own) or 0. `mtp`: the layers for multi-token
    prediction that config.json names; the first of them guesses if `guesses`, and is then one more layer of the caches,
    with `mtp_window`.

    Gemma 4's: `local_head_dim` is the width of heads in layers with a window, unless 0. `reads`: for each layer, the
    one whose keys and values it attends to; () if all have their own. `shared_intermediate`: the MLP's width in layers
    that read those of another, unless 0. `keys_as_values`: layers without a window have no value projection, their
    values are the projected keys; `value_norm`: values are normalised, without a weight. `per_layer`: the width of the
    embeddings that each layer adds, of `per_layer_vocab` tokens, where `pad` stands for pictures. `scaled_layers`: what
    leaves a layer is multiplied by a number of the checkpoint.

    Of the checkpoint: `paired`, its rotary pairs are neighbours, instead of the two halves of what is rotated; `fused`,
    the matrices that it holds in one ("qkv_proj", "gate_up_proj")."""

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
    local_rope: Rope
    attention_scale: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool
    qk_norm: HeadNorms = "none"
    windows: tuple[int, ...] = ()
    activation: str = "silu"
    embed_scale: float = 1.0
    centred_norms: bool = False
    norms: Norms = "before"
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    growth: tuple[float, int] | None = None
    unrotated: tuple[int, ...] = ()
    paired: bool = False
    fused: tuple[str, ...] = ()
    local_kv_heads: int = 0
    value_dim: int = 0
    value_scale: float = 1.0
    sinks: Sinks = "none"
    experts: Experts | None = None
    recurrence: Recurrence | None = None
    gate_dim: int = 0
    mtp: int = 0
    mtp_window: int = 0
    guesses: bool = False
    local_head_dim: int = 0
    reads: tuple[int, ...] = ()
    shared_intermediate: int = 0
    keys_as_values: bool = False
    value_norm: bool = False
    per_layer: int = 0
    per_layer_vocab: int = 0
    pad: int = 0
    scaled_layers: bool = False

    @property
    def n_own(self) -> int:
        """The number of layers with keys and values of their own, or a state; the others follow behind them."""
        if not self.reads:
            return self.layers
        return sum(layer == at for layer, at in enumerate(self.reads))

    def cache_of(self, layer: int) -> int:
        """The layer whose cache this layer uses."""
        if layer < len(self.reads):
            return self.reads[layer]
        return layer

    def head_dims(self, window: int) -> tuple[int, int]:
        """The widths of query and key heads, and of value heads, of layers with this window."""
        if window and self.local_head_dim:
            return self.local_head_dim, self.local_head_dim
        return self.head_dim, self.value_dim

    def intermediate_of(self, layer: int) -> int:
        """The width of a layer's MLP."""
        if self.shared_intermediate and self.cache_of(layer) != layer:
            return self.shared_intermediate
        return self.intermediate

    @property
    def cached_windows(self) -> tuple[int, ...]:
        """`windows` of all layers that have caches or states: the decoder's and the one that guesses."""
        if not self.guesses:
            return self.windows
        return *self.windows, self.mtp_window

    def kv_heads_of(self, window: int) -> int:
        """The number of KV heads of layers with this window."""
        if window:
            return self.local_kv_heads
        return self.kv_heads

    def has_sinks(self, layer: int) -> bool:
        return self.sinks == "all" or (self.sinks == "windows" and self.windows[layer] > 0)

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]


class Decoder(NamedTuple):
    """The decoder of one `model_type`, described by its differences from Llama's.

    Biases: True or False, None if `attention_bias` and `mlp_bias` of config.json decide, or the name of the field that
    does. `qk_norm`, `norms`, `centred`, `sections`, `interleaved`, `paired`, `fused`, `sinks`: as in `TextConfig` and
    `Rope`; `sections` is the default. `activation`: what the field of the same name, or `hidden_act`, must be.
    `sliding`: the layers with a window, all, those that `layer_types` names, or none; "refused" means none, and an
    error if a file has them. `ropes`: layers with a window have rotary parameters of their own. `partial`:
    `partial_rotary_factor` gives the rotated part of each head. `stretched`: scaling of the rotary embedding multiplies
    `max_position_embeddings`. `mtp`: layers for multi-token prediction in its checkpoints, unless config.json says how
    many; None: it has none. `mtp_slides`: they have a window.

    Numbers are given by the names of their fields: `divisor`, whose square root divides attention scores (by default
    that is `head_dim`); `multipliers` of attention scores, embeddings, residuals and, dividing, of logits, as in
    Granite; `attention_cap` and `logit_cap`; `value_dim` and `value_scale`; `gate`, whether each head has one.
    `embed_scale`: token embeddings are multiplied by this, or by the root of their width ("root"). `gated`: queries
    have gates of their own width. `local_kv`: how many times as many KV heads layers with a window have.
    `unrotated(hf, path)`: the layers without rotation; `growth(hf)`: see `TextConfig`. `refused`: fields that must be
    null, 0 or false.

    `experts(hf, path)` checks and describes the experts; `recurrence(hf, path)` the layers without attention.
    `named(hf, path)` returns the configuration under Llama's field names; `own(hf, path)` fields of `TextConfig` that
    only this decoder has. `quantized`: the quantisation methods that are accepted in published weights.
    """

    model_type: str
    qkv_bias: bool | str | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: HeadNorms = "none"
    sliding: Literal["none", "all", "named", "refused"] = "none"
    sections: tuple[int, int, int] | None = None
    interleaved: bool = False
    ropes: bool = False
    partial: bool = False
    norms: Norms = "before"
    centred: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    divisor: str = ""
    multipliers: bool = False
    embed_scale: float | Literal["root"] = 1.0
    attention_cap: str = ""
    logit_cap: str = ""
    value_dim: str = ""
    value_scale: str = ""
    local_kv: int = 1
    gate: str = ""
    gated: bool = False
    stretched: bool = True
    paired: bool = False
    fused: tuple[str, ...] = ()
    unrotated: Callable[[Any, Path], tuple[int, ...]] | None = None
    growth: Callable[[Any], tuple[float, int] | None] | None = None
    refused: tuple[str, ...] = ()
    sinks: Sinks = "none"
    experts: Callable[[Any, Path], Experts | None] | None = None
    quantized: tuple[str, ...] = ()
    named: Callable[[Any, Path], Any] | None = None
    own: Callable[[Any, Path], Mapping[str, Any]] | None = None
    recurrence: Callable[[Any, Path], Recurrence] | None = None
    mtp: int | None = None
    mtp_slides: bool = False


_MTP_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


def text_config(hf: Any, kind: Decoder, path: Path, *, tied: bool) -> TextConfig:
    """The configuration of a decoder, from that of transformers, whose defaults replace fields missing in the file.
    Raises `CheckpointError`."""
    if kind.named is not None:
        hf = kind.named(hf, path)
    field, supported = kind.activation
    activation = getattr(hf, field)
    require(activation == supported, path, f"{field} {activation!r} is not supported; supported: {supported}")
    for field in kind.refused:
        value = getattr(hf, field, None)
        require(not value, path, f"{field} {value} is not supported; supported: null")
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    kv_heads = hf.num_key_value_heads or hf.num_attention_heads
    local_kv_heads = kv_heads * kind.local_kv
    for n in (kv_heads, local_kv_heads):
        require(hf.num_attention_heads % n == 0, path, f"{hf.num_attention_heads} heads over {n} KV heads")
    require(head_dim % 2 == 0, path, f"head_dim {head_dim} is odd")

    def bias(fixed: bool | str | None, field: str) -> bool:
        if isinstance(fixed, bool):
            return fixed
        return bool(getattr(hf, fixed or field))

    rope, local_rope = _ropes(hf, kind, head_dim, path)
    context = _context(hf, kind, rope)
    config = TextConfig(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        intermediate=getattr(hf, "intermediate_size", 0),  # absent in Qwen3.5 with experts, which has no other MLPs
        layers=hf.num_hidden_layers,
        heads=hf.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=hf.rms_norm_eps,
        context=context,
        rope=rope,
        local_rope=local_rope,
        attention_scale=_attention_scale(hf, kind, head_dim, path),
        qkv_bias=bias(kind.qkv_bias, "attention_bias"),
        out_bias=bias(kind.out_bias, "attention_bias"),
        mlp_bias=bias(kind.mlp_bias, "mlp_bias"),
        tied=tied,
        qk_norm=kind.qk_norm,
        windows=_windows(hf, kind, context, path),
        activation=activation,
        embed_scale=_embed_scale(hf, kind),
        centred_norms=kind.centred,
        norms=kind.norms,
        attention_cap=_cap(hf, kind.attention_cap),
        logit_cap=_cap(hf, kind.logit_cap),
        paired=kind.paired,
        fused=kind.fused,
        local_kv_heads=local_kv_heads,
        value_dim=head_dim,
        sinks=kind.sinks,
        gate_dim=_gate_dim(hf, kind, head_dim),
    )
    return dataclasses.replace(config, **_own_fields(hf, kind, context, path))


def _own_fields(hf: Any, kind: Decoder, context: int, path: Path) -> dict[str, Any]:
    """The fields of `TextConfig` that this kind of decoder has otherwise than Llama's."""
    own: dict[str, Any] = {}
    if kind.multipliers:
        own |= {"residual_scale": float(hf.residual_multiplier), "logit_scale": 1.0 / hf.logits_scaling}
    if kind.growth is not None:
        own["growth"] = kind.growth(hf)
    if kind.unrotated is not None:
        own["unrotated"] = kind.unrotated(hf, path)
    if kind.value_dim:
        own["value_dim"] = getattr(hf, kind.value_dim)
    if kind.value_scale and getattr(hf, kind.value_scale) is not None:
        own["value_scale"] = getattr(hf, kind.value_scale)
    if kind.experts is not None:
        own["experts"] = kind.experts(hf, path)
    if kind.recurrence is not None:
        own["recurrence"] = kind.recurrence(hf, path)
    if kind.mtp is not None:
        own["mtp"] = _mtp_layers(hf, kind.mtp)
    if kind.mtp_slides:
        own["mtp_window"] = max(_windows(hf, kind, context, path))
    if kind.own is not None:
        own |= kind.own(hf, path)
    return own


def _mtp_layers(hf: Any, usual: int) -> int:
    """What config.json says, which some published ones do not."""
    return next((n for field in _MTP_LAYERS if isinstance(n := getattr(hf, field, None), int)), usual)


def _gate_dim(hf: Any, kind: Decoder, head_dim: int) -> int:
    if kind.gate:
        return int(getattr(hf, kind.gate))
    return head_dim * kind.gated


def _attention_scale(hf: Any, kind: Decoder, head_dim: int, path: Path) -> float:
    if kind.multipliers:
        return float(hf.attention_multiplier)
    divisor = head_dim
    if kind.divisor:
        divisor = getattr(hf, kind.divisor)
    require(divisor > 0, path, f"{kind.divisor} is {divisor}")
    return divisor**-0.5


def _embed_scale(hf: Any, kind: Decoder) -> float:
    if kind.multipliers:
        return float(hf.embedding_multiplier)
    if kind.embed_scale == "root":
        return hf.hidden_size**0.5
    return kind.embed_scale


def _cap(hf: Any, field: str) -> float:
    if not field:
        return 0.0
    return float(getattr(hf, field) or 0.0)


def _ropes(hf: Any, kind: Decoder, head_dim: int, path: Path) -> tuple[Rope, Rope]:
    """The rotary embeddings of layers with full attention, and of those with a window."""
    given = getattr(hf, "rope_parameters", None) or {}
    outside = {name: getattr(hf, name, None) for name in ("partial_rotary_factor", ORIGINAL)}

    def read(parameters: Mapping[str, Any] | None) -> Rope:
        told = outside | dict(parameters or {})
        if outside[ORIGINAL] and not kind.ropes:
            told[ORIGINAL] = outside[ORIGINAL]  # transformers gives it precedence
        rope = rope_config(told, hf.max_position_embeddings, kind.partial, path)
        dim = rope.dim(head_dim)
        fits = dim > 0 and dim % 2 == 0
        require(fits, path, f"partial_rotary_factor {rope.fraction} turns {dim} of {head_dim} numbers of a head")
        fits = rope.kind != "longrope" or len(rope.divisors) == dim // 2
        require(fits, path, f"short_factor has {len(rope.divisors)} numbers for {dim // 2} pairs of a head")
        return rope

    if kind.ropes:
        for name in sorted(set(hf.layer_types) & {"full_attention", "sliding_attention"}):
            named = isinstance(given.get(name), Mapping)
            require(named, path, f"rope_parameters says nothing of {name}, which layer_types names")
            whole = not kind.partial or "partial_rotary_factor" in given[name]
            require(whole, path, f"rope_parameters of {name} lacks partial_rotary_factor")
        return read(given.get("full_attention")), read(given.get("sliding_attention"))
    rope = _with_sections(read(given), given, kind, head_dim, path)
    return rope, rope


def _context(hf: Any, kind: Decoder, rope: Rope) -> int:
    """The longest sequence in tokens: with LongRoPE the original one. As in vLLM, YaRN and linear scaling multiply the
    length that the model was trained on, unless `max_position_embeddings` is the product already."""
    stated = hf.max_position_embeddings
    if rope.kind == "longrope":
        return min(stated, rope.original_context)
    trained = {"yarn": rope.original_context, "linear": stated}.get(rope.kind)
    if trained is None or not kind.stretched:
        return stated
    return max(stated, int(trained * rope.factor))


def _windows(hf: Any, kind: Decoder, context: int, path: Path) -> tuple[int, ...]:
    """The value of `TextConfig.windows`. A window as long as the context counts as none, unless layers with a window
    also differ from others in other ways."""
    types, n = getattr(hf, "layer_types", None), hf.num_hidden_layers
    named = list(types or ["full_attention"] * n)
    require(len(named) == n, path, f"layer_types names {len(named)} of {n} layers")
    others = " and ".join(sorted(set(named) - {"full_attention", *(["sliding_attention"] * (kind.sliding == "named"))}))
    require(
        kind.sliding in ("none", "all") or kind.recurrence is not None or not others,  # recurrence checks the names
        path,
        f"{others} is not supported; supported: full_attention (use_sliding_window false)",
    )
    window: Any = getattr(hf, "sliding_window", None)
    slides = kind.sliding == "all" or (kind.sliding == "named" and "sliding_attention" in named)
    if not slides or (not kind.ropes and (window is None or window >= context)):
        return (0,) * n
    least = "at least 1" if kind.ropes else "null, or at least 1"
    require((window or 0) > 0, path, f"sliding_window {window} is not supported; supported: {least}")
    window = min(window, context)
    return tuple(window if kind.sliding == "all" or t == "sliding_attention" else 0 for t in named)


def _with_sections(rope: Rope, parameters: Mapping[str, Any], kind: Decoder, head_dim: int, path: Path) -> Rope:
    """The rotary embedding with the sections of multimodal positions, if this kind of decoder has them."""
    if kind.sections is None:
        return rope
    sections = tuple(parameters.get("mrope_section") or kind.sections)
    fits = len(sections) == 3 and 2 * sum(sections) == rope.dim(head_dim)
    require(fits, path, f"mrope_section {list(sections)} does not sum to half of head_dim {rope.dim(head_dim)}")
    return dataclasses.replace(rope, sections=sections, interleaved=kind.interleaved)
