"""Granite 3, and Granite 4 without Mamba-2 layers and experts: Llama with multipliers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydrainfer.checkpoint import TEXT, Decoder, Served, require, text_only
from hydrainfer.checkpoint.files import POSITIVE, SIZE, instance, maybe


def _dense(hf: Any, path: Path) -> Any:
    """The configuration of Granite 4 with the field names of Llama's. Raises `CheckpointError` for layers that are not
    served."""
    others = " and ".join(sorted(set(hf.layer_types) - {"full_attention"}))
    require(not others, path, f"{others} (Mamba-2) is not supported; supported: models whose layers are all attention")
    n, kind = hf.num_local_experts, hf.position_embedding_type
    require(not n, path, f"num_local_experts {n} is not supported; supported: 0")
    require(kind in (None, "rope"), path, f"position_embedding_type {kind!r} is not supported; supported: rope, null")
    return SimpleNamespace(**hf.to_dict() | {"intermediate_size": hf.shared_intermediate_size})


def _unrotated(hf: Any, path: Path) -> tuple[int, ...]:  # noqa: ARG001
    return () if hf.position_embedding_type == "rope" else tuple(range(hf.num_hidden_layers))


_GRANITE = Decoder("granite", mlp_bias=None, multipliers=True)
_GRANITE4 = _GRANITE._replace(
    model_type="granitemoehybrid", mlp_bias=False, fused=("gate_up_proj",), named=_dense, unrotated=_unrotated
)
_NAMES = TEXT._replace(
    text=(
        (r"\.shared_mlp\.input_linear\.", ".mlp.gate_up_proj."),
        (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),
    )
)
_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
FIELDS = dict.fromkeys(_MULTIPLIERS, POSITIVE)
_FIELDS4 = FIELDS | {"shared_intermediate_size": SIZE, "position_embedding_type": maybe(instance(str, "a string"))}
FAMILIES = {
    "GraniteForCausalLM": text_only(_GRANITE, dtype="bfloat16")._replace(fields=FIELDS),
    "GraniteMoeHybridForCausalLM": text_only(_GRANITE4, names=_NAMES, dtype="bfloat16")._replace(fields=_FIELDS4),
}
SERVED = (
    Served(("GraniteForCausalLM",), "Granite 3", "Llama with multipliers of embeddings and residuals"),
    Served(
        ("GraniteMoeHybridForCausalLM",),
        "Granite 4 (350M, 1B, Micro: models without Mamba-2 layers)",
        "Granite 3, rotated or not; no Mamba-2 layers, no experts",
    ),
)
