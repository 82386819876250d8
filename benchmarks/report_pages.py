"""Writes the committed pages of `bench compare` anew, from their results: `python -m benchmarks.report_pages`."""

from pathlib import Path

import msgspec

from hydrainfer.reports.bench import page_of
from hydrainfer.workload.results import BenchResult

RESULTS = Path(__file__).parent / "results"


def pages() -> dict[Path, str]:
    """Each committed page, as today's code makes it."""
    made = {}
    for page in sorted(RESULTS.glob("*/report.html")):
        result = msgspec.json.decode(page.with_name("result.json").read_bytes(), type=BenchResult)
        made[page] = page_of(result)
    return made


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
        print(f"wrote {page}")
