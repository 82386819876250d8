"""Caches of every kind but the one that keeps all, small enough for tests: that they run everywhere shows that nothing
asks which kind a cache is."""

from hydrainfer.cache import Part, StateLayout, StateSpec, WindowSpec

WINDOW = WindowSpec("window", 4, (Part("rows", (4, 1), "float32"),), window=7, ahead=8)
STATE = StateSpec.of(StateLayout((0,), (3, 1), (1, 1, 1)), "float32", block_tokens=4)
