"""A server whose pictures are prepared by workers: what they do to them is a typed error, and others are served."""

import os
import signal
import socket
import threading
import time

import httpx
import pytest

from hydrainfer.processor import MediaLimits, MediaWorkers
from hydrainfer.processor.workers import preprocess as room
from tests.cluster.processes import alive
from tests.processor.workers import jobs
from tests.server.conftest import image_part, picture
from tests.server.test_bad_input import error
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.multi, pytest.mark.timeout(120)]
LIMITS = MediaLimits(max_images=3)


@pytest.fixture(scope="module")
def workers():
    workers = MediaWorkers(
        2, LIMITS, job_limit_s=3.0, by_torch=True
    )  # loaded before the first picture, not in its time
    yield workers
    workers.close()


@pytest.fixture
def server(start, workers):
    server = start(workers=workers)
    assert server.chat([image_part()], max_tokens=4).status_code == 200  # they have started
    yield server
    server.check_idle()
    wait_until(lambda: workers.n_jobs == 0)


@pytest.fixture(autouse=True)
def lent(workers):
    """Servers of this file share their workers."""
    close, workers.close = workers.close, lambda: None
    yield
    workers.close = close


def befalls(monkeypatch, what, *args):
    """The next pictures meet this instead of being prepared."""
    monkeypatch.setattr(room, "prepare_image", lambda *_: pytest.fail("prepared by the server itself"))
    submit = MediaWorkers.submit
    monkeypatch.setattr(MediaWorkers, "submit", lambda self, _, part, *__: submit(self, what, part, *args))


def test_answers_and_errors_are_those_of_a_thread(server, start):
    plain = start()
    whole = picture(1, size=(300, 200), kind="JPEG")
    cases = [whole, whole[:1000], b"hello", b"", picture(2, mode="RGBA"), picture(3, mode="I;16"), b"BM" + bytes(90)]
    for data in cases:
        for body in ([image_part(data)], [image_part(), {"type": "text", "text": "and"}, image_part(data)]):
            ours, theirs = server.chat(body, max_tokens=4), plain.chat(body, max_tokens=4)
            assert ours.status_code == theirs.status_code and ours.json().get("error") == theirs.json().get("error")
            if ours.status_code == 200:
                assert ours.json()["usage"] == theirs.json()["usage"]
                spans = [s.engine.submitted[-1].media for s in (server, plain)]
                assert spans[0] == spans[1]
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,####"}}
    assert error(server.chat([bad]), 400)["code"] == "invalid_base64"
    body = {"messages": [{"role": "user", "content": [image_part(whole)]}]}
    assert server.post("/tokenize", **body).json() == plain.post("/tokenize", **body).json()


def test_a_hundred_pictures_are_refused_before_any_is_touched(server, monkeypatch):
    befalls(monkeypatch, jobs.stuck)
    said = error(server.chat([image_part()] * 100), 400)
    assert "100 pictures; at most 3" in said["message"]


def test_a_stuck_picture_is_a_504_and_the_next_request_is_served(server, monkeypatch):
    with monkeypatch.context() as m:
        befalls(m, jobs.stuck)
        answers = []
        thread = threading.Thread(target=lambda: answers.append(server.chat([image_part(picture(7))])))
        thread.start()
        wait_until(lambda: server.intake.processor.media.workers.n_jobs == 1)
    assert server.chat([image_part(picture(8))], max_tokens=4).status_code == 200 and not answers
    thread.join()
    assert error(answers[0], 504)["code"] == "media_timeout"
    assert server.chat([image_part(picture(7))], max_tokens=4).status_code == 200


def test_a_picture_that_kills_is_a_422_and_holds_nothing(server, monkeypatch):
    with monkeypatch.context() as m:
        befalls(m, jobs.dies)
        said = error(server.chat([image_part(picture(9)), image_part(picture(10))]), 422)
        assert said["code"] == "invalid_media" and said["param"] == "messages.0.content.0.image_url"
    server.check_idle()


def test_a_client_that_leaves_takes_its_pictures_out_of_the_queue(server, monkeypatch, tmp_path):
    trace, over = tmp_path / "begun", tmp_path / "over"
    befalls(monkeypatch, jobs.nap, str(over), str(trace))
    patient = threading.Thread(target=lambda: server.chat([image_part(picture(i)) for i in (11, 12, 13)]))
    patient.start()
    wait_until(lambda: trace.exists() and len(trace.read_bytes()) > 1)
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": [image_part(picture(i)) for i in (14, 15, 16)]}]},
            timeout=0.2,
        )
    wait_until(lambda: server.sessions.n_live == 1)
    over.touch()
    patient.join()
    wait_until(lambda: server.sessions.n_live == 0 and server.intake.processor.media.workers.n_jobs == 0)
    begun = trace.read_bytes()
    assert begun.count(picture(13)) == 1
    assert not any(picture(i) in begun for i in (14, 15, 16))


def test_closing_while_a_picture_is_stuck(start, monkeypatch):
    workers = MediaWorkers(1, LIMITS, job_limit_s=100.0)
    server = start(workers=workers)
    befalls(monkeypatch, jobs.stuck)
    sock = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    body = httpx.Request("POST", server.url, json={"messages": [{"role": "user", "content": [image_part()]}]}).read()
    sock.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )
    wait_until(lambda: len(workers.pids) == 1 and workers.n_jobs == 1)
    pids, begun_s = workers.pids, time.monotonic()
    server.intake.close()
    assert time.monotonic() - begun_s < PATIENCE_S and alive(pids) == []
    sock.close()
    server.check_idle()


def test_a_worker_killed_from_outside_costs_nobody_an_answer(server, workers):
    for i in range(20, 26):
        os.kill(workers.pids[0], signal.SIGKILL)
        assert server.chat([image_part(picture(i))], max_tokens=4).status_code == 200
