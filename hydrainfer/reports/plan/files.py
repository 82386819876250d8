"""The files of a plan."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hydrainfer.core import ConfigError
from hydrainfer.planner.search import LayoutPlan
from hydrainfer.reports.plan.page import plan_page


def write_plan(plan: LayoutPlan, layout: str | None, out: Path) -> list[Path]:
    """Write plan.json, report.html and, unless nothing meets the SLO, layout.yaml; returns their paths. Raises
    `ConfigError`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = [out / "plan.json", out / "report.html"]
        written[0].write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")
        written[1].write_text(plan_page(plan), "utf-8")
        if layout is not None:
            written.append(out / "layout.yaml")
            written[-1].write_text(layout, "utf-8")
    except OSError as e:
        raise ConfigError(f"cannot write to {out}: {e.strerror}", param="out") from None
    return written
