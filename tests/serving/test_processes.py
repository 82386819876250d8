"""`hydrainfer serve` as a process: it starts, answers, refuses in one line, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from hydrainfer.builtin import MODEL
from hydrainfer.cluster import Pulse
from tests.checkpoints import make_llava
from tests.cluster.processes import alive
from tests.server.conftest import image_part, picture
from tests.waiting import wait_until

pytestmark = [pytest.mark.multi, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("llava"))


class Served:
    """A server process; `url` once it is ready, `output` what it printed."""

    def __init__(self, *args, under="exec"):
        """`under`: how a shell begins it."""
        self.output = ""
        self.process = subprocess.Popen(
            ["sh", "-c", f'{under} "$@"', "sh", sys.executable, "-m", "hydrainfer", "serve", *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        )
        self._ready = threading.Event()
        self.reading = threading.Thread(target=self._read, daemon=True)
        self.reading.start()

    def _read(self):
        for line in self.process.stdout:
            self.output += line
            if "curl" in line:
                self._ready.set()

    @property
    def url(self):
        assert self._ready.wait(90), self.output
        return re.search(r"ready (http://\S+)/v1", self.output)[1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def stop(self, sig):
        self.process.send_signal(sig)
        return self.process.wait(60)


def body(**options):
    return {"messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 8, "temperature": 0, **options}


ENDLESS = {"prompt": "Count", "max_tokens": 4000, "ignore_eos": True, "stream": True}


def test_a_server_finishes_its_answers_after_a_signal(checkpoint):
    """Two servers, which start side by side, and end by different signals."""
    options = ("--port", 0, "--served-model-name", "tiny", "--api-key", "secret")
    with Served(checkpoint, *options) as terminated, Served(checkpoint, *options) as interrupted:
        finishes_its_answers(terminated, signal.SIGTERM)
        finishes_its_answers(interrupted, signal.SIGINT)


def finishes_its_answers(server, sig):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.get("/health").json() == {"status": "ok"}
        server.process.send_signal(signal.SIGUSR1)
        assert client.post("/v1/chat/completions", json=body()).status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert client.get("/v1/models", headers=key).json()["data"][0]["id"] == "tiny"
        with client.stream(
            "POST", "/v1/chat/completions", json=body(stream=True, max_tokens=400, ignore_eos=True), headers=key
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(sig)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.output, server.output
    assert "secret" not in server.output
    assert "no instance can be started again here" in server.output, "SIGUSR1 is no end"
    assert "-H 'Authorization: Bearer KEY'" in server.output


def test_a_killed_server_leaves_no_process_and_no_port(checkpoint):
    server = Served(checkpoint, "--port", 0)
    port = int(server.url.rsplit(":", 1)[1])
    children = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True).stdout.split()
    assert children, "a media worker has been started"
    server.stop(signal.SIGKILL)
    wait_until(lambda: not alive(children))  # who adopts it may not have waited for it yet
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", port))


def test_a_server_serves_pictures_with_2_gib_of_addresses(checkpoint):
    """`ulimit -v`: less than a worker would take by itself, and little more than torch takes in the server."""
    server = Served(checkpoint, "--port", 0, under="ulimit -v 2097152; exec")
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for size in ((40, 30), (1800, 1800)):
            asked = [{"role": "user", "content": [image_part(picture(size=size))]}]
            answer = client.post("/v1/chat/completions", json=body(messages=asked))
            assert answer.status_code == 200, answer.text
    assert server.stop(signal.SIGTERM) == 0
    assert "Error" not in server.output, server.output


@pytest.mark.parametrize("launcher", ["inproc", "ray"])
def test_a_layout_serves_until_a_signal_and_leaves_nothing(checkpoint, launcher):
    server = Served(checkpoint, "--port", 0, "--layout", "1E1PD", "--launcher", launcher, "--drain-s", 4)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.get("/health").json() == {"status": "ok"}
        cards = client.get("/v1/instances").json()["data"]
        assert [(c["id"], c["state"]) for c in cards] == [("E0", "alive"), ("PD0", "alive")]
        pids = {c["pid"] for c in cards}
        assert (server.process.pid in pids) == (launcher == "inproc")
        assert client.post("/v1/chat/completions", json=body()).status_code == 200
        with client.stream("POST", "/v1/completions", json=ENDLESS) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)  # Ray would give it 3 seconds and no word to the client
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.process.wait(60) == 0
    assert not any(word in server.output for word in ("Traceback", "ERROR", "SIGTERM")), server.output
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert not run_folders(server.process.pid)


def of_run(server):
    """What a server has started, and its folder. Its guardian has the folder as an argument, the others have it in
    their environment."""
    (folder,) = run_folders(server.process.pid)
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (process / "environ").read_bytes() + (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found, folder


LONG = {"prompt": "Count", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
DAEMONS = {"control": "gcs_server", "node": "raylet", "agent": "ray::DashboardAgent", "session": ""}


def end_daemon(server, which):
    """Kill one of Ray's processes, or remove the directory of its session."""
    pids, folder = of_run(server)
    if which == "session":
        shutil.rmtree(folder / "r")
        return
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in alive(pids)}
    found = [pid for pid, name in names.items() if DAEMONS[which] in name.partition(" --")[0]]
    os.kill(min(found), signal.SIGKILL)


