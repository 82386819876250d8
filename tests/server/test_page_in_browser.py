"""The page in headless Chromium."""

import subprocess
import sys
import threading

import pytest

from hydrainfer.core import InstanceInfo, InstanceStats
from hydrainfer.server import Tenants
from tests.browser import chromium, violations
from tests.processor.video.videos import make_video
from tests.server.conftest import picture
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.multi]
BAD = "<img src=x onerror=document.title='broken'><b>bold</b> & 你好"
SHOWN = ".reply .bar:not([hidden])"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser):
    """Opens the page of a server. At the end, nothing was complained about and nobody else was asked for anything."""
    pages, seen = [], []

    def visit(server, width=1280, scheme="light", expected=()):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda m: seen.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: seen.append(str(e)))
        page.on("request", lambda r: None if r.url.startswith((server.url, "data:", "blob:")) else seen.append(r.url))
        page.goto(server.url + "/")
        page.locator("#facts", has_text="tiny").wait_for()
        pages.append((page, expected))
        return page

    yield visit
    for page, _ in pages:
        page.close()
    excused = [word for _, expected in pages for word in expected]
    assert not [text for text in seen if not any(word in text for word in excused)]


def file(name, data, kind="image/png"):
    return {"name": name, "mimeType": kind, "buffer": data}


def ask(page, question, n=1):
    """Ask, and wait for the `n`th answer of this chat."""
    page.fill("#question", question)
    page.click("#send")
    page.locator(SHOWN).nth(n - 1).wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_several_pictures_and_turns(start, visit, width, scheme):
    server = start(step_s=0.005)
    server.say = BAD
    page = visit(server, width, scheme)
    page.set_input_files("#file", [file("a.png", picture(0)), file("b.jpg", picture(1, kind="JPEG"), "image/jpeg")])
    page.locator("#tray img").nth(1).wait_for()
    ask(page, "What is this?")
    assert page.inner_text(".reply .text") == BAD and page.query_selector(".reply b b, .reply .text img") is None
    assert len(server.engine.submitted[-1].media) == 2 and page.locator(".turn.question img").count() == 2
    assert page.inner_text("#question") == "" and page.locator("#tray img").count() == 0
    page.set_input_files("#file", [file("c.webp", picture(2, kind="WEBP"), "image/webp")])
    page.locator("#tray img").wait_for()
    ask(page, "And this?", 2)
    assert len(server.engine.submitted[-1].media) == 3
    said = server.prompt()
    assert said.index("What is this?") < said.index("bold") < said.index("And this?")
    page.locator("#ttft .dot").nth(1).wait_for(state="attached")
    page.locator("#ttft-now", has_text="2 requests").wait_for()
    assert page.title() == "HydraInfer"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#settings").evaluate("details => { details.open = true }")
    page.click("#clear")
    ask(page, "New")
    assert "What is this?" not in server.prompt() and page.locator(".turn").count() == 2


def test_settings_are_sent(start, visit):
    server = start()
    page = visit(server)
    given = {"system": "Be brief.", "max-tokens": "7", "temperature": "0.5", "top-p": "0.9", "seed": "3"}
    for name, value in given.items():
        page.fill(f"#{name}", value)
    page.fill("#stops", "engine\nzebra")
    page.fill("#others", '{"top_k": ')
    assert "no JSON" in page.inner_text("#others-trouble") and page.is_disabled("#send")
    page.fill("#others", '{"top_k": 5}')
    assert page.inner_text("#others-trouble") == ""
    ask(page, "Hi")
    request = server.engine.submitted[-1]
    sampling = request.sampling
    assert (request.max_tokens, request.seed, sampling.stop) == (7, 3, ("engine", "zebra"))
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert "Be brief." in server.prompt()


def test_a_stopped_answer_stays_in_the_chat(start, visit):
    server = start(step_s=0.02)
    server.say = "word " * 60
    page = visit(server)
    page.fill("#question", "Hi")
    page.click("#send")
    page.locator(".reply .text", has_text="word word").wait_for()
    page.click("#stop")
    page.locator(".facts", has_text="stopped by you").wait_for()
    wait_until(lambda: server.engine.cancelled)
    server.say = "ok"
    ask(page, "Go on")
    assert server.prompt().count("word") >= 2
    server.check_idle()


