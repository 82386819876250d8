"""A headless Chromium for tests of pages, and axe-core, which looks for what people cannot read or reach.

`make test-browser` installs both packages and runs these tests. Chromium is the system's (`chromium` on the PATH).
"""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

_AXE = Path(__file__).parent.parent / ".cache/axe/node_modules/axe-core/axe.min.js"


@contextmanager
def chromium():
    """Yields playwright's browser; skips the tests where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def violations(page):
    """What axe-core finds on a page, a line for each element. The page's context needs `bypass_csp=True`, for a script
    is added. Skips the test where axe-core is not installed."""
    script = Path(os.environ.get("AXE_CORE") or _AXE)
    if not script.exists():
        pytest.skip("axe-core is not installed: make test-browser")
    page.add_script_tag(path=str(script))
    return [
        f"{violation['id']}: {node['html']} {node['failureSummary']}"
        for violation in page.evaluate("axe.run()")["violations"]
        for node in violation["nodes"]
    ]
