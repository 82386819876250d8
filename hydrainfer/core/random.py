"""Counter-based randomness: what is drawn for a token is a function of (seed, choice, position), so no generator state
migrates."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def draw_key(seed: int, choice: int, position: int) -> int:
    """64 bits that depend on nothing but the arguments."""
    x = _mix((seed + _GOLDEN) & _MASK)
    x = _mix((x ^ (choice * _GOLDEN)) & _MASK)
    return _mix((x + (position + 1) * _GOLDEN) & _MASK)
