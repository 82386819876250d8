"""`/docs` in headless Chromium: to read, and to try."""

import json
import re
import subprocess

import pytest

from hydrainfer.server import Tenants
from tests.browser import chromium, violations
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.multi]
CHAT = "#post-v1-chat-completions"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser):
    """Opens a server's `/docs`. At the end, nothing was complained about, except for `expected` words."""
    contexts, seen, excused = [], [], []

    def visit(server, width=1280, scheme="light", expected=(), at="", **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
        page = context.new_page()
        page.on("console", lambda m: seen.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: seen.append(str(e)))
        page.goto(f"{server.url}/docs{at}")
        page.locator(CHAT).wait_for()
        contexts.append(context)
        excused.extend(expected)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not [text for text in seen if not any(word in text for word in excused)]


def opened(page, id):
    """The operation, unfolded with all that is in it."""
    page.locator(id).evaluate("box => { box.open = true }")
    box = page.locator(f"{id}[open]")
    box.locator("form").wait_for()
    box.evaluate("box => { for (const one of box.querySelectorAll('details')) one.open = true }")
    return box


def tried(box, body=None):
    """The status after sending, and the answer."""
    if body is not None:
        box.locator("textarea").fill(body if isinstance(body, str) else json.dumps(body))
    box.get_by_role("button", name="Send").click()
    box.locator(".status", has_text=re.compile(r"\d m?s$|no JSON")).wait_for()
    return box.locator(".status").inner_text(), box.locator(".answer").text_content()


def test_a_sentence_for_every_field(start, visit):
    server = start()
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    page = visit(server)
    ids = page.locator("details.operation").evaluate_all("all => all.map(box => '#' + box.id)")
    shown = "\n".join(opened(page, id).inner_text() for id in ids)
    for title, schema in schemas.items():
        for name, field in schema["properties"].items():
            assert title == "Error" or (name in shown and field["description"] in shown), (title, name)
    row = page.locator(CHAT).locator("tr", has=page.locator("code", has_text="top_logprobs"))
    assert "from 0 to 20" in row.inner_text() and "needs logprobs" in row.inner_text()
    assert page.locator(CHAT).locator("tbody tr th").first.inner_text().startswith("messages")


def test_the_example_is_sent_and_its_answer_shown(start, visit):
    server = start()
    box = opened(visit(server), CHAT)
    status, answer = tried(box)
    assert status.startswith("200 OK") and json.loads(answer)["choices"][0]["message"]["content"] == server.say
    assert "What is 3 + 4?" in server.prompt()
    status, answer = tried(box, {"messages": [{"role": "user", "content": "你好"}], "temperature": 0.5})
    assert status.startswith("200 OK") and server.engine.submitted[-1].sampling.temperature == 0.5


def test_a_stream_is_shown_as_it_comes_and_can_be_stopped(start, visit):
    server = start(step_s=0.05)
    server.say = "word " * 200
    page = visit(server, at=CHAT)
    box = opened(page, CHAT)
    box.locator("textarea").fill('{"messages": [{"role": "user", "content": "hi"}], "stream": true}')
    box.get_by_role("button", name="Send").click()
    box.locator(".answer", has_text="data: {").wait_for()
    assert "the answer comes" in box.locator(".status").inner_text()
    box.get_by_role("button", name="Stop").click()
    box.locator(".status", has_text="stopped by you").wait_for()
    wait_until(lambda: server.engine.cancelled)
    server.check_idle()


def test_errors_are_shown(start, visit):
    server = start()
    box = opened(visit(server, expected=("400",)), CHAT)
    status, answer = tried(box, {"messages": [], "max_token": 3})
    assert status.startswith("400") and "did you mean max_tokens?" in answer
    assert "trouble" in box.locator(".status").get_attribute("class")
    status, _ = tried(box, "{")
    assert "no JSON" in status and box.locator(".answer").is_hidden() and not server.engine.submitted


def test_a_server_with_keys_asks_for_one(start, visit):
    page = visit(start(tenants=Tenants(["sesame"])), expected=("401",))
    box = opened(page, CHAT)
    assert page.locator("#key").is_hidden()
    assert tried(box)[0].startswith("401")
    for word in ("wrong", "sesame"):
        page.locator("#key").wait_for()
        page.fill("#key-text", word)
        page.keyboard.press("Enter")
        wait_until(lambda: "waiting" not in box.locator(".status").inner_text())
    box.locator(".status", has_text="200 OK").wait_for()
    assert page.locator("#key").is_hidden()
    box.get_by_role("button", name="curl").click()
    assert "$HYDRAINFER_API_KEY" in box.locator(".answer").text_content() and "sesame" not in page.content()


def test_parameters_are_filled_in(start, visit):
    page = visit(start(), expected=("404",))
    box = opened(page, "#get-v1-models-name-")
    box.locator("input").fill("ti/ny")
    assert tried(box)[0].startswith("404")
    box.locator("input").fill("tiny")
    status, answer = tried(box)
    assert status.startswith("200 OK") and json.loads(answer)["id"] == "tiny"


def test_the_copied_command_gets_an_answer(start, visit):
    server = start()
    box = opened(visit(server, permissions=["clipboard-read", "clipboard-write"]), CHAT)
    body = {"messages": [{"role": "user", "content": "it's $HOME \\ `now`"}], "max_tokens": 4}
    box.locator("textarea").fill(json.dumps(body, indent=1))
    box.get_by_role("button", name="curl").click()
    box.locator(".status", has_text="copied").wait_for()
    done = subprocess.run(["bash", "-c", box.locator(".answer").text_content()], capture_output=True, timeout=60)
    assert json.loads(done.stdout)["choices"] and "it's $HOME \\ `now`" in server.prompt()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_everything_can_be_read_and_reached(start, visit, width, scheme):
    server = start(tenants=Tenants(["sesame"]))
    page = visit(server, width, scheme, expected=("401",), bypass_csp=True)
    box = opened(page, CHAT)
    tried(box)
    opened(page, "#post-v1-messages")
    opened(page, "#get-v1-overview")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert violations(page) == []


def test_the_keyboard_is_enough(start, visit):
    page = visit(start())
    page.locator(f"{CHAT} > summary").focus()
    page.keyboard.press("Enter")
    page.locator(f"{CHAT} form").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator(f"{CHAT} .status", has_text="200 OK").wait_for()
