"""The files of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from hydrainfer.core import ConfigError
from hydrainfer.planner.clusters import ClusterPlan
from hydrainfer.planner.search import LayoutPlan
from hydrainfer.reports.plan.cluster_page import cluster_page
from hydrainfer.reports.plan.page import plan_page


def write_plan(plan: LayoutPlan, layout: str | None, out: Path) -> list[Path]:
    """Write plan.json, report.html and, unless nothing meets the SLO, layout.yaml; returns their paths. Raises
    `ConfigError`."""
    texts = {"plan.json": _json(plan), "report.html": plan_page(plan)}
    if layout is not None:
        texts["layout.yaml"] = layout
    return _write(texts, out)


def write_cluster_plan(plan: ClusterPlan, out: Path) -> list[Path]:
    """Write plan.json and report.html; returns their paths. Raises `ConfigError`."""
    return _write({"plan.json": _json(plan), "report.html": cluster_page(plan)}, out)


def _json(plan: msgspec.Struct) -> str:
    return msgspec.json.format(msgspec.json.encode(plan), indent=2).decode() + "\n"


def _write(texts: Mapping[str, str], out: Path) -> list[Path]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (out / name).write_text(text, "utf-8")
    except OSError as e:
        raise ConfigError(f"cannot write to {out}: {e.strerror}", param="out") from None
    return [out / name for name in texts]