def test_says_what_the_request_does(start, visit):
    server = start(step_s=0.3)
    server.engine.hold.set()
    page = visit(server)
    wire = page.context.new_cdp_session(page)
    wire.send("Network.enable")
    slow = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": 300_000}
    wire.send("Network.emulateNetworkConditions", slow)
    page.set_input_files("#file", [file("large.png", picture(size=(700, 500)))])
    page.locator("#tray img").wait_for()
    page.click("#send")
    page.locator(".phase", has_text="% of").wait_for()
    page.locator(".phase", has_text="waits for prefill").wait_for()
    server.engine.hold.clear()
    page.locator(".phase", has_text="decode").wait_for()
    page.locator(SHOWN).wait_for()
    assert page.locator(".phase").count() == 0


def test_broken_files_are_said_at_once(start, visit):
    server = start()
    page = visit(server, expected=("400",))
    cut = picture(size=(200, 150))[:-30]
    wrong = {
        "notes.png": (b"just words", "is no JPEG, PNG, WebP or GIF picture"),
        "empty.jpg": (b"", "is empty"),
        "cut.png": (cut, "is damaged"),
        "cut.jpg": (picture(kind="JPEG")[:-20], "is damaged"),
        "noise.png": (b"\x89PNG\r\n\x1a\n" + b"x" * 50 + b"IEND", "is damaged"),
        "film.mp4": (b"\x00\x00\x00\x18ftypmp42" + b"x" * 50, "this model takes none"),
        "apple.heic": (b"\x00\x00\x00\x18ftypheic" + b"x" * 50, "is no JPEG"),
    }
    for name, (data, said) in wrong.items():
        page.set_input_files("#file", [file(name, data), file("good.png", picture())])
        page.locator("#trouble", has_text=said).wait_for()
        assert page.inner_text("#trouble").startswith(name)
        assert page.locator("#tray img").count() == 1
        page.click("#tray button")
    page.set_input_files("#file", [file(f"{i}.png", picture(i)) for i in range(4)])
    page.locator("#trouble", has_text="at most 3 pictures").wait_for()
    page.fill("#others", '{"max_token": 4}')
    page.fill("#question", "Hi")
    page.click("#send")
    page.locator(".reply .trouble", has_text="max_tokens").wait_for()
    assert page.input_value("#question") == "Hi" and page.locator("#tray img").count() == 3
    page.fill("#others", "")
    ask(page, "Hi")
    assert len(server.engine.submitted) == 1


# Files are read when `openGate()` has been called, and no sooner.
GATE = """() => {
  const read = Blob.prototype.arrayBuffer, gate = new Promise((resolve) => { window.openGate = resolve; });
  Blob.prototype.arrayBuffer = async function () { await gate; return read.call(this); };
}"""


def wait_for_tray(page, *names):
    """Wait until the tray holds these pictures, and no others, in this order."""
    entries = page.locator("#tray:not([hidden]) img")
    entries.nth(len(names) - 1).wait_for()
    assert [one.get_attribute("alt") for one in entries.all()] == list(names)


def test_a_question_is_not_sent_without_a_picture_that_turns_out_to_be_broken(start, visit, tmp_path):
    server = start()
    page = visit(server)
    page.evaluate(GATE)
    large = tmp_path / "large.png"
    large.write_bytes(picture())
    with large.open("r+b") as end:
        end.truncate(33 << 20)
    page.set_input_files("#file", [file("cut.png", picture()[:-30]), file("good.png", picture())])
    page.set_input_files("#file", large)
    page.set_input_files("#file", [file("more.png", picture(1))])
    page.fill("#question", "What is this?")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    page.evaluate("openGate()")
    page.locator("#trouble", has_text="not sent").wait_for()
    assert page.inner_text("#trouble") == (
        "cut.png is damaged: it cannot be shown to its end. "
        "large.png has 33.0 MiB; this server takes at most 32.0 MiB. The question was not sent."
    )
    assert page.input_value("#question") == "What is this?" and page.locator(".turn").count() == 0
    wait_for_tray(page, "good.png", "more.png")
    assert server.engine.submitted == []
    page.focus("#question")
    page.keyboard.press("Enter")
    page.locator(SHOWN).wait_for()
    assert len(server.engine.submitted[-1].media) == 2 and page.inner_text("#trouble") == ""


