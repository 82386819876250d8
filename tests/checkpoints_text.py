"""Tiny text-only checkpoints with seeded random weights, as published ones look: Llama, Mistral, Qwen2, Qwen3, Gemma 3,
LFM2, LFM3, and those with experts."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoints import VOCAB, byte_level_pairs, make_tokenizer, randomise, save_model

CHATML = (  # takes strings only, as Qwen2's does
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCT = (  # Mistral's way
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
_LEARNED = 1500


GEMMA = {  # most layers see 19 tokens; scales that no power of two hides
    "num_hidden_layers": 5,
    "layer_types": [f"{'full' if i == 3 else 'sliding'}_attention" for i in range(5)],
    "sliding_window": 19,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


GEMMA2 = {  # every other layer sees 19 tokens; caps that many scores and logits are near
    "num_hidden_layers": 4,
    "sliding_window": 19,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 6.0,
    "rms_norm_eps": 1e-6,
}
LFM2 = {  # as published: convolutions at both ends
    "num_hidden_layers": 5,
    "layer_types": ["conv", "conv", "full_attention", "full_attention", "conv"],
    "norm_eps": 1e-5,
    "block_multiple_of": 8,
    "intermediate_size": 240,
}
LFM3 = {  # a tail of 6 inputs, longer than a small block; windows of 19 tokens; half of the pairs turned
    "pad_token_id": 0,
    "num_hidden_layers": 6,
    "layer_types": ["conv", "conv", "full_attention", "conv", "sliding_attention", "conv"],
    "sliding_window": 19,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
DELTA = {  # convolutions and states of odd sizes, half of each head turned
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
GPT_OSS = {  # windows by turns; a gate that is often clamped
    "num_hidden_layers": 3,
    "sliding_window": 19,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 48,
    "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 8.0,
        "rope_theta": 1e4,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
MIMO = {  # values narrower than keys, of which 4 numbers are turned; experts in 4 groups
    "num_hidden_layers": 4,
    "layer_types": [f"{'full' if i in (0, 2) else 'sliding'}_attention" for i in range(4)],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "sliding_window": 18,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "v_head_dim": 16,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {
        f"{kind}_attention": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
        for kind, theta in (("full", 1e6), ("sliding", 1e4))
    },
}
OLMO3 = {f"{kind}_attention": {"rope_type": "default", "rope_theta": 1e4} for kind in ("full", "sliding")}
OLMO3["full_attention"] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
GLM = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MULTIPLIED = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.7,
}
GRANITE4 = {  # without Mamba-2 layers
    "layer_types": ["full_attention"] * 2,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 96,
    "position_embedding_type": "rope",
}
LFM2_MOE = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "num_dense_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 1.4,
    "norm_eps": 1e-5,
}
GEMMA4 = {  # the last layers read keys and values of layers 2 and 3; full layers have wider heads
    "num_hidden_layers": 7,
    "layer_types": [f"{'full' if i in (3, 6) else 'sliding'}_attention" for i in range(7)],
    "sliding_window": 19,
    "head_dim": 16,
    "global_head_dim": 32,
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 6.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA4_SMALL = {
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB,
}
GEMMA4_LARGE = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 48}
_QWEN_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}
KINDS: dict[str, tuple[str, dict]] = {  # transformers' class, and what its configuration says here
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma3": ("Gemma3", GEMMA),
    "lfm2": ("Lfm2", LFM2),
    "lfm3": ("Lfm3", LFM3),
    "qwen3_next": ("Qwen3Next", DELTA | _QWEN_MOE | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}),
    "qwen3_5": ("Qwen3_5", DELTA),
    "gpt_oss": ("GptOss", GPT_OSS),
    "mimo": ("MiMoV2Flash", MIMO),
    "phi3": ("Phi3", {"pad_token_id": 0, "num_attention_heads": 4}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": 19, "rope_parameters": OLMO3}),
    "smollm3": ("SmolLM3", {"pad_token_id": 0, "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}),
    "granite": ("Granite", MULTIPLIED),
    "granite4": ("GraniteMoeHybrid", MULTIPLIED | GRANITE4),
    "glm": ("Glm", {"pad_token_id": 0, "rope_parameters": GLM}),
    "glm4": ("Glm4", {"pad_token_id": 0, "rope_parameters": GLM}),
    "ministral3": ("Ministral3", {"pad_token_id": 0, "rope_parameters": MINISTRAL}),
    "lfm2_moe": ("Lfm2Moe", LFM2_MOE),
    "gemma4": ("Gemma4", GEMMA4 | GEMMA4_SMALL),
    "mixtral": ("Mixtral", {"num_local_experts": 8}),
    "qwen2_moe": (
        "Qwen2Moe",
        _QWEN_MOE | {"norm_topk_prob": False, "shared_expert_intermediate_size": 40},
    ),
    "qwen3_moe": ("Qwen3Moe", _QWEN_MOE | {"num_hidden_layers": 3, "mlp_only_layers": [1], "head_dim": 32}),
}


def settle_mixers(model) -> None:
    """Norms of Qwen3-Next multiply by one plus their weight, but for that of what the delta rule gives. Some heads
    forget at once, others hardly. What a layer of LFM3 adds is small beside what it adds it to, as after training: else
    errors of rounding grow from layer to layer. So is what the delta rule adds: it gives some heads a thousandth of
    what it gives others, the norm then makes their rounding as large as numbers, and transformers' own float32 was up
    to 1e-3 from float64."""
    import torch

    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__ in ("Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm"):
                module.weight.sub_(1.0)
            for name in ("post_operator_norm", "post_ffn_norm"):
                if hasattr(module, name):
                    getattr(module, name).weight.mul_(0.4)
            if hasattr(module, "A_log"):
                module.A_log.copy_(torch.linspace(-6.0, 1.5, module.A_log.numel()))
                module.norm.weight.mul_(0.25)


def settle_gemma(model) -> None:
    """Gemma's norms multiply by one plus their weight, its embeddings are multiplied by the root of their width."""
    import torch

    with torch.no_grad():
        if not model.config.tie_word_embeddings:
            table = model.get_input_embeddings().weight
            table.div_(table.shape[1] ** 0.5)
        for module in model.modules():
            if type(module).__name__ in ("Gemma2RMSNorm", "Gemma3RMSNorm"):
                module.weight.sub_(1.0)
            if type(module).__name__ == "Gemma4TextAttention":  # as after training, because scores are not scaled
                module.q_norm.weight.mul_(module.head_dim**-0.5)
            if hasattr(module, "layer_scalar"):  # each layer another, none a power of two
                module.layer_scalar.fill_(0.7 + 0.1 * (module.layer_idx % 3))
            if hasattr(module, "embed_tokens_per_layer"):
                module.embed_tokens_per_layer.weight.div_(module.hidden_size_per_layer_input**0.5)
            if hasattr(module, "per_expert_scale"):
                module.per_expert_scale.copy_(torch.linspace(0.5, 1.5, module.per_expert_scale.numel()))
                module.scale.add_(1.0)
                module.proj.weight.mul_(module.hidden_size**0.5)  # else all experts are nearly equally likely


