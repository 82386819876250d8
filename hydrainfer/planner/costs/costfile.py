"""The file of a measurement: batch times, the cost model fitted to them, and the machine and versions measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import yaml

from hydrainfer.config import read_yaml
from hydrainfer.config.schema import Quantization
from hydrainfer.core import ConfigError, CostModel
from hydrainfer.planner.nouns import Link


class BatchShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The size of one batch. Vision: `pictures` of `tokens` embedding tokens each. Language: a chunk of `chunk` tokens
    after `start` earlier ones, and `decodes` sequences that have `context` tokens each."""

    pictures: int = 0
    tokens: int = 0
    chunk: int = 0
    start: int = 0
    decodes: int = 0
    context: int = 0

    @property
    def is_vision(self) -> bool:
        return self.pictures > 0


class BatchTime(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The times of `n` runs of a batch, alone or `beside` batches of the other lane: minimum, median, 90th
    percentile."""

    work: BatchShape
    beside: BatchShape | None = None
    n: int
    min_s: float
    p50_s: float
    p90_s: float


class Copies(msgspec.Struct, frozen=True, kw_only=True):
    """The times of `n` copies of one size between two processes."""

    transport: str
    n_bytes: int
    n: int
    p50_s: float
    p90_s: float


class CostFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The measurement of one model on one device. `cost`: the cost model fitted to `points`; `errors`: by stage,
    relative errors on points held out of the fit. `quantization`: as in the server that was measured. `note`: caveats.
    `--cost-model FILE` reads the `cost` of such a file."""

    kind: Literal["measured"]
    model: str
    device: str
    dtype: str
    quantization: Quantization = "none"
    threads: int
    date: str
    hardware: dict[str, str | int | float]
    versions: dict[str, str]
    note: str = ""
    cost: CostModel
    errors: dict[str, dict[str, float]]
    points: tuple[BatchTime, ...]
    copies: tuple[Copies, ...] = ()

    def link(self) -> Link:
        """The link fitted to the copies over the fastest transport. Raises `ConfigError` if no copies were measured."""
        copies_of: dict[str, list[Copies]] = {}
        for c in self.copies:
            copies_of.setdefault(c.transport, []).append(c)
        if not copies_of:
            raise ConfigError(f"no copies between instances were measured for {self.model}")
        return link_of(min(copies_of.values(), key=lambda copies: max(copies, key=lambda c: c.n_bytes).p50_s))


def link_of(copies: Sequence[Copies]) -> Link:
    """The link whose latency and bandwidth fit the smallest and the largest of one transport's copies."""
    small, large = (f(copies, key=lambda c: c.n_bytes) for f in (min, max))
    if large.n_bytes == small.n_bytes or large.p50_s <= small.p50_s:
        return Link(bytes_per_s=large.n_bytes / large.p50_s, latency_s=0.0)
    rate = (large.n_bytes - small.n_bytes) / (large.p50_s - small.p50_s)
    return Link(bytes_per_s=rate, latency_s=max(0.0, small.p50_s - small.n_bytes / rate))


def read_cost_file(path: Path) -> CostFile:
    """The measurement in a file. Raises `ConfigError`."""
    try:
        return msgspec.convert(read_yaml(path), CostFile)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{path}: not a measurement of `hydrainfer profile` ({e})", param="cost_model") from None


def write_cost_file(path: Path, file: CostFile, comment: str = "") -> None:
    """Write the measurement as YAML. Raises `ConfigError` if that fails."""
    text = yaml.safe_dump(msgspec.to_builtins(file), sort_keys=False, default_flow_style=None, width=120)
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(head + text, "utf-8")
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}", param="out") from None
