"""Tiny text-only checkpoints with seeded random weights: Llama, Mistral, Qwen2, Qwen3 and Gemma 3, as published ones
look."""

from __future__ import annotations

import json
import math
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

from tests.checkpoints import VOCAB, make_tokenizer, randomise

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


def settle_gemma(model) -> None:
    """Gemma's norms multiply by one plus their weight, its embeddings are multiplied by the root of their width."""
    import torch

    with torch.no_grad():
        if not model.config.tie_word_embeddings:
            table = model.get_input_embeddings().weight
            table.div_(table.shape[1] ** 0.5)
        for module in model.modules():
            if type(module).__name__ == "Gemma3RMSNorm":
                module.weight.sub_(1.0)


@cache
def _byte_level_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level vocabulary learned from the standard library's sources; kept in the temporary directory."""
    kept = Path(tempfile.gettempdir()) / f"hydrainfer-test-byte-level-{_LEARNED}.json"
    if not kept.exists():
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=_LEARNED, initial_alphabet=alphabet, show_progress=False)
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:30]
        tokenizer.train_from_iterator((p.read_text("utf-8", errors="ignore")[:40_000] for p in sources), trainer)
        model = json.loads(tokenizer.to_str())["model"]
        part = kept.with_suffix(f".{id(model)}")
        part.write_text(json.dumps({"vocab": model["vocab"], "merges": model["merges"]}))
        part.replace(kept)
    learned = json.loads(kept.read_text())
    return learned["vocab"], [tuple(m) for m in learned["merges"]]


def make_byte_level_tokenizer(context: int = 4096):
    """Qwen's: byte-level, no BOS, `<|im_end|>` ends a turn. Smaller than the model's table, as published ones are."""
    import transformers

    vocab, merges = _byte_level_pairs()
    tokenizer = transformers.Qwen2Tokenizer(vocab=dict(vocab), merges=merges, model_max_length=context)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def make_text(out: str | Path, kind: str, seed: int = 0, *, shards: int = 1, dtype: str = "float32", **config) -> Path:
    """Write a checkpoint of "llama", "mistral", "qwen2", "qwen3" or "gemma3" to `out` and return it. `config`
    overrides."""
    import torch
    import transformers

    out, byte_level = Path(out), kind.startswith("qwen")
    tokenizer = make_byte_level_tokenizer() if byte_level else make_tokenizer()
    ends = [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")] if byte_level else 2
    make = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3"}[kind]
    if kind == "gemma3":
        config = GEMMA | config
    whole = getattr(transformers, f"{make}{'Text' * (kind == 'gemma3')}Config")(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            **({} if kind == "qwen2" else {"head_dim": 32 if kind == "qwen3" else 16}),
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6 if byte_level else 1e-5,
            "bos_token_id": None if byte_level else 1,
            "eos_token_id": ends[0] if byte_level else 2,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6 if byte_level else 1e4},
            **config,
        }
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{make}ForCausalLM")(whole).float().eval()
    randomise(model, seed)
    if kind == "gemma3":
        settle_gemma(model)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=whole.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model = model.to(getattr(torch, dtype))
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(out, max_shard_size=f"{max(1, math.ceil(total / shards / 1000))}KB" if shards > 1 else "50GB")
    tokenizer.chat_template = CHATML if byte_level else INSTRUCT
    tokenizer.save_pretrained(out)
    return out
