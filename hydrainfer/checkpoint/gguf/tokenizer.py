"""The tokenizer of a GGUF file as tokenizer.json: SentencePiece's BPE with scores, or GPT-2's byte-level BPE with
merges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hydrainfer.checkpoint.files import require
from hydrainfer.checkpoint.gguf.config import Json
from hydrainfer.checkpoint.gguf.file import GgufFile

IMAGE = "<image>"
_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")


class _Words(NamedTuple):
    """A pre-tokenizer: how a text is split before its bytes are merged. `pattern`: "" means GPT-2's own. `whole`: words
    that are tokens are not merged from bytes (`ignore_merges`). `bos`: whether BOS begins a text if the file does not
    say."""

    pattern: str = ""
    single_digits: bool = False
    nfc: bool = False
    whole: bool = False
    bos: bool = False


_LLAMA3 = _Words(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}", whole=True, bos=True)
_QWEN2 = _Words(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}", nfc=True)
_WORDS = {
    "gpt-2": _Words(),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _Words(single_digits=True),
    "tekken": _Words(_CASED, whole=True, bos=True),
}


class GgufTokenizer(NamedTuple):
    """The files of a tokenizer. `tokenizer` and `config` are tokenizer.json and tokenizer_config.json. `eos_ids`:
    tokens that end an answer. `image_token`: the id that stands for a picture, None without pictures."""

    tokenizer: Json
    config: Json
    eos_ids: tuple[int, ...]
    image_token: int | None


def tokenizer_json(file: GgufFile, *, pictures: bool = False) -> GgufTokenizer:
    """The tokenizer of a GGUF file. `pictures`: prompts have a placeholder, `<image>`. The file of a model that was
    trained without this token lacks it; the placeholder then replaces the unknown token, which a tokenizer with byte
    fallback never produces. Raises `CheckpointError`."""
    vocabulary = _GgufVocabulary(file)
    image = vocabulary.place_for_pictures() if pictures else None
    kind = file.fields.get("tokenizer.ggml.model")
    known = kind in ("llama", "gpt2")
    require(known, file.path, f"a tokenizer of type {kind!r} is not supported; supported: llama, gpt2")
    bos_by_default, parts = _pieces(vocabulary) if kind == "llama" else _bytes(vocabulary)
    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    begins = vocabulary.switch("add_bos_token", bos_by_default) and bos is not None
    ends = vocabulary.switch("add_eos_token", False) and eos is not None
    tokenizer = {
        "version": "1.0",
        "added_tokens": list(vocabulary.added()),
        **parts,
        "post_processor": _around(vocabulary, bos if begins else None, eos if ends else None),
    }
    names = {"bos": bos, "eos": eos, "pad": vocabulary.special("padding"), "unk": vocabulary.special("unknown")}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": vocabulary.tokens[i] for name, i in names.items() if i is not None},
    }
    return GgufTokenizer(tokenizer, config, vocabulary.ends(), image)


class _GgufVocabulary:
    """The tokens of the file, checked. `kinds`: llama.cpp's token types."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.tokens: list[str] = self._list("tokens", str)
        n = len(self.tokens)
        require(n > 0, file.path, "tokenizer.ggml.tokens is missing: a file without a tokenizer is not supported")
        self.kinds: list[int] = self._list("token_type", int) or [_NORMAL] * n
        require(len(self.kinds) == n, file.path, f"tokenizer.ggml.token_type has {len(self.kinds)} of {n} tokens")
        table = file.tensors.get("token_embd.weight")
        fits = table is None or n <= table.shape[0]
        require(fits, file.path, f"the tokenizer has {n} tokens, token_embd.weight fewer rows")

    def _list(self, name: str, kind: type) -> list[Any]:
        values = self.file.fields.get(f"tokenizer.ggml.{name}", [])
        fits = isinstance(values, list) and all(isinstance(v, kind) for v in values)
        require(fits, self.file.path, f"tokenizer.ggml.{name} is no list of {kind.__name__}")
        return values

    def scores(self) -> list[float]:
        found = self._list("scores", float)
        wanted = len(self.tokens)
        require(len(found) == wanted, self.file.path, f"tokenizer.ggml.scores has {len(found)} of {wanted} tokens")
        return found

    def merges(self) -> list[list[str]]:
        found = [merge.split(" ") for merge in self._list("merges", str)]
        known = frozenset(self.tokens)
        fits = all(len(m) == 2 and known.issuperset((*m, "".join(m))) for m in found)
        require(bool(found) and fits, self.file.path, "tokenizer.ggml.merges is missing or names no tokens")
        return found

    def special(self, name: str) -> int | None:
        """The id of the special token of this name, None if there is none."""
        found = self.file.fields.get(f"tokenizer.ggml.{name}_token_id")
        return found if type(found) is int and 0 <= found < len(self.tokens) else None

    def switch(self, name: str, default: bool) -> bool:
        return bool(self.file.fields.get(f"tokenizer.ggml.{name}", default))

    def ends(self) -> tuple[int, ...]:
        named = [i for name in ("eos", "eot", "eom") if (i := self.special(name)) is not None]
        written = [i for i, kind in enumerate(self.kinds) if kind == _CONTROL and self.tokens[i] in _ENDS]
        return tuple(dict.fromkeys([*named, *written]))

    def place_for_pictures(self) -> int:
        if IMAGE in self.tokens:
            found = self.tokens.index(IMAGE)
            self.kinds[found] = _CONTROL
            return found
        spare = next((i for i, kind in enumerate(self.kinds) if kind == _UNKNOWN), None)
        fits = spare is not None and "<0x00>" in self.tokens
        require(fits, self.file.path, f"has no token {IMAGE} and none to spare, so pictures have no place in a prompt")
        assert spare is not None
        self.tokens[spare], self.kinds[spare] = IMAGE, _CONTROL
        return spare

    def added(self) -> Iterator[Json]:
        """The entries of added tokens, which are searched for in a text before it is split."""
        for i, kind in enumerate(self.kinds):
            if kind in (_UNKNOWN, _CONTROL, _USER) and self.tokens[i]:
                switches = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
                yield {"id": i, "content": self.tokens[i], **switches, "special": kind != _USER}

    def by_token(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            found.setdefault(token, i)
        return found


def _pieces(vocabulary: _GgufVocabulary) -> tuple[bool, Json]:
    """The BOS default and the parts of tokenizer.json for Llama 2's and Gemma's kind: spaces become marks, characters
    outside the vocabulary become bytes, and the pair that makes the token with the best score is merged first."""
    begun = vocabulary.switch("add_space_prefix", True)
    by_token, unknown = vocabulary.by_token(), vocabulary.special("unknown")
    merges = _by_score(by_token, vocabulary.scores(), vocabulary.kinds)
    marks: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    back: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begun else []),
    ]
    steps = [{"type": "Prepend", "prepend": _SPACE}, *marks] if begun else marks
    model = _model(by_token, merges) | {"byte_fallback": "<0x00>" in by_token, "fuse_unk": True}
    if unknown is not None and vocabulary.tokens[unknown] != IMAGE:
        model["unk_token"] = vocabulary.tokens[unknown]
    return True, {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": model,
    }


