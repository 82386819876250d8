"""A headless Chromium for tests of pages: needs `pip install playwright` and a `chromium` on the PATH."""

import shutil
from contextlib import contextmanager

import pytest


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
