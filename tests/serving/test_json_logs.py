"""With --log-format json, whatever a server says is JSON: requests, reloads, its instances and its end."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket

import httpx
import pytest

from tests.checkpoints import make_llava
from tests.server.conftest import data_url, image_part
from tests.server_process import ServerProcess
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.multi, pytest.mark.timeout(240)]
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_llava(tmp_path_factory.mktemp("llava"))


def lines_after_start(server):
    """The lines of stdout and stderr, without what is printed before the log begins."""
    out, err = server.texts()
    begun = out.split("\n")
    assert begun[0].startswith("starting ") and not any(begun[1:]), "the one line before the log begins"
    return [json.loads(line) for line in err.splitlines()]


def check_form(lines):
    for line in lines:
        assert {"time", "level", "event", "message"} <= line.keys(), line
        assert line["time"].endswith("+00:00") and line["message"]


def test_reloads_requests_and_the_end_are_json(checkpoint, tmp_path):
    tenants = tmp_path / "tenants.yaml"

    def write(name, key):
        tenants.write_text(f"{name}: {{keys: ['sha256:{hashlib.sha256(key.encode()).hexdigest()}']}}")

    write("acme", "k")
    with ServerProcess(tmp_path, checkpoint, "--tenants", tenants, "--stats-s", "0.2") as server:
        with httpx.Client(base_url=server.url, headers={"authorization": "Bearer k"}, timeout=60) as client:
            say = {"max_tokens": 4, "messages": [{"role": "user", "content": [image_part()]}]}
            assert client.post(PATH, json=say).status_code == 200
            broken = {"type": "image_url", "image_url": {"url": data_url(b"broken")}}
            bad = {"max_tokens": 4, "messages": [{"role": "user", "content": [broken]}]}
            assert client.post(PATH, json=bad).status_code == 422
            tenants.write_text("nonsense: 5")
            server.process.send_signal(signal.SIGHUP)
            server.wait_for("tenants_unchanged")
            write("other", "k")
            server.process.send_signal(signal.SIGHUP)
            server.wait_for("tenants_read")
            server.process.send_signal(signal.SIGUSR1)
            server.wait_for("not_restarting")
            with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as stranger:
                stranger.sendall(b"what is this?\r\n\r\n")
                assert b"400" in stranger.recv(4096)
            stream = {**say, "stream": True, "ignore_eos": True, "max_tokens": 400, "n": 4}
            with client.stream("POST", PATH, json=stream) as answer:
                lines = answer.iter_lines()
                next(lines)
                server.process.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(60) == 0
        lines = lines_after_start(server)
    check_form(lines)
    events = {line["event"]: line for line in lines}
    assert {"options", "ready", "request", "load", "draining", "drained"} <= events.keys()
    wrong, right = events["tenants_unchanged"], events["tenants_read"]
    assert wrong["level"] == "error" and "must hold keys and limits" in wrong["message"]
    assert right | {"level": "info", "n_keys": 1, "gone": ["acme"]} == right
    assert events["options"]["options"]["tenants"] == str(tenants)
    assert events["request"]["client"] == "127.0.0.1"


def test_instances_of_ray_log_json_and_so_does_what_ray_says(checkpoint, tmp_path):
    layout = tmp_path / "layout.yaml"
    layout.write_text("instances: [{role: EP, cpus: 1}, {role: D, cores: [99999], cpus: 1}]")
    with ServerProcess(tmp_path, checkpoint, "--layout", layout) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            victim = next(i for i in client.get("/v1/instances").json()["data"] if i["id"] == "D0")
            os.kill(victim["pid"], signal.SIGKILL)

            def is_back():
                cards = {i["id"]: i for i in client.get("/v1/instances").json()["data"]}
                return cards["D0"]["state"] == "alive" and cards["D0"]["pid"] != victim["pid"]

            wait_until(is_back, 60)
        assert server.stop() == 0
        lines = lines_after_start(server)
    check_form(lines)
    (of_d0, *_) = [line for line in lines if line.get("instance") == "D0"]
    assert of_d0 | {"level": "warning", "event": "log", "logger": "hydrainfer.cluster.actor"} == of_d0
    assert "cannot be pinned" in of_d0["message"] and int(of_d0["pid"])
    assert any(line["event"] == "output" and line["message"].startswith("(raylet)") for line in lines)


def test_what_ends_a_server_is_json(checkpoint, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(AssertionError):
        ServerProcess(tmp_path, checkpoint, "--port", taken.getsockname()[1])
    (last,) = (json.loads(line) for line in (tmp_path / "stderr.txt").read_text().splitlines())
    assert last | {"level": "critical", "event": "failed"} == last and "cannot listen" in last["message"]
