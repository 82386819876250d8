"""The built-in model's tokenizer: byte-pair pieces learned from the questions and answers themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from training.builtin.questions import ask, small_talk
from training.builtin.scene import Scene, sample_shapes

VOCAB = 1024  # with the two added tokens
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}{{ eos_token if message['role'] == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def make() -> Any:
    """A `LlamaTokenizerFast` with byte fallback, `<image>`, `<pad>` and the chat template; the same every time."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Sequence(  # no piece crosses a line's end or a punctuation mark
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=True),
            pre_tokenizers.Punctuation("isolated"),
        ]
    )
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 2, special_tokens=special, limit_alphabet=100, max_token_length=16, show_progress=False
    )
    raw.train_from_iterator(_corpus(), trainer)
    model = json.loads(raw.to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    tokenizer = transformers.LlamaTokenizerFast(vocab=model["vocab"], merges=merges, model_max_length=512)
    tokenizer.add_tokens([transformers.AddedToken(t, special=True, normalized=False) for t in ("<image>", "<pad>")])
    tokenizer.pad_token = "<pad>"
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def of(run: Path) -> Any:
    """That of a training run, or a new one: when the questions change, a run that goes on keeps its pieces."""
    import transformers

    folder = run / "tokenizer"
    return transformers.AutoTokenizer.from_pretrained(folder) if folder.exists() else make()


def keep(tokenizer: Any, run: Path) -> None:
    """For `of`."""
    tokenizer.save_pretrained(run / "tokenizer")


def _corpus() -> Iterator[str]:
    from pydoc_data.topics import topics

    rng = np.random.default_rng(7)
    for _ in range(6000):
        scene = Scene("shapes", sample_shapes(rng)) if rng.random() < 0.9 else Scene("digit", digit=3)
        for found in (ask(rng, scene), small_talk(rng) if rng.random() < 0.3 else ask(rng, Scene("photo"))):
            yield f" USER: {found.question}\n{found.question} ASSISTANT: {found.answer}\nUSER:"
    yield "".join(f"{i} " * 20 for i in range(10))
    for name in sorted(topics)[:20]:
        yield topics[name][:2000]