def text_of(client, then=lambda: None):
    """The text of a long stream, or None if it ended with 503. `then` is called once its first token is there."""
    with client.stream("POST", "/v1/completions", json=LONG) as stream:
        said = [json.loads(line[6:]) for line in _calling(stream.iter_lines(), then) if line.startswith("data: {")]
    errors = [chunk["error"]["code"] for chunk in said if "error" in chunk]
    assert errors in ([], ["unavailable"]), said[-1]
    return None if errors else "".join(choice["text"] for chunk in said for choice in chunk["choices"])


def _calling(lines, then):
    for n, line in enumerate(lines):
        if n == 2:
            then()
        yield line


def pids_of_instances(client):
    """The processes of all instances, once they all run: `/health` says 200 as soon as every stage has one."""
    cards = []

    def all_run():
        cards[:] = client.get("/v1/instances").json()["data"]
        return all(card["state"] == "alive" for card in cards)

    wait_until(all_run, 60)
    return {card["pid"] for card in cards}


def outlives(server, client, which, expected):
    """The server goes on without one part of its Ray, and so does a request, if that takes no longer than its patience.
    Returns how long the server could not serve."""
    before, times = pids_of_instances(client), []

    def end():
        end_daemon(server, which)
        times.append(time.monotonic())
        while (answer := asking.get("/health")).status_code == 200 or "started again" not in answer.json()["message"]:
            assert time.monotonic() < times[0] + 20, server.output
            time.sleep(0.02)

    def wait():
        while asking.get("/health").status_code != 200:
            assert time.monotonic() < times[0] + 90, server.output
            time.sleep(0.02)
        times.append(time.monotonic())

    with httpx.Client(base_url=server.url, timeout=60) as asking:
        waiting = threading.Thread(target=wait)
        text = text_of(client, lambda: (end(), waiting.start()))
        waiting.join()
    away_s = times[1] - times[0]
    assert text == expected or (text is None and away_s > Pulse().patience_s), f"back after {away_s:.1f} s: {text}"
    after = pids_of_instances(client)
    assert len(after) == len(before) and not after & before and not alive(before)
    return away_s


def test_a_server_outlives_its_own_ray_and_requests_go_on():
    with Served(MODEL, "--port", 0, "--layout", "1EPD", "--launcher", "ray") as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            away_s = outlives(server, client, "node", text_of(client))
            assert client.post("/v1/chat/completions", json=body()).status_code == 200
            pids, folder = of_run(server)
        assert server.stop(signal.SIGTERM) == 0
    server.reading.join()
    assert "Ray's node process (raylet) has ended" in server.output
    assert "Traceback" not in server.output, server.output
    assert not alive(pids) and not folder.exists()
    print(f"away for {away_s:.1f} s")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D", "2EPD"])
