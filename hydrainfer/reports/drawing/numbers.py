"""Numbers as reports write them."""

from __future__ import annotations


def ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.4g}"


def percent(share: float) -> str:
    return f"{share * 100:.1f} %"
