"""The files of deploy/ do what they say with the programs that they are for, where these are installed."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from tests.checkpoints import make_llava
from tests.prometheus import Prometheus, installed
from tests.server_process import ServerProcess
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.multi, pytest.mark.timeout(180)]
DEPLOY = Path(__file__).parent.parent / "deploy"
LONG = {"prompt": "Count", "n": 4, "max_tokens": 300, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server as it stands behind nginx.conf."""
    folder = tmp_path_factory.mktemp("server")
    options = ["--root-path", "/hydra", "--proxy-headers", "127.0.0.1", "--served-model-name", "mine"]
    with ServerProcess(folder, make_llava(folder / "llava"), *options) as server:
        yield server


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_systemd_takes_the_unit(tmp_path):
    analyze = installed("systemd-analyze")
    text = (DEPLOY / "hydrainfer.service").read_text()
    executable = re.search(r"^ExecStart=(\S+) serve --config", text, re.M)[1]
    program = tmp_path / "hydrainfer"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "hydrainfer.service"
    unit.write_text(text.replace(executable, str(program)))
    assert run(analyze, "verify", "--man=no", unit) == ""


@contextmanager
def nginx(folder, server):
    """The URL of an nginx with deploy/nginx.conf in front of the server."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    snippet = (DEPLOY / "nginx.conf").read_text()
    for old, new in (("127.0.0.1:8000", f"127.0.0.1:{server.port}"), ("listen 80;", f"listen 127.0.0.1:{port};")):
        assert old in snippet
        snippet = snippet.replace(old, new)
    (folder / "hydrainfer.conf").write_text(snippet)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder / kind};\n" for kind in kinds)
    main = f"pid {folder}/pid; error_log {folder}/error.log; master_process off; daemon off; events {{}}\n"
    (folder / "main.conf").write_text(f"{main}http {{ access_log off;\n{paths}include {folder}/hydrainfer.conf; }}\n")
    command = [installed("nginx"), "-p", folder, "-c", folder / "main.conf", "-e", folder / "error.log"]
    run(*command, "-t")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: listens(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_nginx_streams_under_a_prefix_and_says_who_asks(server, tmp_path):
    source = httpx.HTTPTransport(local_address="127.0.0.2")
    with nginx(tmp_path, server) as url, httpx.Client(base_url=url, transport=source, timeout=60) as client:
        assert client.get("/hydra/v1/models").json()["data"][0]["id"] == "mine"
        assert client.get("/hydra/").headers["content-type"].startswith("text/html")
        assert client.get("/hydra/openapi.json").json()["servers"] == [{"url": "/hydra"}]
        assert client.get("/v1/models").status_code == 404, "nginx's own"
        for path in ("/hydra/metrics", "/hydra/load", "/hydra/v1/instances"):
            assert client.get(path).status_code == 403
        forged = {"X-Forwarded-For": "10.9.9.9", "X-Request-Id": "behind-nginx"}
        with client.stream("POST", "/hydra/v1/completions", json=LONG, headers=forged) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            under_way = httpx.get(f"{server.url}/load", timeout=PATIENCE_S).json()["server_load"]
            rest = [line for line in lines if line]
        assert first.startswith("data: {") and rest[-1] == "data: [DONE]"
        assert under_way >= 1, "the first token comes before the last"

        def logged():
            return [line for line in server.lines_of("request") if line.get("id") == "behind-nginx"]

        wait_until(logged)
        (line,) = logged()
        assert (line["client"], line["path"], line["status"]) == ("127.0.0.2", "/v1/completions", 200)


def test_promtool_finds_nothing_wrong_but_vllms_names(server):
    """They have a colon, and one histogram ends as counters do."""
    promtool = installed("promtool")
    assert (
        httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "hi", "max_tokens": 2}, timeout=PATIENCE_S
        ).status_code
        == 200
    )
    page = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
    checked = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, timeout=60)
    assert checked.returncode in (0, 3), "3: remarks on style only"
    remarks = [line for line in checked.stderr.splitlines() if not line.endswith("should not contain ':'")]
    of_vllm = 'hydrainfer:iteration_tokens_total non-counter metrics should not have "_total" suffix'
    assert set(remarks) <= {of_vllm}
    assert "1 rule files found" in run(promtool, "check", "config", DEPLOY / "prometheus.yml")
    assert "4 rules found" in run(promtool, "check", "rules", DEPLOY / "prometheus-alerts.yml")


def test_a_prometheus_scrapes_the_server_and_answers_for_it(server, tmp_path):
    installed("prometheus")
    text = (DEPLOY / "prometheus.yml").read_text()
    assert "127.0.0.1:8000" in text and "scrape_interval: 10s" in text
    config = tmp_path / "prometheus.yml"
    config.write_text(text.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}").replace("10s", "1s"))
    shutil.copy(DEPLOY / "prometheus-alerts.yml", tmp_path)
    with Prometheus(tmp_path, config) as prometheus:
        wait_until(lambda: prometheus.query('up{job="hydrainfer"} == 1'), 60)
        assert (
            httpx.post(
                f"{server.url}/v1/completions", json={"prompt": "hi", "max_tokens": 2}, timeout=PATIENCE_S
            ).status_code
            == 200
        )
        wait_until(lambda: prometheus.query('hydrainfer:generation_tokens_total{model_name="mine"} >= 2'), 60)
        rules = yaml.safe_load((tmp_path / "prometheus-alerts.yml").read_text())["groups"][0]["rules"]
        for rule in rules:
            metric = re.search(r"(?:hydrainfer:|http_|\bup\b)\w*", rule["expr"])[0]
            assert prometheus.query(metric) or metric == "hydrainfer:requests_refused_total", rule
            assert not prometheus.query(rule["expr"]), "nothing is wrong"
