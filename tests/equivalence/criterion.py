"""When two implementations of a model count as equal, so stated that it cannot flake.

In float32, teacher-forced logits differ by less than `LOGIT_TOLERANCE`; greedy ids are equal up to the first position
at which the reference's two best logits are closer than `TIE_GAP`. Positions from there on are skipped and counted. So
are those from the first token on for which a router's last chosen expert and its best other one are closer than
`ROUTER_GAP`: a token that goes through another expert is another token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

LOGIT_TOLERANCE = 1e-4
TIE_GAP = 2e-4
ROUTER_GAP = 1e-5
ROUTED = -1.0
"""The gap of a position that a close choice of experts decides."""
LEAST_DECIDED = 0.95


def compare_greedy(got: Sequence[int], want: Sequence[int], gaps: Sequence[float]) -> bool:
    """Assert equality up to the first near-tie; return whether there was none. `gaps[i]` belongs to `want[i]`."""
    decided = next((i for i, gap in enumerate(gaps) if gap < TIE_GAP), len(want))
    assert list(got[:decided]) == list(want[:decided]), f"ids differ before any near-tie: {got} != {want}, gaps {gaps}"
    if decided == len(want):
        assert len(got) == len(want), f"{len(got)} ids instead of {len(want)}"
    return decided == len(want)


@dataclass
class Tally:
    """Counts decided and skipped cases; `check` prints them and fails if too many were skipped."""

    decided: int = 0
    skipped: list[str] = field(default_factory=list)
    routed: int = 0
    """How many of those for the choice of an expert."""

    def add(self, name: str, got: Sequence[int], want: Sequence[int], gaps: Sequence[float]) -> None:
        if compare_greedy(got, want, gaps):
            self.decided += 1
        else:
            self.skipped.append(name)
            self.routed += next(gap for gap in gaps if gap < TIE_GAP) == ROUTED

    def check(self) -> None:
        total = self.decided + len(self.skipped)
        ties = f"near-ties in {self.skipped or 'none'}, {self.routed} of them of experts"
        print(f"greedy equality: {self.decided} of {total} cases decided, {ties}")
        assert self.decided >= LEAST_DECIDED * total, f"too many near-ties: {self.skipped}"
