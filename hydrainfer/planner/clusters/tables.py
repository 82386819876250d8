"""Tables of what was measured on one instance of a cluster, as files hold them: prefill by length, decode by batch."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import msgspec

from hydrainfer.config import converted, read_yaml
from hydrainfer.core import ConfigError
from hydrainfer.planner.clusters.times import Times, TimesPoint

MIB = 1 << 20


class DecodeBatch(msgspec.Struct, frozen=True, array_like=True):
    """One measurement: the sequences that an instance decodes together, and the seconds of a step."""

    sequences: int
    step_s: float


class ClusterTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurements of one instance. `model`: its name; `hardware`, `devices`: what the instance is. `prefill`: rows
    of tokens of a prompt, MiB that it leaves in the caches, and seconds, by ascending tokens. `decode`: rows of
    sequences and seconds of a step, with contexts of the usual length; () if the cluster only prefills. `source`: where
    the numbers are from. `assumed`: what was not measured, for the plan; "" if all was. Raises `ConfigError`."""

    model: str
    hardware: str
    devices: int = 1
    prefill: tuple[tuple[float, float, float], ...]
    decode: tuple[DecodeBatch, ...] = ()
    source: str
    assumed: str = ""

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ConfigError("devices: at least 1 makes an instance", param="devices")
        for (shorter, more_mib, _), (longer, mib, _) in pairwise(self.prefill):
            if shorter < longer and 0.0 < mib < more_mib:
                raise ConfigError(
                    f"prefill: {longer:g} tokens leave {mib:g} MiB in the caches, {shorter:g} leave {more_mib:g}",
                    param="prefill",
                )
        for batch in self.decode:
            if batch.sequences < 1 or not 0.0 < batch.step_s < math.inf:
                raise ConfigError(
                    f"decode: sequences and seconds must be positive, not {batch.sequences} and {batch.step_s:g}",
                    param="decode",
                )
        for before, after in pairwise(self.decode):
            if after.sequences <= before.sequences:
                raise ConfigError(
                    f"decode: {after.sequences} sequences after {before.sequences}, rows must ascend", param="decode"
                )

    @property
    def times(self) -> Times:
        """The rows of `prefill`. Raises `ConfigError`."""
        try:
            return Times(points=tuple(TimesPoint(tokens, mib * MIB, seconds) for tokens, mib, seconds in self.prefill))
        except ConfigError as e:
            raise ConfigError(e.message.replace("times:", "prefill:", 1), param="prefill") from None

    def batch(self, tpot_s: float | None) -> DecodeBatch:
        """The batch with the most tokens per second, of those whose step is within the TPOT. Raises `ConfigError` if
        there is none."""
        within = [batch for batch in self.decode if tpot_s is None or batch.step_s <= tpot_s]
        if not self.decode:
            raise ConfigError("decode: missing, and this cluster has to decode", param="decode")
        if not within:
            quickest = min(batch.step_s for batch in self.decode)
            raise ConfigError(
                f"decode: no batch was measured within tpot={tpot_s:g}, the quickest step takes {quickest:g} s",
                param="decode",
            )
        return max(within, key=lambda batch: batch.sequences / batch.step_s)


def read_table(path: Path) -> ClusterTable:
    """The table in a file. Raises `ConfigError` with a message that names the file."""
    try:
        table = converted(read_yaml(path), ClusterTable, str(path), "times")
        _ = table.times
    except ConfigError as e:
        message = e.message
        if str(path) not in message:
            message = f"{path}: {message}"
        raise ConfigError(message, param=e.param or "times") from None
    return table
