"""Every layout of N devices."""

from __future__ import annotations

from collections.abc import Iterator

from hydrainfer.core import ConfigError, Layout, Role

METHODS = (("EP", "D"), ("ED", "P"), ("E", "PD"), ("E", "P", "D"))
"""Ways to disaggregate (paper, section 3.3, and E+PD); EPD alone is the one without."""


def layouts(n_devices: int) -> list[Layout]:
    """All layouts: EPD only, each method at every ratio, and each of those beside some EPD (141 for 8 devices). Raises
    `ConfigError`."""
    if n_devices < 1:
        raise ConfigError(f"{n_devices} devices cannot serve anything; give at least one", param="devices")
    found = [_layout({"EPD": n_devices})]
    for n in range(2, n_devices + 1):
        for method in METHODS:
            found += [_layout(dict(zip(method, ratio)) | {"EPD": n_devices - n}) for ratio in _ratios(n, len(method))]
    return found


def method_of(layout: Layout) -> str:
    """The method of a layout: "EP+D", "EPD", "E+P+D + EPD" and so on."""
    roles = list(dict.fromkeys(map(str, layout.instances)))
    split = "+".join(r for r in roles if r != "EPD")
    return " + ".join(part for part in (split, "EPD" if "EPD" in roles else "") if part)


def _layout(counts: dict[str, int]) -> Layout:
    return Layout(tuple(Role.parse(role) for role, n in counts.items() for _ in range(n)))


def _ratios(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All tuples of positive integers that sum to `n`."""
    if parts == 1:
        yield (n,)
        return
    for first in range(1, n - parts + 2):
        for rest in _ratios(n - first, parts - 1):
            yield (first, *rest)
