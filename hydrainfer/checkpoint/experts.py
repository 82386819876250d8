"""The experts of a decoder's layers, as config.json describes them, checked, for each family."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hydrainfer.checkpoint.files import require


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a checkpoint. In the layers that `layers` marks, each token goes through `chosen` of `count` gated
    MLPs of width `intermediate`, and their outputs are summed with weights.

    `router`: "softmax" chooses by the softmax over all experts; "chosen" chooses by scores and takes the softmax over
    the chosen ones; "sigmoid" chooses by the sigmoid of each score, if `corrected` plus a correction, among the experts
    of `groups_chosen` of `groups` groups; "scaled" is "softmax" of the hidden state, normalised and times a vector, and
    each weight is multiplied by a number of its expert. `normed`: the weights are normalised to sum to one. They are
    then multiplied by `scale`. Experts with the router "scaled" are beside the layer's MLP, not in its place.

    `shared`: the width of an MLP that all tokens go through; 0 if there is none. `shared_gate`: its output is
    multiplied by a gate of its own.
    `biased`: router and experts have biases. `limit`: the bound that gates and the values they multiply are clamped to,
    as in GPT-OSS, and `alpha` the factor of its activation; with limit 0 the activation is silu, or GELU if `gelu`.

    `stored`: the layout of the weights: a tensor per expert ("apart"), all experts in one tensor ("stacked"), the same
    as [in, out] ("together"), or in MXFP4. Whatever `stored` says, a file may also have them stacked.
    """

    layers: tuple[bool, ...]
    count: int
    chosen: int
    intermediate: int
    router: Literal["softmax", "chosen", "sigmoid", "scaled"] = "softmax"
    corrected: bool = True
    normed: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_chosen: int = 1
    shared: int = 0
    shared_gate: bool = True
    biased: bool = False
    limit: float = 0.0
    alpha: float = 1.0
    gelu: bool = False
    stored: Literal["apart", "stacked", "together", "mxfp4"] = "apart"


_GPT_OSS_LIMIT, _GPT_OSS_ALPHA = 7.0, 1.702
"""What releases of transformers up to 5.17 have in their code: their configuration has no fields for it."""


def gpt_oss(hf: Any, path: Path) -> Experts:
    quantization = getattr(hf, "quantization_config", None) or {}
    return _checked(
        Experts(
            layers=(True,) * hf.num_hidden_layers,
            count=hf.num_local_experts,
            chosen=hf.num_experts_per_tok,
            intermediate=hf.intermediate_size,
            router="chosen",
            biased=True,
            limit=getattr(hf, "swiglu_limit", _GPT_OSS_LIMIT),
            alpha=getattr(hf, "swiglu_alpha", _GPT_OSS_ALPHA),
            stored="mxfp4" if quantization.get("quant_method") == "mxfp4" else "together",
        ),
        path,
    )


def mixtral(hf: Any, path: Path) -> Experts:
    layers = (True,) * hf.num_hidden_layers
    return _checked(Experts(layers, hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size), path)


def qwen3(hf: Any, path: Path) -> Experts:
    """The experts of Qwen3-MoE. Qwen3.5's configuration has no field for layers without experts."""
    dense, step = getattr(hf, "mlp_only_layers", None) or (), getattr(hf, "decoder_sparse_step", None) or 1
    layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(hf.num_hidden_layers))
    normed = getattr(hf, "norm_topk_prob", True)
    found = Experts(layers, hf.num_experts, hf.num_experts_per_tok, hf.moe_intermediate_size, normed=normed)
    return _checked(found, path)


def qwen3_vl(hf: Any, path: Path) -> Experts:
    """The experts of Qwen3-VL."""
    return replace(qwen3(hf, path), normed=True, stored="together")


def qwen2(hf: Any, path: Path) -> Experts:
    """The experts of Qwen2-MoE, Qwen3-Next and Qwen3.5, which also have a shared expert."""
    return replace(qwen3(hf, path), shared=hf.shared_expert_intermediate_size)


def lfm2(hf: Any, path: Path) -> Experts:
    """The experts of LFM2-MoE."""
    n, dense = hf.num_hidden_layers, hf.num_dense_layers
    found = Experts(
        layers=(False,) * min(dense, n) + (True,) * max(n - dense, 0),
        count=hf.num_experts,
        chosen=hf.num_experts_per_tok,
        intermediate=hf.moe_intermediate_size,
        router="sigmoid",
        corrected=bool(hf.use_expert_bias),
        normed=hf.norm_topk_prob,
        scale=hf.routed_scaling_factor,
    )
    return _checked(found, path)


def mimo(hf: Any, path: Path) -> Experts:
    """The experts of MiMo-V2-Flash."""
    kinds = list(hf.mlp_layer_types)
    fits = len(kinds) == hf.num_hidden_layers and set(kinds) <= {"dense", "sparse"}
    require(fits, path, f"mlp_layer_types must name {hf.num_hidden_layers} layers, each dense or sparse")
    return _grouped(hf, tuple(kind == "sparse" for kind in kinds), path)


def glm4v(hf: Any, path: Path) -> Experts:
    """The experts of GLM-4.5V: all tokens go through some of them, which are stored as one wide MLP."""
    n, dense = hf.num_hidden_layers, hf.first_k_dense_replace
    found = _grouped(hf, (False,) * min(dense, n) + (True,) * max(n - dense, 0), path)
    return replace(found, shared=hf.moe_intermediate_size * (hf.n_shared_experts or 0), shared_gate=False)


def _grouped(hf: Any, layers: tuple[bool, ...], path: Path) -> Experts:
    """Experts in groups, with DeepSeek's router."""
    groups = hf.n_group
    found = Experts(
        layers=layers,
        count=hf.n_routed_experts,
        chosen=hf.num_experts_per_tok,
        intermediate=hf.moe_intermediate_size,
        router="sigmoid",
        normed=hf.norm_topk_prob,
        scale=hf.routed_scaling_factor,
        groups=groups,
        groups_chosen=hf.topk_group,
    )
    _checked(found, path)
    fits = groups > 0 and found.count % groups == 0 and found.count >= 2 * groups and 0 < hf.topk_group <= groups
    require(fits, path, f"{found.count} experts in {groups} groups of which {hf.topk_group} are chosen")
    within = found.count // groups * hf.topk_group
    require(found.chosen <= within, path, f"num_experts_per_tok {found.chosen} of {within} experts")
    return found


def _checked(found: Experts, path: Path) -> Experts:
    numbers = found.chosen, found.count, found.intermediate
    fits = None not in numbers and 0 < found.chosen <= found.count and found.intermediate > 0
    require(fits, path, f"num_experts_per_tok {found.chosen} of {found.count} experts of width {found.intermediate}")
    return found
