"""The commands as people type them, against a mock server in a process of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hydrainfer.workload.deployments import ServerFailed, ServerProcess, all_stats, free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.multi

ROOT = Path(__file__).parents[2]
MOCK = [sys.executable, "-m", "tests.workload.mock", "--port"]
TEXT = ["--workload", "text", "--min-seconds", "0"]


def hydrainfer(*words, **options):
    command = [sys.executable, "-m", "hydrainfer", *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def hears_ctrl_c():
    """As in a terminal, though a shell has started the tests in its background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def ended(process, limit_s=60):
    """Status, standard output and error."""
    out, err = process.communicate(timeout=limit_s)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    port = free_port()
    log = tmp_path_factory.mktemp("mock") / "log"
    with ServerProcess("mock", [*MOCK, str(port), "--ttft-ms", "10", "--itl-ms", "2"], port, log) as server:
        wait_until(lambda: "ready" in log.read_text() or server.check_alive(), 60)
        yield server.url
        server.stop(limit_s=0.1)  # a shell that starts the tests in its background has SIGINT ignored


def test_bench_compare_and_trace(url, tmp_path):
    """All at once: each is a second of imports."""
    start = f"{' '.join(MOCK)} {{port}} --ttft-ms 5"
    deployments = ["--server", f"there={url}", "--start", f"started={start}", "--cores", min(os.sched_getaffinity(0))]
    effort = ["--rates", "50", "--rounds", "1", "--requests", "20"]
    commands = [
        ("bench", url, *TEXT, "--goodput", "ttft:60000", "tpot:60000", "--rate", "50", "--requests", "20", "--json"),
        ("bench", "compare", *deployments, *TEXT, "--goodput", "ttft:60000", *effort, "--out", tmp_path / "c"),
        ("trace", "text", "--url", url, "--requests", "5", "--max-tokens", "3", "--out", tmp_path / "t.jsonl"),
    ]
    (_, one, said), (_, out, progress), (_, told, _) = results = [ended(p) for p in [hydrainfer(*c) for c in commands]]
    assert [r[0] for r in results] == [0, 0, 0], results
    result = json.loads(one)
    assert result["runs"][0]["report"]["n_ok"] == 20 and result["runs"][0]["attainment"]["met"][1] == 20
    assert "seed 0, SLO TTFT ≤ 60000 ms, TPOT ≤ 60000 ms" in " ".join(said.split())
    assert "started is started" in progress and "report.html" in out
    compared = json.loads((tmp_path / "c/result.json").read_text())
    assert [s["name"] for s in compared["servers"]] == ["there", "started"] and len(compared["runs"]) == 2
    assert [r["others_cores"] is None for r in compared["runs"]] == [True, False]
    assert compared["servers"][1]["startup_s"] > 0 and compared["servers"][1]["cores"]
    assert "5 requests, answers of up to 3 tokens" in told and len((tmp_path / "t.jsonl").read_text().splitlines()) == 6
    assert not [p for p, _ in all_stats() if "--ttft-ms\x005\0" in cmdline(p)]  # what was started is gone


def cmdline(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_interrupted_and_refused(url, tmp_path):
    """Ctrl-C keeps what there is; what is wrong is said in a line, before anything is measured."""
    taken = tmp_path / "taken"
    taken.write_text("")
    slow = hydrainfer("bench", url, *TEXT, "--rate", "5", "--requests", "2000", "--slo", "llava-1.5-7b:pope",
                      "--out", tmp_path / "i", env={**os.environ, "COLUMNS": "200"})  # fmt: skip
    refused = [
        (hydrainfer("bench", "http://127.0.0.1:9", *TEXT, "--rate", "1"), "no server at http://127.0.0.1:9"),
        (hydrainfer("bench", url, *TEXT, "--rate", "0"), "rate must be a positive number"),
        (hydrainfer("bench", url, *TEXT, "--goodput", "tftf:5"), "cannot read the objective 'tftf:5'"),
        (hydrainfer("bench", url, "--workload", "pope", "--data", "/absent", "--rate", "1"), "cannot read /absent"),
        (hydrainfer("bench", url, *TEXT, "--rate", "1", "--arrivals", "replay"), "give --arrival-trace FILE"),
        (hydrainfer("bench", url, *TEXT, "--rate", "1", "--arrivals", "often"), "poisson, constant, gamma, replay"),
        (hydrainfer("bench", url, *TEXT, "--rate", "0.01", "--like", "nobody"), "--like nobody: this model is not"),
        (hydrainfer("bench", url, *TEXT, "--rate", "0.01", "--out", taken / "r"), f"{taken} is a file, not a folder"),
        (hydrainfer("bench", url, *TEXT, "--rate", "0.01", "--out", "/proc/x"), "--out /proc/x: cannot be made: "),
        (hydrainfer("trace", "text", "--url", url, "--out", taken / "r.jsonl"), f"{taken} is a file, not a folder"),
    ]
    for process, said in refused:
        status, _, err = ended(process)
        assert status == 2 and said in " ".join(err.split()) and "Traceback" not in err
    status, out, _ = ended(hydrainfer("bench", url, *TEXT, "--goodput", "ttft:2", "tpot:0.05"))
    assert status == 1 and "Nothing was measured." in out and "--goodput are in milliseconds" in out
    assert "--out DIR" not in out
    said = ""
    while "poisson 5/s: 2000 requests" not in said:
        line = slow.stderr.readline()
        assert line, said
        said += line
    slow.send_signal(signal.SIGINT)
    status, out, err = ended(slow)
    assert "Traceback" not in err, err
    assert status == 130 and "interrupted (SIGINT)" in out
    result = json.loads((tmp_path / "i/result.json").read_text())
    assert result["stopped"] == "interrupted (SIGINT)" and len(result["runs"]) <= 1


def test_the_mock_server_ends_quietly_amid_an_answer():
    port = free_port()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    mock = subprocess.Popen([*MOCK, str(port), "--itl-ms", "60000"], **pipes, preexec_fn=hears_ctrl_c)
    assert "ready" in mock.stdout.readline()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}")
        assert client.recv(1)
        mock.send_signal(signal.SIGINT)
        assert ended(mock) == (0, "", "")


def test_a_server_that_does_not_start(tmp_path):
    script = "import sys; print('no such model'); sys.exit(3)"
    with ServerProcess("x", [sys.executable, "-c", script], free_port(), tmp_path / "log") as server:
        while server.status is None:
            time.sleep(0.02)
        with pytest.raises(ServerFailed, match=r"ended with status 3\nno such model"):
            server.check_alive()
    with pytest.raises(ServerFailed, match="cannot be started"):
        ServerProcess("x", ["/absent/server"], 1, tmp_path / "log")
    status, out, _ = ended(hydrainfer("bench", "compare", "--start", "x=false", *TEXT, "--rates", "1", "--goodput",
                                      "ttft:5", "--out", tmp_path / "c"))  # fmt: skip
    assert status == 1 and "x could not be measured" in out


def test_nothing_is_left_of_a_server_that_does_not_stop(tmp_path):
    child = "import signal,subprocess,sys,time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    child += "subprocess.Popen([sys.executable,'-c','import time; time.sleep(60)'], start_new_session=True); "
    with ServerProcess("x", [sys.executable, "-c", f"{child}print('up', flush=True); time.sleep(60)"], 1,
                       tmp_path / "log") as server:  # fmt: skip
        while "up" not in server.log_tail():
            time.sleep(0.02)
        family = set(server.family())
        assert len(family) == 2
        killed = server.stop(limit_s=0.1)
    assert set(killed) == family and not {p for p, s in all_stats() if s[0] != "Z"} & family