def test_a_question_waits_until_its_pictures_are_read(start, visit):
    server = start()
    page = visit(server)
    page.evaluate(GATE)
    page.set_input_files("#file", [file("a.png", picture(0))])
    page.fill("#question", "What is this?")
    page.keyboard.press("Enter")
    page.set_input_files("#file", [file("b.png", picture(1))])
    page.evaluate("openGate()")
    page.locator(SHOWN).wait_for()
    assert len(server.engine.submitted) == 1 and len(server.engine.submitted[0].media) == 2


def test_a_new_chat_gets_no_picture_of_the_chat_before(start, visit):
    server = start()
    page = visit(server)
    page.evaluate(GATE)
    page.set_input_files("#file", [file("old.png", picture(0)), file("notes.txt", b"words")])
    page.fill("#question", "What is this?")
    page.keyboard.press("Enter")
    page.click("#clear")
    page.set_input_files("#file", [file("new.png", picture(1))])
    page.evaluate("openGate()")
    wait_for_tray(page, "new.png")
    assert page.inner_text("#trouble") == "" and page.input_value("#question") == "What is this?"
    ask(page, "And this?")
    assert len(server.engine.submitted) == 1 and len(server.engine.submitted[0].media) == 1


def drag(page, place, **data):
    """Drag something over the middle of an element. Returns a function that drops it there."""
    page.locator(place).scroll_into_view_if_needed()
    box = page.locator(place).bounding_box()
    at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    wire = page.context.new_cdp_session(page)

    def send(step):
        what = {"items": [], "files": [], "dragOperationsMask": 1, **data}
        wire.send("Input.dispatchDragEvent", {"type": step, **at, "data": what})

    send("dragEnter")
    send("dragOver")
    return lambda: send("drop")


@pytest.mark.parametrize("place", ["#layout", "#question", "footer"])
def test_a_picture_can_be_dropped_anywhere(start, visit, tmp_path, place):
    page = visit(start())
    path = tmp_path / "dropped.png"
    path.write_bytes(picture())
    drop = drag(page, place, files=[str(path)])
    page.locator("#chat.over").wait_for()
    drop()
    wait_for_tray(page, "dropped.png")
    assert page.locator("#chat.over").count() == 0 and page.url.startswith("http")


def test_a_text_can_be_dropped_into_the_question(start, visit):
    page = visit(start())
    page.fill("#question", "")
    drag(page, "#question", items=[{"mimeType": "text/plain", "data": "dropped words"}])()
    assert page.input_value("#question") == "dropped words"


def test_a_server_that_hangs_is_said(start, visit):
    """It takes connections and answers none, as a process does that was stopped."""
    server = start()
    page = visit(server)
    page.locator("#state.good").wait_for()
    goes_on, instances = threading.Event(), server.engine.instances

    def hang():
        goes_on.wait(30)
        return instances()

    server.engine.instances = hang
    page.locator("#state.bad", has_text="the server does not answer").wait_for()
    goes_on.set()
    page.locator("#state.good").wait_for()


def test_fields_for_several_answers_are_refused(start, visit):
    server = start()
    page = visit(server)
    page.fill("#others", '{"n": 2}')
    assert "shows one answer" in page.inner_text("#others-trouble") and page.is_disabled("#send")
    page.fill("#others", '{"n": 1}')
    assert page.inner_text("#others-trouble") == ""
    ask(page, "Hi")
    assert len(server.engine.submitted) == 1