@pytest.mark.parametrize("which", DAEMONS)
def test_a_server_outlives_every_part_of_its_own_ray_three_times(layout, which):
    """The fourth time within ten minutes it ends, says why, and leaves nothing."""
    with Served(MODEL, "--port", 0, "--layout", layout, "--launcher", "ray") as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            expected = text_of(client)
            away_s = [outlives(server, client, which, expected) for _ in range(3)]
            pids, folder = of_run(server)
            end_daemon(server, which)
        assert server.process.wait(60) == 2
    server.reading.join()
    (last,) = [line for line in server.output.splitlines() if line.startswith("error:")]
    assert "the 4th time in 10 minutes" in last
    assert "Traceback" not in server.output, server.output
    assert not alive(pids) and not folder.exists()
    print("away for", *(f"{s:.1f} s" for s in away_s))


def run_folders(pid):
    return list(Path(tempfile.gettempdir()).glob(f"hydrainfer-{pid}-*"))


def refused(*args, env=None):
    process = subprocess.Popen(
        [sys.executable, "-m", "hydrainfer", "serve", *map(str, args)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "300", "NO_COLOR": "1", "HYDRAINFER_PORT": "0", **(env or {})},
    )
    try:
        _, said = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 2
    assert not run_folders(process.pid)
    (line,) = said.splitlines()
    assert line.startswith("error:")
    return line


def check_refused(*cases):
    """Check that each of these is refused: what the line says, and the arguments of `refused`. Two processes run at
    once, since most of their time is imports, on one core."""
    with ThreadPoolExecutor(2) as pool:
        lines = [pool.submit(refused, *args, **options) for _, args, options in cases]
    for (says, _, _), line in zip(cases, lines):
        assert says in line.result()


def test_wrong_options_are_one_line(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    check_refused(
        ("no such", (tmp_path / "none",), {}),
        ("must be one of", (checkpoint, "--dtype", "int8"), {}),
        ("HYDRAINFER_PORT", (checkpoint,), {"env": {"HYDRAINFER_PORT": "high"}}),
        ("no instance that runs decode", (checkpoint, "--layout", "1E1P"), {}),
        ("max_model_len", (checkpoint, "--max-model-len", 4000, "--kv-cache-gib", 0.0001), {}),
        ("no memory", (checkpoint, "--kv-cache-gib", 1_000_000), {}),
        ("it must be at least ", (checkpoint, "--kv-cache-gib", 0.000001), {}),
        ("supported", (tmp_path,), {}),
    )


def test_a_wrong_layout_is_refused_in_one_line(checkpoint, tmp_path):
    def file(name, text):
        path = tmp_path / f"{name}.yaml"
        path.write_text(f"instances: [{text}]")
        return path

    unknown, large = "{role: EPD}, {role: X}", "{role: E}, {role: PD, kv_cache_gib: 1000000}"
    check_refused(
        ("cannot read layout 'banana'", (checkpoint, "--layout", "banana"), {}),
        ("instance 2: unknown role 'X'", (checkpoint, "--layout", file("unknown", unknown)), {}),
        (
            "needs caches on CUDA",
            (checkpoint, "--layout", "1E1PD", "--device", "cpu", "--transport", "nccl"),
            {},
        ),
        ("no memory", (checkpoint, "--layout", file("large", large), "--launcher", "inproc"), {}),
    )


@pytest.mark.slow
def test_a_layout_that_ray_cannot_place_is_refused_in_one_line_and_leaves_nothing(checkpoint, tmp_path):
    file = tmp_path / "layout.yaml"
    for text, says in [
        ("{role: E}, {role: PD, resources: {moon: 1}}", "no node has resource 'moon', which PD0 needs"),
        ("{role: E, cpus: 500}, {role: PD}", "layout needs 501 CPUs, the cluster has"),
        ("{role: E}, {role: PD, kv_cache_gib: 1000000}", "no memory for caches"),
    ]:
        file.write_text(f"instances: [{text}]")
        assert says in refused(checkpoint, "--layout", file, "--launcher", "ray")


def test_a_taken_port_is_found_before_the_model_loads(checkpoint):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        assert "cannot listen" in refused(checkpoint, "--port", s.getsockname()[1])
