"""The header of a GGUF file: its fields and the table of its tensors (ggml/docs/gguf.md of llama.cpp).

Numbers are little-endian. A file has: magic, version and counts; the fields (name, type, value); the table (name,
dimensions with the fastest first, type, offset); the tensors, starting at a multiple of `general.alignment`.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hydrainfer.checkpoint.files import require
from hydrainfer.core import CheckpointError

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_MOST_SIDES, _MOST_ELEMENTS = 4, 1 << 24


class GgufTensor(NamedTuple):
    """One entry of the table of tensors. `kind`: ggml's name of the type ("F32", "Q4_K"); `shape`: the fastest
    dimension is last; `offset`: in bytes from the file's start."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class GgufFile(NamedTuple):
    """The header of a GGUF file. `fields`: numbers, texts, and lists of these, by name. `tensors`: by name, in the
    order of the table."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture", ""))

    def field(self, name: str, default: Any = None) -> Any:
        """The value of a field of this architecture: `attention.head_count` is `llama.attention.head_count`."""
        return self.fields.get(f"{self.architecture}.{name}", default)

    def number(self, name: str, default: float | None = None) -> Any:
        """The value of a field that must be one number. Raises `CheckpointError`."""
        value = self.field(name, default)
        known = isinstance(value, int | float) and not isinstance(value, bool)
        what = "is missing" if value is None else "is no number"
        require(known, self.path, f"{self.architecture}.{name} {what}")
        return value


def read_gguf(path: Path) -> GgufFile:
    """The header of a GGUF file. Raises `CheckpointError`, one line, if the file is missing, damaged, truncated or of
    an unsupported version."""
    try:
        with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path).read()
    except (struct.error, ValueError, IndexError, OverflowError, MemoryError, RecursionError):  # also for an empty file
        raise CheckpointError(f"{path}: is damaged or truncated; its header cannot be read as GGUF") from None
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {e.strerror}") from None


class _Reader:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self._at = data, path, 0

    def read(self) -> GgufFile:
        path = self._path
        require(self._data[:4] == _MAGIC, path, "is a file, but no GGUF file")
        self._at = 4
        version = self._number("I")
        known = " or ".join(map(str, _VERSIONS))
        require(version in _VERSIONS, path, f"is GGUF of version {version}; supported: {known}, little-endian")
        n_tensors, n_fields = self._number("Q"), self._number("Q")
        fields: dict[str, Any] = {}
        for _ in range(n_fields):
            name = self._text()
            fields[name] = self._value(self._number("I"))
        table = [self._entry() for _ in range(n_tensors)]
        split = fields.get("split.count", 1)
        require(split in (0, 1), path, f"is one of {split} parts; join them with llama-gguf-split --merge")
        align = fields.get("general.alignment", 32)
        require(isinstance(align, int) and align > 0, path, f"general.alignment is {align!r}")
        start = -(-self._at // align) * align
        tensors = {name: self._tensor(name, shape, kind, start + offset) for name, shape, kind, offset in table}
        return GgufFile(path, fields, tensors)

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _text(self) -> str:
        n = self._number("Q")
        if n > len(self._data) - self._at:
            raise ValueError
        self._at += n
        return self._data[self._at - n : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            value = self._number(_NUMBERS.get(kind, "0"))
            return float(str(np.float32(value))) if kind == _FLOAT else value  # 1e-05, not float32's nearest value
        kind, n = self._number("I"), self._number("Q")
        if n > min(_MOST_ELEMENTS, len(self._data) - self._at):  # an element of any type takes at least a byte
            raise ValueError
        if kind == _STRING:
            return [self._text() for _ in range(n)]
        code = _NUMBERS.get(kind, "nested, which nothing needs")
        values = list(struct.unpack_from(f"<{n}{code}", self._data, self._at))
        self._at += struct.calcsize(f"<{n}{code}")
        return values

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, n_sides = self._text(), self._number("I")
        require(n_sides <= _MOST_SIDES, self._path, f"tensor {name} has {n_sides} sides")
        sides = tuple(self._number("Q") for _ in range(n_sides))
        return name, sides[::-1], self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        known = number in GGMLQuantizationType._value2member_map_
        require(known, self._path, f"tensor {name} has type {number}, which is not known")
        kind = GGMLQuantizationType(number)
        n_values, n_bytes = GGML_QUANT_SIZES[kind]
        inner = shape[-1] if shape else 1
        require(inner % n_values == 0, self._path, f"tensor {name} of {kind.name} has rows of {inner}")
        size = math.prod(shape) // n_values * n_bytes
        fits = offset + size <= len(self._data)
        require(fits, self._path, f"is truncated: tensor {name} ends at {offset + size} of {len(self._data)} bytes")
        return GgufTensor(kind.name, shape, offset, size)