@pytest.mark.parametrize("form", ["curl", "python"])
def test_copied_code_gets_the_same_answer(start, visit, tmp_path, form):
    server = start()
    page = visit(server)
    name = "it's $HOME.png"
    (tmp_path / name).write_bytes(picture())
    page.set_input_files("#file", [file(name, picture())])
    page.locator("#tray img").wait_for()
    page.fill("#system", 'Say "\\n" for $5 `now`.\n你好')
    page.fill("#others", '{"top_k": 5, "temperature": null, "ignore_eos": false}')
    page.fill("#question", "What is 'this'?")
    page.click(f"#as-{form}")
    code = page.text_content("#snippet-text")
    page.click("#snippet-close")
    ask(page, "What is 'this'?")
    asked = server.engine.submitted[-1]
    command = {"curl": ["bash", "-c", code], "python": [sys.executable, "-c", code]}[form]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    again = server.engine.submitted[-1]
    assert again is not asked and again.prompt_ids == asked.prompt_ids and again.sampling.top_k == 5
    assert again.media[0].key == asked.media[0].key
    if form == "python":
        assert done.stdout.strip() == server.say.strip()


def test_videos_go_with_the_question(start, visit):
    """Where the model takes videos; the server behind this page says so, but does not."""
    server = start()
    film = make_video("libvpx", "webm", options={})
    sent = []

    def overview(route):
        answer = route.fetch()
        seen = answer.json()
        seen["takes"]["videos"] = 1
        route.fulfill(response=answer, json=seen)

    page = visit(server, expected=("400",))
    page.route("**/v1/overview*", overview)
    page.on("request", lambda r: sent.append(r.post_data_json) if r.url.endswith("/chat/completions") else None)
    page.locator("#pick", has_text="videos").wait_for()
    page.set_input_files("#file", [file("a.png", picture()), file("film.webm", film), file("more.webm", film)])
    page.locator("#trouble", has_text="more.webm is too much: a request holds at most 1 video").wait_for()
    assert page.locator("#tray video").evaluate("video => video.src").startswith("blob:")
    page.click("#send")
    page.locator(".reply .trouble", has_text="takes no videos").wait_for()
    kinds = [part["type"] for part in sent[0]["messages"][0]["content"]]
    assert kinds == ["image_url", "video_url", "text"]
    assert sent[0]["messages"][0]["content"][1]["video_url"]["url"].startswith("data:video/webm;base64,")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_everything_can_be_read_and_reached(start, browser, width, scheme):
    """With instances at work, one that is silent and one that is dead, a key, a chat, troubles and the code."""
    server = start(tenants=Tenants(["sesame"]))
    blocks = {"kv": (64, 20, 9), "embed": (16, 4, 2)}
    busy = InstanceStats("EPD", 3, 6, 1, 2, 3, blocks, 0, 0, 0, 9, 0.0, n_migrating=2, n_arriving=1, n_landed=4)
    trouble = "it was killed, and did not come back: no memory"
    server.engine.infos = [
        InstanceInfo("EP0", "EP", "alive", pid=1, stats=busy),
        InstanceInfo("D0", "D", "suspect", pid=2, stats=busy, heard_s=9.0),
        InstanceInfo("D1", "D", "dead", pid=3, trouble=trouble),
    ]
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(server.url + "/")
    page.locator("#key").wait_for()
    assert violations(page) == []
    page.fill("#key-text", "sesame")
    page.keyboard.press("Enter")
    page.locator(".instance .on").first.wait_for()
    page.set_input_files("#file", [file("a.png", picture()), file("notes.txt", b"words")])
    page.locator("#trouble", has_text="notes.txt").wait_for()
    ask(page, "What?")
    page.fill("#question", "Hi")
    page.locator("#settings").evaluate("details => { details.open = true }")
    page.fill("#others", '{"max_token": 1}')
    page.click("#send")
    page.locator(".reply .trouble").wait_for()
    page.fill("#others", "{")
    assert violations(page) == []
    page.fill("#others", "")
    page.click("#as-python")
    assert violations(page) == [] and "HYDRAINFER_API_KEY" in page.inner_text("#snippet-text")
    context.close()