def make_byte_level_tokenizer(context: int = 4096):
    """Qwen's: byte-level, no BOS, `<|im_end|>` ends a turn. Smaller than the model's table, as published ones are."""
    import transformers

    vocab, merges = byte_level_pairs(_LEARNED, 30)
    tokenizer = transformers.Qwen2Tokenizer(vocab=dict(vocab), merges=merges, model_max_length=context)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def make_text(out: str | Path, kind: str, seed: int = 0, *, shards: int = 1, dtype: str = "float32", **config) -> Path:
    """Write a checkpoint of one of `KINDS` to `out` and return it. `config` overrides."""
    import torch
    import transformers

    out, byte_level = Path(out), kind.startswith("qwen")
    tokenizer = make_byte_level_tokenizer() if byte_level else make_tokenizer()
    ends = [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")] if byte_level else 2
    make, usual = KINDS[kind]
    whole = getattr(transformers, f"{make}{'Text' * (kind in ('gemma3', 'gemma4', 'qwen3_5'))}Config")(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            **({} if kind.startswith(("qwen2", "lfm2")) else {"head_dim": 16}),
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6 if byte_level else 1e-5,
            "bos_token_id": None if byte_level else 1,
            "eos_token_id": ends[0] if byte_level else 2,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6 if byte_level else 1e4},
            **usual,
            **config,
        }
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{make}ForCausalLM")(whole).float().eval()
    randomise(model, seed)
    settle_mixers(model)
    if kind.startswith("gemma"):
        settle_gemma(model)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=whole.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model = model.to(getattr(torch, dtype))
    save_model(model, out, shards)
    tokenizer.chat_template = CHATML if byte_level else INSTRUCT
    tokenizer.save_pretrained(out)
    return out
