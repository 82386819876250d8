"""Numbers as reports write them."""

from __future__ import annotations


def ms(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds >= 10.0:
        return f"{seconds * 1e3:,.0f}"
    return f"{seconds * 1e3:.4g}"


def percent(share: float) -> str:
    return f"{share * 100:.1f} %"
