"""Every layout of N devices, which may be of several kinds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from hydrainfer.core import ConfigError, Layout, Role

METHODS = (("EP", "D"), ("ED", "P"), ("E", "PD"), ("E", "P", "D"))
"""Ways to disaggregate (paper, section 3.3, and E+PD). EPD, which does not disaggregate, is not among them."""


@dataclass(frozen=True, slots=True)
class PlacedRole(Role):
    """A role on a kind of device: `PD@h20`."""

    device: str

    def __str__(self) -> str:
        return f"{Role.__str__(self)}@{self.device}"


def role_of(name: str) -> Role:
    """The role named `EP`, or `EP@h20` where devices differ. Raises `ConfigError`."""
    role, _, device = name.partition("@")
    plain = Role.parse(role)
    return PlacedRole(plain.stages, device) if device else plain


def layout_of(text: str) -> Layout:
    """The layout whose `str` is `text`. Raises `ConfigError`."""
    if "@" not in text:
        return Layout.parse(text)
    groups = re.findall(r"(\d+)([EPD]+@[^+]+)", text)
    return Layout(tuple(role_of(name) for n, name in groups for _ in range(int(n))))


def layouts(n_devices: int) -> list[Layout]:
    """All layouts of `n_devices`: EPD only, each method at every ratio, and each of those with some devices left to EPD
    (141 layouts for 8 devices). Raises `ConfigError`."""
    if n_devices < 1:
        raise ConfigError(f"{n_devices} devices cannot serve anything; give at least one", param="devices")
    candidates = [_layout({"EPD": n_devices})]
    for n in range(2, n_devices + 1):
        for method in METHODS:
            candidates += [
                _layout(dict(zip(method, ratio)) | {"EPD": n_devices - n}) for ratio in _ratios(n, len(method))
            ]
    return candidates


def placed_layouts(devices: Mapping[str, int]) -> list[Layout]:
    """All layouts of this many devices of each kind in which a role stays on one kind, except that EPD may be on
    all."""
    candidates = [_layout({f"EPD@{kind}": n for kind, n in devices.items()})]
    for method in METHODS:
        for where in product(devices, repeat=len(method)):
            of_kind = [
                [
                    {f"{role}@{kind}": n for role, n in zip(own, ratio)} | {f"EPD@{kind}": n_devices - sum(ratio)}
                    for n in range(len(own), n_devices + 1)
                    for ratio in _ratios(n, len(own))
                ]
                for kind, n_devices in devices.items()
                for own in [[role for role, at in zip(method, where) if at == kind]]
            ]
            order = [f"{role}@{kind}" for role in (*method, "EPD") for kind in devices]
            for chosen in product(*of_kind):
                counts = {name: n for some in chosen for name, n in some.items()}
                candidates.append(_layout({name: counts[name] for name in order if counts.get(name)}))
    return candidates


def method_of(layout: Layout) -> str:
    """The method of a layout: "EP+D", "EPD", "E+P+D + EPD" and so on."""
    roles = list(dict.fromkeys(str(role).partition("@")[0] for role in layout.instances))
    split = "+".join(r for r in roles if r != "EPD")
    return " + ".join(part for part in (split, "EPD" if "EPD" in roles else "") if part)


def _layout(counts: dict[str, int]) -> Layout:
    return Layout(tuple(role_of(role) for role, n in counts.items() for _ in range(n)))


def _ratios(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All tuples of positive integers that sum to `n`."""
    if parts <= 1:
        yield from [(n,) * parts] if parts or not n else []
        return
    for first in range(1, n - parts + 2):
        for rest in _ratios(n - first, parts - 1):
            yield (first, *rest)
