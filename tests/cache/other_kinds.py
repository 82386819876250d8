"""Kinds of state that no model here has yet: that they run everywhere shows that nothing asks which kind a cache is."""

import math

from hydrainfer.cache import CacheSpec, Part


class WindowSpec(CacheSpec, frozen=True):
    """Keys and values of the last `window` tokens: blocks that fell out of it are given back while the request runs."""

    window: int = 0

    @classmethod
    def of(cls, window, block_tokens=4):
        return cls("window", block_tokens, (Part("rows", (block_tokens, 1), "float32"),), window=window)

    def stale(self, n_computed):
        return max(0, n_computed - self.window + 1) // self.block_tokens

    def due(self, request, n_computed):
        return n_computed + 1

    def span(self, n_computed, n_tokens):
        first = self.stale(n_computed)
        return range(first, min(self.blocks_for(n_tokens), first + self.most))

    @property
    def most(self):
        """Blocks that one request ever holds: the window's and the one being written."""
        return self.blocks_for(self.window - 1) + 1

    def tokens_in(self, n_blocks):
        return math.inf if n_blocks >= self.most else n_blocks * self.block_tokens


class SlotSpec(CacheSpec, frozen=True):
    """One slot per request, which sums up all tokens computed so far."""

    @classmethod
    def of(cls):
        return cls("slot", 4, (Part("sum", (1,), "float32"),))

    def span(self, n_computed, n_tokens):
        return range(1)

    def capacity(self, stop):
        return math.inf

    def tokens_in(self, n_blocks):
        return math.inf

    def moved(self, request, n_computed):
        return range(1 if n_computed else 0)


WINDOW, SLOT = WindowSpec.of(window=7), SlotSpec.of()
