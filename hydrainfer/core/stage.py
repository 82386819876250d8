"""The stages of a multimodal request, the roles made of stages, and the layouts made of roles."""

from __future__ import annotations

import enum
import re
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile

from hydrainfer.core.errors import ConfigError


class Stage(enum.StrEnum):
    """One kind of work of a request, in the order a request visits them."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


class Lane(enum.StrEnum):
    """One of the two independent execution streams of an instance (paper 3.1)."""

    VISION = "vision"
    LANGUAGE = "language"


LANE_OF = {Stage.ENCODE: Lane.VISION, Stage.PREFILL: Lane.LANGUAGE, Stage.DECODE: Lane.LANGUAGE}

_LETTER = {Stage.ENCODE: "E", Stage.PREFILL: "P", Stage.DECODE: "D"}
ROLE_NAMES = ("E", "P", "D", "EP", "ED", "PD", "EPD")


@dataclass(frozen=True, slots=True)
class Role:
    """The set of stages that an instance runs. It determines which weights are loaded and which caches exist."""

    stages: frozenset[Stage]

    @classmethod
    def parse(cls, text: str) -> Role:
        """`"EP"` → a role of encode and prefill. Raises `ConfigError` naming the valid roles."""
        if text not in ROLE_NAMES:
            raise ConfigError(f"unknown role {text!r}; roles are {', '.join(ROLE_NAMES)}")
        return cls(frozenset(s for s, letter in _LETTER.items() if letter in text))

    def runs(self, stage: Stage) -> bool:
        return stage in self.stages

    @property
    def lanes(self) -> tuple[Lane, ...]:
        used = {LANE_OF[s] for s in self.stages}
        return tuple(lane for lane in Lane if lane in used)

    def __str__(self) -> str:
        return "".join(letter for s, letter in _LETTER.items() if s in self.stages)


class Duties:
    """What an instance does: the stages that it has `loaded` weights and caches for, and those that it `accepts` now.
    Whoever wants to know asks, and keeps no copy."""

    def __init__(self, role: Role) -> None:
        self.loaded = role
        self._visits: dict[tuple[tuple[Stage, ...], int], tuple[Stage, ...]] = {}
        self.accept(role)

    def accept(self, role: Role) -> None:
        """Do these stages from now on. Raises `ConfigError` if they are not all loaded."""
        if not role.stages <= self.loaded.stages:
            raise ConfigError(f"an instance that has loaded {self.loaded} cannot become {role}")
        self.accepted, self._stages = role, role.stages
        self._visits.clear()

    def runs(self, stage: Stage) -> bool:
        return stage in self._stages

    @property
    def only_continues(self) -> bool:
        """Whether it decodes what others have prefilled."""
        return Stage.PREFILL not in self._stages and Stage.DECODE in self._stages

    def visit(self, plan: tuple[Stage, ...], cursor: int) -> tuple[Stage, ...]:
        """The consecutive steps of a plan, from number `cursor` on, that a request can pass here."""
        visit = self._visits.get((plan, cursor))
        if visit is None:
            visit = self._visits[plan, cursor] = tuple(takewhile(self.runs, plan[cursor:]))
        return visit

    def __str__(self) -> str:
        return str(self.accepted)


@dataclass(frozen=True, slots=True)
class Layout:
    """A multiset of instances, e.g. `1E3P4D` or `1E2PD+1EPD`."""

    instances: tuple[Role, ...]

    @classmethod
    def parse(cls, text: str) -> Layout:
        """A layout from groups of count and role, joined by nothing or `+`. Raises `ConfigError` for any other text, or
        if no instance prefills or none decodes. Whether one must encode depends on the model."""
        groups = re.findall(r"(\d+)([EPD]+)", text)
        if not groups or "".join(n + r for n, r in groups) != text.replace("+", ""):
            raise ConfigError(f"cannot read layout {text!r}; write counts and roles such as 1EPD, 1E1P1D or 1E2PD+1EPD")
        roles = tuple(Role.parse(r) for n, r in groups for _ in range(int(n)))
        missing = [s.value for s in (Stage.PREFILL, Stage.DECODE) if not any(r.runs(s) for r in roles)]
        if missing:
            raise ConfigError(
                f"layout {text!r} has no instance that runs {' or '.join(missing)}; add one, as in 1E1P1D or 1EPD"
            )
        return cls(roles)

    def __str__(self) -> str:
        """The layout in its usual spelling, `1E1P1D`, with `+` only before a role that repeats a stage (`1E2PD+1EPD`),
        or after one that names its device (`1E@h20+7PD@h800`)."""
        text, stages = "", frozenset[Stage]()
        for role, n in Counter(self.instances).items():
            apart = not stages.isdisjoint(role.stages) or "@" in text
            text += f"{'+' if apart else ''}{n}{role}"
            stages = role.stages if apart else stages | role.stages
        return text
