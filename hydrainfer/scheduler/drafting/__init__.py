"""Drafters: who guesses the next tokens of a sequence. Each is one file and one entry of `DRAFTERS`."""

from hydrainfer.scheduler.drafting.drafter import Drafter
from hydrainfer.scheduler.drafting.text import TextDrafter

DRAFTERS: dict[str, type[Drafter]] = {TextDrafter.name: TextDrafter}
"""By the name that `--drafts` takes; in this order they are asked."""

__all__ = ["DRAFTERS", "Drafter", "TextDrafter"]
