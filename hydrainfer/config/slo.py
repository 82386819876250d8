"""Service level objectives: the limits that a request must meet, from the command line or from files as in
configs/slo."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from hydrainfer.config.read import check_known, read_yaml
from hydrainfer.core import ConfigError

_PART = re.compile(r"(ttft|tpot|e2el|e2e)([:=])(.+)")
_NUMBER = re.compile(r"\w+=[\d.]+")  # also an unknown limit: no file or preset has such a name
_SCALE = {":": 1e-3, "=": 1.0}  # ttft:250 is in ms, ttft=0.25 in s


class Slo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A service level objective: limits in seconds; None is no limit. A request meets it if its first token comes
    within `ttft_s`, at least the share `token_share` of its token intervals is within `tpot_s` (paper, section 2.3: 90
    %), and it ends within `e2e_s`. Raises `ConfigError`."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    token_share: float = 0.9

    def __post_init__(self) -> None:
        limits = self._limits
        for name, limit in limits.items():
            if limit is not None and not (limit > 0 and math.isfinite(limit)):
                raise ConfigError(f"the {name} SLO must be a positive time, not {limit * 1e3:g} ms", param="slo")
        if all(limit is None for limit in limits.values()):
            raise ConfigError("an SLO needs at least one limit, such as ttft:250 or tpot:40 (ms)", param="slo")
        if not 0 < self.token_share <= 1:
            raise ConfigError(f"token_share must be in (0, 1], not {self.token_share:g}", param="slo")

    def __str__(self) -> str:
        text = ", ".join(f"{name.upper()} ≤ {s * 1e3:g} ms" for name, s in self._limits.items() if s is not None)
        return text if self.tpot_s is None else f"{text} for {self.token_share:.0%} of the intervals"

    @property
    def inline(self) -> str:
        """The limits as text that `parse_slo` reads."""
        return ",".join(f"{name}={seconds:g}" for name, seconds in self._limits.items() if seconds is not None)

    @property
    def _limits(self) -> dict[str, float | None]:
        return {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2e": self.e2e_s}


def is_slo_part(text: str) -> bool:
    return _PART.fullmatch(text) is not None


def parse_slo(parts: Iterable[str]) -> Slo:
    """The objective given by `["ttft:250", "tpot:40"]`, in milliseconds, or `["ttft=0.25", "tpot=0.04"]`, in seconds;
    also as one string with blanks or commas. Raises `ConfigError`."""
    limits: dict[str, float] = {}
    for part in " ".join(parts).replace(",", " ").split():
        match = _PART.fullmatch(part)
        try:
            assert match is not None
            limits[match[1].removesuffix("l") + "_s"] = float(match[3]) * _SCALE[match[2]]
        except (AssertionError, ValueError):
            raise ConfigError(
                f"cannot read the objective {part!r}: write ttft:250, tpot:40, e2e:2000 (ms) or ttft=0.25 (s)",
                param="slo",
            ) from None
    return Slo(**limits)


def inline_slo(text: str | None) -> Slo | None:
    """The limits written in an option; None if it is not given, or names a preset or a file. Raises `ConfigError`."""
    parts = (text or "").replace(",", " ").split()
    return parse_slo(parts) if parts and (is_slo_part(parts[0]) or _NUMBER.fullmatch(parts[0])) else None


def read_slo(path: Path, dataset: str | None) -> Slo:
    """The objective for a dataset in a model's file: `dataset: {ttft_ms, tpot_ms, e2e_ms, token_share}`. Raises
    `ConfigError` that lists the datasets there."""
    table = read_yaml(path)
    if dataset is None or dataset not in table:
        wanted = "which one is not said" if dataset is None else f"none for {dataset!r}"
        raise ConfigError(f"{path} has SLOs for {', '.join(table)}: {wanted}; name it as FILE:NAME", param="slo")
    return _slo(table[dataset], f"{path}, {dataset}")


def _slo(entry: Any, where: str) -> Slo:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must hold limits such as ttft_ms", param="slo")
    values: dict[str, float] = {}
    for key, value in entry.items():
        check_known(key, ("ttft_ms", "tpot_ms", "e2e_ms", "token_share"), where)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{where}: {key} must be a number, not {value!r}", param="slo")
        values[key.replace("_ms", "_s")] = value / 1e3 if key.endswith("_ms") else float(value)
    return Slo(**values)