def _by_score(by_token: Mapping[str, int], scores: Sequence[float], kinds: Sequence[int]) -> list[list[str]]:
    found: list[tuple[float, int, int, list[str]]] = []
    for token, i in by_token.items():
        if kinds[i] != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in by_token and right in by_token:
                found.append((-scores[i], by_token[left], by_token[right], [left, right]))
    found.sort(key=lambda merge: merge[:3])
    return [merge for *_, merge in found]


def _bytes(vocabulary: _GgufVocabulary) -> tuple[bool, Json]:
    """The BOS default and the parts of tokenizer.json for GPT-2's kind. Tokenizers of this kind differ in how they
    split a text into words."""
    name = vocabulary.file.fields.get("tokenizer.ggml.pre", "gpt-2")
    known = name in _WORDS
    require(
        known, vocabulary.file.path, f"tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(_WORDS)}"
    )
    words = _WORDS[name]
    spelled: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps: list[Json] = [{"type": "Digits", "individual_digits": True}] if words.single_digits else []
    if words.pattern:
        pattern = {"Regex": words.pattern}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    steps.append({**spelled, "use_regex": not words.pattern})
    model = _model(vocabulary.by_token(), vocabulary.merges())
    return words.bos, {
        "normalizer": {"type": "NFC"} if words.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**spelled, "use_regex": True},
        "model": model | {"byte_fallback": False, "ignore_merges": words.whole},
    }


def _model(by_token: Mapping[str, int], merges: list[list[str]]) -> Json:
    return {"type": "BPE", "vocab": dict(by_token), "merges": merges, "unk_token": None}


def _around(vocabulary: _GgufVocabulary, first: int | None, last: int | None) -> Json | None:
    """The post-processor that adds tokens before and after every text; None if there are none to add."""
    if first is None and last is None:
        return None
    tokens = vocabulary.tokens

    def one(i: int | None) -> list[Json]:
        return [] if i is None else [{"SpecialToken": {"id": tokens[i], "type_id": 0}}]

    def text(name: str) -> list[Json]:
        return [*one(first), {"Sequence": {"id": name, "type_id": 0}}, *one(last)]

    special = {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in (first, last) if i is not None}
    return {
        "type": "TemplateProcessing",
        "single": text("A"),
        "pair": [*text("A"), *text("B")],
        "special_tokens": special,
    }
