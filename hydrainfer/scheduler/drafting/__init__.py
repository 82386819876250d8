"""Drafters: who guesses the next tokens of a sequence. Each is one file and one entry of `DRAFTERS`."""

from collections.abc import Callable

from hydrainfer.scheduler.drafting.brought import BroughtDrafter
from hydrainfer.scheduler.drafting.drafter import Drafter, Guess, Guide
from hydrainfer.scheduler.drafting.forced import GrammarDrafter
from hydrainfer.scheduler.drafting.predicted import PredictionDrafter
from hydrainfer.scheduler.drafting.text import TextDrafter

DRAFTERS: dict[str, Callable[[Guide | None], Drafter | None]] = {
    GrammarDrafter.name: lambda guide: GrammarDrafter(guide) if guide is not None else None,
    PredictionDrafter.name: lambda _: PredictionDrafter(),
    TextDrafter.name: lambda _: TextDrafter(),
    "mtp": lambda _: BroughtDrafter("mtp"),
    "model": lambda _: BroughtDrafter("model"),
}
"""By the name that `--drafts` takes; in this order `auto` asks them."""

__all__ = [
    "DRAFTERS",
    "BroughtDrafter",
    "Drafter",
    "GrammarDrafter",
    "Guess",
    "Guide",
    "PredictionDrafter",
    "TextDrafter",
]
