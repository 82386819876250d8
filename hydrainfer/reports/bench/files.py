"""The files of a result: JSON with everything, CSV with one row per run, and an HTML page."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydrainfer.core import ConfigError
from hydrainfer.reports.bench.page import page_of
from hydrainfer.workload.results import BenchResult, Percentiles, Run


def write_files(result: BenchResult, folder: Path) -> list[Path]:
    """Write `result.json`, `runs.csv` and `report.html`; returns their paths. Raises `ConfigError` if the folder cannot
    be written."""
    files = {
        "result.json": result.to_json(),
        "runs.csv": csv_of(result).encode(),
        "report.html": page_of(result).encode(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as e:
        raise ConfigError(f"cannot write to {folder}: {e.strerror}", param="out") from None
    return [folder / name for name in files]


def csv_of(result: BenchResult) -> str:
    """The result as CSV, one row per run; times are in milliseconds."""
    rows = [_row(run) for run in result.runs]
    names: dict[str, None] = {name: None for row in rows for name in row}
    out = io.StringIO()
    writer = csv.DictWriter(out, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _row(run: Run) -> Mapping[str, Any]:
    r = run.report
    a = run.attainment
    b = run.breakdown
    row: dict[str, Any] = {
        "server": run.server,
        "arrivals": run.arrivals,
        "rate_per_s": run.rate_per_s,
        "round": run.round,
        "seed": run.seed,
        "requests": r.n_requests,
        "answered": r.n_ok,
        "attainment": a.met.share if a else None,
        "attainment_low": a.met.low if a else None,
        "attainment_high": a.met.high if a else None,
        "ttft_kept": a.ttft.share if a else None,
        "tpot_kept": a.tpot.share if a else None,
        "requests_per_s": r.requests_per_s,
        "output_tokens_per_s": r.output_tokens_per_s,
        "others_cores": run.others_cores,
    }
    for name in ("ttft", "tpot", "itl", "e2e", "late"):
        percentiles: Percentiles | None = getattr(r, name + "_s")
        row |= {
            f"{name}_{p}_ms": getattr(percentiles, p) * 1e3 if percentiles else None
            for p in ("mean", "p50", "p90", "p99")
        }
    return row | ({f"{part}_mean_ms": s * 1e3 for part, s in b.mean_s.items()} if b else {})
