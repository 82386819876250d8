"""Restarts of dead instances: when to retry one that could not start, and when a stage is lost for good.

    gone ─> starting ─> back: its failures are forgotten
             ^    │ it could not start
             └────┴─ pause, doubled each time (the launcher is asked to try again)

An instance is hopeless if its checkpoint is damaged or missing, if it could not start several times in a row, if it has
been away for too long, or if nothing starts it again. It is still retried while others run its stages. A stage is lost
when no instance runs it and all its instances are hopeless. Pure: no launcher, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hydrainfer.core import CheckpointError, ErrorInfo, Role, Stage

_ATTEMPTS = 6  # an instance is hopeless after this many failures in a row
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_ASK_S = 5.0  # how often the launcher is asked about one that is silent
_NEVER = float("inf")


class Lost(NamedTuple):
    """A stage that no instance runs and none will run again. `why`: the reason in one line, for the operator."""

    stage: Stage
    why: str


@dataclass(slots=True)
class _Away:
    since: float
    for_good: bool = False
    n_failures: int = 0
    error: ErrorInfo | None = None  # of the latest attempt
    retry_at: float = _NEVER
    ask_at: float = _NEVER


class Restarts:
    """The instances that are away, and their failures. `roles`: the role of every instance of the layout. `timeout_s`:
    an instance that is away for longer is hopeless."""

    def __init__(self, roles: Mapping[str, Role], timeout_s: float = _NEVER) -> None:
        self._roles = roles
        self._timeout_s = timeout_s
        self._away: dict[str, _Away] = {}

    def gone(self, name: str, now: float, for_good: bool = False) -> None:
        """Note that an instance has died; `for_good` if nothing starts it again."""
        away = self._away.setdefault(name, _Away(now))
        away.for_good, away.ask_at = for_good, now + _ASK_S

    def failed(self, name: str, error: ErrorInfo, now: float) -> None:
        """Note that an attempt to start an instance has failed with `error`."""
        away = self._away.setdefault(name, _Away(now))
        away.retry_at = now + min(_FIRST_PAUSE_S * 2**away.n_failures, _LONGEST_PAUSE_S)
        away.n_failures += 1
        away.error = error

    def back(self, name: str) -> None:
        self._away.pop(name, None)

    def due(self, now: float) -> list[str]:
        """The instances to try again now; each is returned once per attempt."""
        names = [name for name, away in self._away.items() if now >= away.retry_at]
        for name in names:
            self._away[name].retry_at, self._away[name].ask_at = _NEVER, now + _ASK_S
        return names

    def silent(self, now: float) -> list[str]:
        """The instances that are being started and have said nothing for a while; each is returned every `_ASK_S`."""
        names = []
        for name, away in self._away.items():
            if now >= away.ask_at and away.retry_at == _NEVER and not away.for_good:
                away.ask_at = now + _ASK_S
                names.append(name)
        return names

    def trouble(self, name: str) -> str:
        """The reason why an instance is not back yet, or "" if that is not known."""
        away = self._away.get(name)
        if away is not None and away.for_good:
            return f"{name} has died, and nothing starts it again"
        if away is None or away.error is None:
            return ""
        return f"{name} could not be started again: {away.error.message}"

    def lost(self, dark: Sequence[Stage], now: float) -> Lost | None:
        """The first stage of `dark` whose instances are all hopeless, or None. `dark`: the stages that no instance runs
        now."""
        for stage in dark:
            names = [name for name, role in self._roles.items() if role.runs(stage)]
            reasons = [self._hopeless(name, now) for name in names]
            if all(reasons):
                return Lost(stage, f"no instance can {stage.value} any more: {'; '.join(reasons)}")
        return None

    def _hopeless(self, name: str, now: float) -> str:
        """The reason why an instance will not come back, or "" if it may."""
        away = self._away.get(name)
        if away is None:
            return ""
        if away.for_good or (away.error is not None and away.error.type == CheckpointError.type):
            return self.trouble(name)
        if away.n_failures >= _ATTEMPTS:
            return f"{self.trouble(name)} ({away.n_failures} attempts)"
        if now > away.since + self._timeout_s:
            return self.trouble(name) or f"{name} has died and is not back after {self._timeout_s:.0f} s"
        return ""
