"""How copies queue for the links between instances, and for those between devices and hosts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from hydrainfer.cache import Pulls
from hydrainfer.core import ExportHandle
from hydrainfer.planner.nouns import Link


class LinkEnds:
    """The ends of the links: each instance sends one copy and receives one at a time. `busy_s`: the seconds that each
    end, "from NAME" or "to NAME", has copied."""

    def __init__(self, link: Link) -> None:
        self.busy_s = defaultdict[str, float](float)
        self._link = link
        self._sends_until: dict[str, float] = {}
        self._takes_until: dict[str, float] = {}

    def begin(self, source: str, target: str, n_bytes: int, now: float) -> float:
        """Reserve both ends for a copy that is requested now. Returns the time when it will be done."""
        start_s = max(now, self._sends_until.get(source, 0.0), self._takes_until.get(target, 0.0))
        end_s = start_s + self._link.latency_s + n_bytes / self._link.bytes_per_s
        self._sends_until[source] = self._takes_until[target] = end_s
        self.busy_s[f"from {source}"] += end_s - start_s
        self.busy_s[f"to {target}"] += end_s - start_s
        return end_s


class HostLink:
    """The link between one instance's device and host memory, as an `engine.ports.Puller`. `block_bytes`: by cache."""

    def __init__(self, link: Link, block_bytes: Mapping[str, int], clock: Callable[[], float]) -> None:
        self.exports = {name: ExportHandle("host") for name in block_bytes}
        self._link = link
        self._block_bytes = block_bytes
        self._clock = clock
        self._until_s = 0.0

    def pull(self, sources: dict[str, ExportHandle], pulls: Pulls) -> ModelledCopy:  # noqa: ARG002 - its own
        n_bytes = sum(len(ids) * self._block_bytes[name] for name, (_, ids) in pulls.blocks.items())
        begin_s = max(self._until_s, self._clock())
        self._until_s = begin_s + self._link.latency_s + n_bytes / self._link.host_bytes_per_s
        return ModelledCopy(self._until_s)

    def forget(self, owner: str) -> None:
        """Nothing to do: no modelled instance dies."""

    def close(self) -> None:
        """Nothing to do: nothing runs outside the virtual clock."""


class ModelledCopy:
    """A copy that is done at a known time, and never fails."""

    cut, wait_for = False, None

    __slots__ = ("_at",)

    def __init__(self, at_s: float) -> None:
        self._at = at_s

    def poll(self, now: float) -> bool | None:
        return True if now >= self._at else None

    def ready_at(self) -> float | None:
        return self._at
