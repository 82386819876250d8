"""What one grammar may take to be compiled, and all grammars together to be kept."""

from __future__ import annotations

from typing import Any, NamedTuple


class TrialBounds(NamedTuple):
    """What a trial of one grammar may take: CPU time, memory, and time on a busy machine, where a second of CPU takes
    longer. Grammars that people write take milliseconds. The library's own limits do not cover every construct:
    `multipleOf` walks all remainders."""

    cpu_s: float = 1.0
    n_bytes: int = 64 << 20
    wall_s: float = 3.0


MAX_TRIALS = 4
"""Trials at once. They share the processor, so a simple grammar does not wait until a complex one has ended."""
MAX_WAITING = 64
"""Grammars that may wait for a trial; more are refused with status 429."""
KEPT = 64
KEPT_BYTES = 256 << 20
"""Compiled grammars kept for later requests: their number, and their memory."""
NICENESS = 5
"""How much processes and threads that compile stand back behind those that serve."""
LIBRARY_LIMITS: dict[str, Any] = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""Much lower limits than the library's defaults. With them, the first error is found sooner, and the next tokens take
well under a second to compute (tests/grammar/test_hostile.py)."""
MAX_GBNF_CHARS = 8192  # GBNF is translated in Python, which is slow
