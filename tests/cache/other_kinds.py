"""A kind of state that no model here has yet, and a small window: that they run everywhere shows that nothing asks
which kind a cache is."""

import math

from hydrainfer.cache import CacheSpec, Part, WindowSpec


class SlotSpec(CacheSpec, frozen=True):
    """One slot per request, which sums up all tokens computed so far."""

    @classmethod
    def of(cls):
        return cls("slot", 4, (Part("sum", (1,), "float32"),))

    def span(self, n_computed, n_tokens, headroom=0):
        return range(1)

    def capacity(self, stop):
        return math.inf

    def tokens_in(self, n_blocks):
        return math.inf

    def moved(self, request, n_computed):
        return range(1 if n_computed else 0)


WINDOW = WindowSpec("window", 4, (Part("rows", (4, 1), "float32"),), window=7, ahead=8)
SLOT = SlotSpec.of()
