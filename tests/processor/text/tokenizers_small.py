"""Two real tokenizers made in milliseconds: SentencePiece-like with byte fallback, and byte-level."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "the picture shows a cat on the mat",
    "こんにちは世界 你好",
    "def f(x): return x + 1\n",
    "naïve café, 10 €",
] * 3


@cache
def byte_fallback() -> Tokenizer:
    """Decodes as Llama's: spaces for ▁, byte runs, one leading space stripped."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special + [f"<0x{i:02X}>" for i in range(256)], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    vocab = tokenizer.get_vocab()
    merges = []  # byte tokens must not be "special": rebuild without the trainer's added tokens
    rebuilt = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    rebuilt.pre_tokenizer = tokenizer.pre_tokenizer
    rebuilt.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rebuilt.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (*special, "<image>")])
    return rebuilt


@cache
def byte_level() -> Tokenizer:
    """Decodes as GPT-2's and Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<日本>", special=False, normalized=False)])
    return tokenizer
