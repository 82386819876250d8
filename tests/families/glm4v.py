"""GLM-4.1V, 4.5V, 4.6V and GLM-OCR."""

from __future__ import annotations

from tests.checkpoints import byte_level_pairs

SPECIAL = (
    *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|image|>", "<|video|>"),
)
_LEARNED = 1900


def make_tokenizer(context: int = 4096):
    """A tokenizer like GLM's: byte-level, with the special tokens behind the vocabulary."""
    import transformers

    vocab, merges = byte_level_pairs(_LEARNED, 60)
    tokenizer = transformers.Qwen2TokenizerFast(vocab=vocab, merges=merges, model_max_length=context)
    tokenizer.add_tokens([transformers.AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.pad_token, tokenizer.eos_token = "<|endoftext|>", "<|endoftext|>"
    return tokenizer


SAMPLES = {}
