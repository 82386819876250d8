"""The bytes of each token id, read from the tokenizer's own decoder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Vocabulary(msgspec.Struct, frozen=True):
    """The bytes of all token ids. `pieces[id]` is what the id adds to the text; ids without an entry add nothing.

    `byte_ids`: SentencePiece's byte-fallback tokens (`<0xE4>`). A run of them is text only if the whole run is valid
    UTF-8, else one replacement character per byte, as in `tokenizers`. `byte_level` (byte-level BPE): the bytes of all
    tokens are one UTF-8 stream. `n_strip`: spaces removed from the start of a text. `special_ids`: left out of a text
    on request. `n_longest`: characters of the longest token. `n_tokens`: rows of the model's embedding.
    """

    pieces: Mapping[int, bytes]
    byte_ids: frozenset[int]
    byte_level: bool
    n_strip: int
    special_ids: frozenset[int]
    n_longest: int
    n_tokens: int

    def spell(self, token: int) -> bytes:
        return self.pieces.get(token, b"")

    def token_text(self, token: int) -> str:
        """The text of a single token, for log-probabilities. A part of a character becomes U+FFFD."""
        return self.spell(token).decode("utf-8", "replace")


def read_vocabulary(tokenizer: Any, n_tokens: int) -> Vocabulary:
    """The vocabulary of a `tokenizers.Tokenizer`. Raises `ValueError` naming a decoder step that cannot be streamed
    exactly."""
    spec = json.loads(tokenizer.to_str())
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    special = frozenset(i for i, token in added.items() if token.special)
    byte_level, replacements, fallback, n_strip = _read_decoder(spec.get("decoder"))
    pieces: dict[int, bytes] = {}
    byte_ids: set[int] = set()
    alphabet = _byte_alphabet() if byte_level else {}
    for token, i in vocab.items():
        if byte_level:
            known = all(c in alphabet for c in token)
            pieces[i] = bytes(alphabet[c] for c in token) if known else token.encode()
            continue
        text = token
        for old, new in replacements:
            text = text.replace(old, new)
        value = _byte_value(text) if fallback else None
        if value is not None:
            byte_ids.add(i)
        pieces[i] = text.encode() if value is None else bytes([value])
    longest = max((len(token) for token in vocab), default=1)
    return Vocabulary(pieces, frozenset(byte_ids), byte_level, n_strip, special, longest, n_tokens)


def _read_decoder(decoder: dict | None) -> tuple[bool, list[tuple[str, str]], bool, int]:
    """(byte level?, replacements, byte fallback?, leading spaces stripped) of the decoder in `tokenizer.json`."""
    if decoder is None:
        raise ValueError("no decoder")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [s["type"] for s in steps] == ["ByteLevel"]:
        return True, [], False, 0
    replacements: list[tuple[str, str]] = []
    fallback = fused = False
    n_strip = 0
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"] and not (fallback or fused):
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback" and not fused:
            fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and step["content"] == " " and step["stop"] == 0:
            n_strip += step["start"]
        else:
            raise ValueError(f"decoder step {kind}")
    return False, replacements, fallback, n_strip


def _byte_value(token: str) -> int | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters that stand for the 256 byte values."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(b): b for b in printable}
    others = (b for b in range(256) if b not in set(printable))
    alphabet.update({chr(256 + i): b for i, b in enumerate(others)})
    return alphabet
