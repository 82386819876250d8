"""Writes the tables of configs/clusters/times that `hydrainfer profile --clusters prfaas-paper` plans with.

`python -m benchmarks.prfaas.tables` makes them of `setting`: what the paper prints, and what was fitted to it.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.prfaas.setting import BATCH, MIB, PER_INSTANCE, TOKENS_PER_S, h20_times, h200_times
from benchmarks.record import ROOT
from hydrainfer.planner.clusters import Times

FOLDER = ROOT / "configs" / "clusters" / "times"
MODEL = "internal-1t-hybrid"
_H200 = """\
# Table 5 of Prefill-as-a-Service: an internal 1T model, three layers of KDA to one of MLA, on 8 H200.
model: {model}
hardware: h200
devices: {devices}
source: Prefill-as-a-Service, Table 5
prefill:  # tokens, MiB in the caches, seconds
{rows}
"""
_H20 = """\
# The same model on 8 H20. The paper does not print this table. The curve is FITTED to three cells of its Table 6; the
# bytes are those of Table 5.
model: {model}
hardware: h20
devices: {devices}
source: fitted to Table 6 of Prefill-as-a-Service by benchmarks/prfaas/setting.py
assumed: >-
  its prefill times are fitted to three cells of Table 6, and its batch follows from the 6.25 requests/s there
prefill:  # tokens, MiB in the caches, seconds
{rows}
decode:  # sequences, seconds of a step
  - [{batch}, {step_s}]
"""


def text_of(template: str, times: Times) -> str:
    """A file with the points of a table."""
    rows = [f"  - [{p.tokens:.6g}, {p.kv_bytes / MIB:.6g}, {p.prefill_s:.6g}]" for p in times.points]
    return template.format(
        model=MODEL, devices=PER_INSTANCE, rows="\n".join(rows), batch=BATCH, step_s=1.0 / TOKENS_PER_S
    )


def texts() -> dict[str, str]:
    """The content of each file."""
    return {"prfaas-h200.yaml": text_of(_H200, h200_times()), "prfaas-h20.yaml": text_of(_H20, h20_times())}


def main(folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts().items():
        (folder / name).write_text(text, "utf-8")
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
