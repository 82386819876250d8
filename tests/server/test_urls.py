"""Pictures that requests name by URL, from a website on this machine, through the server and offline."""

import http.server
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

from hydrainfer.processor import FetchLimits
from tests.server.conftest import data_url, image_part, picture
from tests.waiting import HELD_S, PATIENCE_S, wait_until

pytestmark = pytest.mark.cpu
ANY = FetchLimits(hosts="any", image_s=2.0)


class Website:
    """`/N.png` is a picture; `/pair/N.png` comes when two are asked for, `/never` not before `close`."""

    def __init__(self):
        site = self
        self.asked = []
        self.over = threading.Event()
        pair = threading.Barrier(2)

        class Page(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                site.asked.append(self.path)
                if self.path.startswith("/pair"):
                    pair.wait(PATIENCE_S)
                if self.path == "/never":
                    site.over.wait(HELD_S)
                    return
                body = picture(len(self.path)) if self.path.endswith(".png") else b"<html>"
                self.send_response(200)
                self.send_header("Content-Type", "image/png" if self.path.endswith(".png") else "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
        self._server.daemon_threads = True
        self.url = f"http://site.test:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


CRUMBS = """
import contextlib, socketserver, sys

head, piece = (s.encode().decode("unicode_escape").encode() for s in sys.argv[1:])

class Crumbs(socketserver.BaseRequestHandler):
    def handle(self):
        with contextlib.suppress(OSError):
            self.request.recv(4096)
            self.request.sendall(head)
            while True:
                self.request.sendall(piece * 10_000)

socketserver.ThreadingTCPServer.daemon_threads = True
socketserver.ThreadingTCPServer.request_queue_size = 100
with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Crumbs) as server:
    print(server.server_address[1], flush=True)
    server.serve_forever()
"""
KINDS = {
    "interim": ("", r"HTTP/1.1 102 Wait\r\n\r\n"),
    "chunks": (r"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", r"1\r\na\r\n"),
}


@contextmanager
def crumbs(kind):
    """The URL of a server that never comes to an end, in a process of its own: it is quicker than we are."""
    with subprocess.Popen([sys.executable, "-c", CRUMBS, *KINDS[kind]], stdout=subprocess.PIPE) as process:
        try:
            yield f"http://site.test:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.fixture
def site():
    site = Website()
    yield site
    site.close()


def part(url):
    return {"type": "image_url", "image_url": {"url": url}}


def test_a_url_is_as_good_as_its_bytes(start, site, tmp_path):
    (tmp_path / "1.png").write_bytes(picture(6))
    server = start(fetch=FetchLimits(hosts="any", roots=(tmp_path,)))
    urls = [f"{site.url}/1.png", site.url.replace("site.test", "127.0.0.1") + "/1.png", f"file://{tmp_path}/1.png"]
    assert server.chat([image_part(picture(6))]).status_code == 200
    for url in urls:
        assert server.chat([part(url), {"type": "text", "text": "x"}]).status_code == 200, url
    keys = {request.media[0].key for request in server.engine.submitted}
    assert len(server.engine.submitted) == 4 and len(keys) == 1
    server.check_idle()


def test_pictures_come_side_by_side_and_the_same_but_once(start, site):
    server = start(fetch=ANY)
    urls = [f"{site.url}/pair/1.png", f"{site.url}/pair/22.png", f"{site.url}/pair/1.png"]
    assert server.chat([part(u) for u in urls]).status_code == 200
    assert sorted(site.asked) == ["/pair/1.png", "/pair/22.png"]


@pytest.mark.parametrize("stream", [False, True])
def test_failed_downloads_are_reported_to_the_client(start, site, stream):
    server = start(fetch=ANY)
    for url, status, says in [
        (f"{site.url}/page", 422, "leads to text/html"),
        (f"{site.url}/never", 504, "within 2 s"),
        ("http://127.0.0.1:1/x.png", 422, "cannot be reached"),
        ("https://nobody.example/x.png", 422, "no address"),
    ]:
        response = server.chat([image_part(), part(url)], stream=stream)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert says in error["message"] and error["param"] == "messages.0.content.1.image_url"
    server.check_idle()


def test_nothing_is_fetched_for_a_request_that_is_refused_anyhow(start, site):
    server = start(fetch=ANY)
    assert server.chat([part(f"{site.url}/{i}.png") for i in range(4)]).status_code == 400
    assert server.chat([part(f"{site.url}/1.png"), part("ftp://x/y")]).status_code == 400
    assert site.asked == []


def test_private_addresses_are_refused_by_default(start, site):
    server = start()
    assert server.chat([part(f"{site.url}/1.png")]).status_code == 422
    assert server.chat([part(site.url.replace("site.test", "127.0.0.1") + "/1.png")]).status_code == 400
    assert site.asked == []


def test_tokenising_a_chat_fetches_its_pictures(start, site):
    server = start(fetch=ANY)

    def tokens(url):
        body = {"messages": [{"role": "user", "content": [part(url), {"type": "text", "text": "hi"}]}]}
        return server.post("/tokenize", **body).json()["tokens"]

    assert tokens(f"{site.url}/1.png") == tokens(data_url(picture(6)))


def test_fetching_counts_against_the_deadline(start, site):
    server = start(fetch=ANY, timeout_s=0.3)
    response = server.chat([part(f"{site.url}/never")])
    assert response.status_code == 504 and "before the request was prepared" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_downloads_for_a_client_that_left_are_stopped(start, site, stream):
    server = start(fetch=FetchLimits(hosts="any", image_s=HELD_S, read_s=HELD_S))
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": [part(f"{site.url}/never")]}], "stream": stream},
            timeout=0.3,
        )
    wait_until(lambda: server.sessions.n_live == 0)
    assert not server.engine.submitted
    server.check_idle()


def test_no_thread_waits_for_a_network(start, site):
    """Two threads prepare; four requests that wait for pictures leave them to the fifth."""
    server = start(fetch=FetchLimits(hosts="any", image_s=30.0))
    waiting = [threading.Thread(target=server.chat, args=([part(f"{site.url}/never")],), daemon=True) for _ in range(4)]
    for thread in waiting:
        thread.start()
    wait_until(lambda: len(site.asked) == 4)
    assert server.chat([image_part()]).status_code == 200
    assert all(thread.is_alive() for thread in waiting)
    site.over.set()
    for thread in waiting:
        thread.join(PATIENCE_S)


@pytest.mark.parametrize("kind", ["interim", "chunks"])
def test_servers_that_send_crumbs_keep_nobody_waiting(start, kind):
    """Downloads go on the whole time; everybody else is answered at once."""
    server, over, answers = start(fetch=FetchLimits(hosts="any", image_s=3.0)), threading.Event(), []

    def ask(url):
        with httpx.Client(base_url=server.url, timeout=60) as http:
            while not over.is_set():
                content = [part(f"{url}/{i}") for i in range(3)]
                body = {"messages": [{"role": "user", "content": content}]}
                answers.append(http.post("/v1/chat/completions", json=body).status_code)

    assert server.chat(max_tokens=4).status_code == 200
    with crumbs(kind) as url:
        asking = [threading.Thread(target=ask, args=(url,), daemon=True) for _ in range(8)]
        for thread in asking:
            thread.start()
        took_s, end_s = [], time.monotonic() + 3.0
        while time.monotonic() < end_s or len(took_s) < 5:
            start_s = time.monotonic()
            assert server.http.get("/health").status_code == 200
            assert server.chat(max_tokens=4).status_code == 200
            took_s.append(time.monotonic() - start_s)
        over.set()
        for thread in asking:
            thread.join(PATIENCE_S)
    assert set(answers) <= {422, 504} and answers
    assert sorted(took_s)[len(took_s) // 2] < 0.5, took_s  # the machine itself may keep one of them waiting
