"""Signals and ends: before it listens, as soon as it does, twice under load, when nothing can be served again."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest
from rich.console import Console

from hydrainfer import assemble, serving
from hydrainfer.config import load
from hydrainfer.core import ConfigError, InternalError
from hydrainfer.ending import Signals
from tests.checkpoints import make_llava
from tests.serving.test_leaving import COSTS
from tests.serving.test_real_engine import chat, picture
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]
PATH = "/v1/chat/completions"
ENDLESS = {"max_tokens": 500, "ignore_eos": True}


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Options of a server whose answers take seconds, and whose queue is longer than what runs."""
    folder = tmp_path_factory.mktemp("stopping")
    (folder / "costs.yaml").write_text(COSTS.replace("step_base_s: 0.005", "step_base_s: 0.05"))
    options = {
        "access_log": False,
        "log_level": "warning",
        "device": "emulated",
        "cost_model": str(folder / "costs.yaml"),
        "media_hosts": "any",
    }
    return {"model": str(make_llava(folder / "llava")), "port": 0, "launcher": "inproc", "max_running": 4, **options}


def serve(options, monkeypatch, when_ready, console=None):
    """`serve_forever` in this thread; `when_ready` is called with the URL and the model's name in place of its word."""
    monkeypatch.setattr(serving, "_greet", lambda console, url, model, *_: when_ready(url, model))
    serving.serve_forever(load(options), console or Console(quiet=True))


