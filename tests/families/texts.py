"""Text-only families that differ from Llama by a few settings."""

from __future__ import annotations

from functools import partial

from tests.checkpoints_text import GEMMA4_EXPERTS, GEMMA4_LARGE, GLM, make_text
from tests.equivalence.reference import TextReference
from tests.families.chats import TEXTS
from tests.families.sample import SPEAKING, Sample

_LONG = {  # of a head's 16 numbers 12 are rotated
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.0, 2.0, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
}
LAST_ROTATES = {"no_rope_layers": [0, 1, 0, 1], "use_sliding_window": True, "sliding_window": 19, "mlp_bias": True}
LARGE, EXPERTS = GEMMA4_LARGE | {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}, GEMMA4_EXPERTS
VARIANTS = {
    "gemma2": {"": {}, "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None}},
    "gemma4": {
        "": {},
        "values are keys": LARGE,
        "experts": LARGE | EXPERTS | {"attention_k_eq_v": False, "num_global_key_value_heads": None},
        "all at once": GEMMA4_LARGE | EXPERTS | {"hidden_size_per_layer_input": 12, "final_logit_softcapping": None},
    },
    "phi3": {
        "": {},
        "a part of each head by factors": {"rope_parameters": _LONG, "original_max_position_embeddings": 512},
        "a window": {"sliding_window": 21},
    },
    "olmo2": {"": {}, "biases, tied": {"attention_bias": True, "tie_word_embeddings": True}},
    "olmo3": {"": {}},
    "smollm3": {"": {}, "the last layer rotates, windows": LAST_ROTATES},
    "granite": {"": {}, "biases": {"attention_bias": True, "mlp_bias": True}},
    "granite4": {"": {}, "no rotation, biases": {"position_embedding_type": None, "attention_bias": True}},
    "glm": {"": {}, "all of each head": {"rope_parameters": GLM | {"partial_rotary_factor": 1.0}}},
    "glm4": {"": {}, "without biases": {"attention_bias": False}},
    "ministral3": {"": {}, "a window": {"sliding_window": 21}},
    "lfm2_moe": {"": {}, "no correction, weights as they are": {"use_expert_bias": False, "norm_topk_prob": False}},
}
SAMPLES = {
    kind: Sample(
        partial(make_text, kind=kind, seed=60 if kind == "glm" else 20 + i),
        TextReference,
        TEXTS,
        SPEAKING,
        variants=variants,
        compiled=kind in ("gemma4", "olmo3", "smollm3", "ministral3"),
    )
    for i, (kind, variants) in enumerate(VARIANTS.items())
}
