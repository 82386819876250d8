"""The page in headless Chromium."""

import pytest

from tests.browser import chromium
from tests.server.conftest import picture

pytestmark = [pytest.mark.slow, pytest.mark.multi]
BAD = "<img src=x onerror=document.title='broken'><b>bold</b> & 你好"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_ask_about_a_picture(start, browser, tmp_path, width, scheme):
    server = start(step_s=0.005)
    server.say = BAD
    file = tmp_path / "picture.png"
    file.write_bytes(picture())
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    seen = []
    page.on("console", lambda m: seen.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: seen.append(str(e)))
    page.on("request", lambda r: None if r.url.startswith((server.url, "data:")) else seen.append(r.url))
    page.goto(server.url + "/")
    page.set_input_files("#file", str(file))
    page.click("#send")
    page.wait_for_selector("#answer-bar:not([hidden])")
    assert page.inner_text("#answer") == BAD and page.query_selector("#answer b") is None
    assert server.engine.submitted[-1].media, "the picture was sent"
    page.wait_for_selector("#ttft .dot", state="attached")
    assert page.title() == "HydraInfer" and "1 request" in page.inner_text("#ttft-now")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen == []
    page.close()