@contextmanager
def signals_restored():
    """One that nobody handles fails the test instead of ending all tests."""

    def unhandled(sig, _):
        raise AssertionError(f"{signal.Signals(sig).name} found no handler")

    before = {s: signal.signal(s, unhandled) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
        assert all(signal.getsignal(s) is unhandled for s in before), "not put back"
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_when_it_says_ready_it_listens_and_a_signal_ends_it_well(options, monkeypatch, sig):
    found = []

    def when_ready(url, _):
        at = urlsplit(url)
        with socket.socket() as s:
            found.append(s.connect_ex((at.hostname, at.port)))
        os.kill(os.getpid(), sig)

    with signals_restored():
        serve(options, monkeypatch, when_ready)
    assert found == [0]


@pytest.mark.parametrize("when", ["loading", "loaded"])
@pytest.mark.parametrize(("sig", "raises"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_while_it_starts_ends_the_start_and_tidies_up(options, monkeypatch, sig, raises, when):
    closed = []

    def close():
        os.kill(os.getpid(), sig)  # an impatient user
        closed.append(True)

    def interrupt(*_):
        os.kill(os.getpid(), sig)
        time.sleep(10)

    def start_instance(*_):
        if when == "loading":
            try:
                interrupt()
            finally:
                close()
        return SimpleNamespace(facts={}, warm=lambda: None, close=close)

    monkeypatch.setattr(assemble, "start_instance", start_instance)
    monkeypatch.setattr(serving, "config_table", interrupt)
    with signals_restored(), pytest.raises(raises) as e:
        serve(options, monkeypatch, None)
    assert closed == [True] and (raises is KeyboardInterrupt or e.value.code == 143)


@pytest.mark.parametrize("sig", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_the_start_did_not_heed_goes_to_the_server(sig):
    """Such as a reload while the weights load, or an end whose exception a library has swallowed."""
    told = []
    server = SimpleNamespace(handle_exit=lambda sig, _: told.append(sig), should_exit=False)
    with signals_restored(), Signals(0.0, hang_up=True) as signals:
        with suppress(SystemExit):
            os.kill(os.getpid(), sig)
        signals.hand_to(server)
    assert told == [sig]


@pytest.mark.parametrize("background", [False, True])
def test_a_port_that_is_taken_while_it_loads_is_an_error(options, monkeypatch, background):
    start_instance, console = assemble.start_instance, Console(quiet=True)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        here = {**options, "port": other.getsockname()[1]}

        def started(*args):
            other.listen()
            return start_instance(*args)

        monkeypatch.setattr(assemble, "start_instance", started)
        with signals_restored(), pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{here['port']}: "):
            if background:
                with serving.serve_in_background(load(here), console):
                    pass
            else:
                serve(here, monkeypatch, lambda *_: os.kill(os.getpid(), signal.SIGTERM))


@pytest.mark.parametrize(
    ("more", "exposed"),
    [({"host": "0.0.0.0"}, True), ({"host": "0.0.0.0", "api_key": "k"}, False), ({"host": "127.0.0.1"}, False)],
)
def test_a_server_on_all_interfaces_without_a_key_says_so(options, monkeypatch, more, exposed):
    said, greet = io.StringIO(), serving._greet

    def greeted(*args):
        greet(*args)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(serving, "_greet", greeted)
    with signals_restored():
        serving.serve_forever(load({**options, **more}), Console(file=said, width=200))
    assert "ready http://127.0.0.1:" in said.getvalue()
    assert ("it listens on all interfaces and needs no key" in said.getvalue()) == exposed


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D"])
def test_when_nothing_can_be_served_again_it_says_so_and_ends(options, monkeypatch, layout, caplog):
    answers, start_instance = [], assemble.start_instance

    def started(*args):
        instance = start_instance(*args)
        engine = instance.engine._engine if layout == "1EPD" else instance.engine.launcher.nodes["P0"].engine
        monkeypatch.setattr(engine, "_launch", lambda now: 1 / 0)
        return instance

    def ask(url):
        body = {"messages": chat(), "max_tokens": 4}
        answers.append(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60))

    monkeypatch.setattr(assemble, "start_instance", started)
    threads = []

    def when_ready(url, _):
        threads.append(threading.Thread(target=ask, args=(url,)))
        threads[0].start()

    with signals_restored(), pytest.raises(InternalError) as e:
        serve({**options, "layout": layout}, monkeypatch, when_ready)
    threads[0].join()
    error = answers[0].json()["error"]
    if layout == "1EPD":
        assert (answers[0].status_code, error["type"]) == (500, "internal_error")
        assert (
            e.value.message == "the server has ended: the engine stopped after an internal error; see the server's log"
        )
    else:
        assert (answers[0].status_code, error["code"]) == (503, "stage_lost")
        assert e.value.message.startswith("the server has ended: no instance can prefill any more: P0 has died")


def test_while_it_drains_those_who_are_in_finish_and_those_who_come_are_told(options, monkeypatch, caplog):
    done, found = threading.Event(), {}

    def drain(url):
        body = {"messages": chat(), "max_tokens": 40, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=url, timeout=60) as http, http.stream("POST", PATH, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            found["before"] = http.get("/ready").json()
            os.kill(os.getpid(), signal.SIGTERM)
            while (ready := http.get("/ready")).status_code == 200:
                time.sleep(0.02)
            found["ready"], found["refused"] = ready, http.post(PATH, json=body)
            found["health"] = http.get("/health").status_code
            found["last"] = [line for line in lines if line][-1]
        done.set()

    def when_ready(url, _):
        threading.Thread(target=drain, args=(url,)).start()

    with signals_restored():
        serve({**options, "log_level": "info"}, monkeypatch, when_ready)
    assert done.wait(PATIENCE_S)
    assert found["before"] == {"status": "ready"}
    assert found["ready"].json() == {"status": "draining", "live": 1}
    refused = found["refused"]
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "service_unavailable")
    assert int(refused.headers["retry-after"]) >= 1 and refused.headers["connection"] == "close"
    assert (found["health"], found["last"]) == (200, "data: [DONE]")
    assert "1 may finish within 25 s" in caplog.text and "1 of 1 requests have finished" in caplog.text


def test_a_hang_up_reads_the_tenants_again(options, monkeypatch, tmp_path, caplog):
    path, seen = tmp_path / "tenants.yaml", []

    def write(key):
        path.write_text(f"acme: {{keys: ['sha256:{hashlib.sha256(key.encode()).hexdigest()}']}}")

    def ask(url, key):
        return httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=PATIENCE_S).status_code

    def change(url):
        seen.append([ask(url, key) for key in ("old", "new")])
        for text in ("nonsense", None):
            write("new") if text is None else path.write_text(text)
            n = caplog.text.count("tenants")
            os.kill(os.getpid(), signal.SIGHUP)
            while caplog.text.count("tenants") == n:
                time.sleep(0.01)
            seen.append([ask(url, key) for key in ("old", "new")])
        os.kill(os.getpid(), signal.SIGTERM)

    def when_ready(url, _):
        threading.Thread(target=change, args=(url,)).start()

    write("old")
    with signals_restored():
        serve({**options, "log_level": "info", "tenants": str(path)}, monkeypatch, when_ready)
    assert seen == [[200, 401], [200, 401], [401, 200]]
    assert "tenants as before" in caplog.text and "tenants: read again, 1 key\n" in caplog.text


@pytest.fixture(params=["full disk", "broken pipe"])
def unread(request, monkeypatch):
    """A console on a standard output that takes nothing."""
    if request.param == "full disk":
        writer = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = os.pipe()
        os.close(reader)
    file = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", file)  # rich puts /dev/null in its place
    yield Console(file=file)
    with suppress(OSError):
        file.close()


def test_a_console_that_takes_nothing_ends_nothing(options, monkeypatch, tmp_path, unread):
    path, key = tmp_path / "tenants.yaml", hashlib.sha256(b"k").hexdigest()
    path.write_text(f"acme: {{keys: ['sha256:{key}']}}")
    last, threads, greet = [], [], serving._greet
    body = {"messages": chat(), "max_tokens": 40, "ignore_eos": True, "stream": True}

    def signals(url):
        with httpx.stream(
            "POST", f"{url}{PATH}", json=body, headers={"authorization": "Bearer k"}, timeout=PATIENCE_S
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            for sig in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
                os.kill(os.getpid(), sig)
                time.sleep(0.3)
            last.extend([line for line in lines if line][-1:])

    def when_ready(url, model):
        greet(unread, url, model, False, True, False)
        threads.append(threading.Thread(target=signals, args=(url,)))
        threads[0].start()

    monkeypatch.setattr(serving, "_settle", lambda *_: None)  # prints before it is ready
    with signals_restored():
        serve({**options, "tenants": str(path)}, monkeypatch, when_ready, unread)
    threads[0].join()
    assert last == ["data: [DONE]"]


class Clients:
    """They stream and wait for whole answers, some in the queue; a picture does not come, a body is half there."""

    def __init__(self):
        self.pool, self.told = ThreadPoolExecutor(40), threading.Semaphore(0)
        self.deaf = socket.create_server(("127.0.0.1", 0))  # never answers
        self.answers = []

    def begin(self, url):
        missing = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{self.deaf.getsockname()[1]}/a.png"}}
        bodies = [{"messages": chat(*[picture(i)] * (i % 2)), **ENDLESS, "stream": i % 4 != 3} for i in range(16)]
        bodies += [{"messages": chat(missing), **ENDLESS, "stream": stream} for stream in (True, False)]
        self.answers = [self.pool.submit(self.one, url, body) for body in bodies]
        self.answers += [self.pool.submit(self.half, url, bodies[0])]
        for _ in range(3):
            assert self.told.acquire(timeout=PATIENCE_S), [a for a in self.answers if a.done()]
        time.sleep(0.5)

    def one(self, url, body):
        """(status, type of the error), however it comes."""
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
            if response.headers["content-type"] != "text/event-stream; charset=utf-8":
                return response.status_code, json.loads(response.read())["error"]["type"]
            events = []
            for line in response.iter_lines():
                if line and not events:
                    self.told.release()
                events += [line.removeprefix("data: ")] if line else []
        assert events[-1] == "[DONE]"
        return 503, json.loads(events[-2])["error"]["type"]

    def half(self, url, body):
        at, data = urlsplit(url), json.dumps(body).encode()
        kind = "content-type: application/json\r\n"
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\n{kind}content-length: {len(data)}\r\n\r\n".encode()
        with socket.create_connection((at.hostname, at.port), timeout=60) as s:
            s.sendall(head + data[:-10])
            answer = b"".join(iter(lambda: s.recv(1 << 16), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)["error"]["type"]

    def close(self):
        self.deaf.close()
        self.pool.shutdown()


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D"])
def test_a_second_ctrl_c_tells_everybody_and_ends_soon(options, monkeypatch, layout, caplog, capfd):
    clients, signalled = Clients(), []

    def interrupt(url):
        try:
            clients.begin(url)
        finally:
            signalled.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=lambda: interrupt(found[0]))
    found = []

    def when_ready(url, _):
        found.append(url)
        thread.start()

    with signals_restored():
        serve({**options, "layout": layout}, monkeypatch, when_ready)
    took_s = time.monotonic() - signalled[0]
    thread.join()
    assert [a.result(PATIENCE_S) for a in clients.answers] == [(503, "service_unavailable")] * 19
    clients.close()
    assert [r.getMessage() for r in caplog.records if r.levelname in ("WARNING", "ERROR", "CRITICAL")] == []
    assert capfd.readouterr().err == ""
    print(f"ended {took_s:.1f} s after the first")
    assert took_s < 10
