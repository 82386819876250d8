"""The context length of checkpoints whose rotary embedding is scaled."""

from __future__ import annotations

import json

import pytest

from hydrainfer.families import read_config

pytestmark = pytest.mark.cpu

QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 40960}
VICUNA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4096}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "max_position_embeddings": 131072}
GEMMA = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "max_position_embeddings": 131072}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("config", "scaling", "n_context"),
    [
        (QWEN, YARN, 131072),
        (QWEN, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (QWEN, YARN | {"factor": 1.1}, 40960),
        (QWEN, YARN | {"factor": None}, 40960),
        (GPT_OSS, {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}, 131072),
        (VICUNA, {"type": "linear", "factor": 4.0}, 16384),
        (VICUNA, {"rope_type": "linear", "factor": 2.5}, 10240),
        (VICUNA, LLAMA_3 | {"original_max_position_embeddings": 512}, 4096),
        (VICUNA, None, 4096),
        (GEMMA, {"rope_type": "linear", "factor": 8.0}, 131072),
    ],
)
def test_yarn_and_linear_scaling_extend_the_context_as_in_vllm(tmp_path, config, scaling, n_context):
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
    assert read_config(tmp_path).text.context == n_context


def test_a_window_counts_where_the_extended_context_is_longer(tmp_path):
    for scaling, window in ((None, 0), ({"type": "linear", "factor": 2.0}, 4096)):
        config = MISTRAL | {"max_position_embeddings": 4096, "num_hidden_layers": 1, "rope_scaling": scaling}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_config(tmp_path).text.windows == (window,)
