"""Text-only families: what the planner counts, and settings that are refused, each in one line."""

from __future__ import annotations

import json

import pytest
import transformers

from hydrainfer.core import CheckpointError
from hydrainfer.families import read_config
from hydrainfer.planner.inputs import shape_of
from tests.checkpoints_text import make_text
from tests.families.texts import VARIANTS

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("kind", VARIANTS)
def test_the_planner_counts_every_matrix(kind, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(make_text(tmp_path, kind))
    named, shape = model.named_parameters(), shape_of(str(tmp_path))
    matrices = sum(p.numel() for name, p in named if p.dim() > 1 and "conv.conv." not in name)  # but for filters
    assert shape.step_weights + shape.table_weights + shape.head_weights == matrices


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("granite4", {"layer_types": ["mamba", "attention"]}, "linear_attention (Mamba-2) is not supported"),
        ("granite4", {"num_local_experts": 8}, "num_local_experts 8 is not supported; supported: 0"),
        ("granite4", {"position_embedding_type": "learned"}, "'learned' is not supported; supported: rope, null"),
        ("granite4", {"shared_intermediate_size": 0}, "config.json: shared_intermediate_size is 0"),
        ("granite", {"residual_multiplier": None}, "config.json: residual_multiplier is null"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ("gemma2", {"attn_logit_softcapping": -50.0}, "config.json: attn_logit_softcapping is -50.0"),
        ("gemma2", {"final_logit_softcapping": [30.0]}, "config.json: final_logit_softcapping is [30.0]"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers names 2 of 4 layers"),
        (
            "phi3",
            {"rope_parameters": LONG, "original_max_position_embeddings": 512},
            "short_factor field must have length 8, got 3",
        ),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
    ],
)
def test_settings_that_are_not_supported(tmp_path, kind, changes, words):
    file = make_text(tmp_path, kind) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError) as e:
        read_config(tmp_path)
    assert words in e.value.message and "\n" not in e.value.message
