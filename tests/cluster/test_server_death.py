"""The server is killed: its instances notice the silence, give every block back and end by themselves."""

import os
import shutil
import signal
import time

import pytest

from hydrainfer.cluster import Pulse
from tests.cluster.fleet import Fleet
from tests.cluster.processes import alive, context, memories

pytestmark = [pytest.mark.multi, pytest.mark.timeout(120)]
SILENCE_S = 1.0
GOODBYE_S = 2.0  # of `cluster.node`


def serve(folder, pipe):
    fleet = Fleet("1E1P1D", folder, Pulse(beat_s=0.1, dead_s=SILENCE_S))
    for i in range(6):
        fleet.ask(f"r{i}", pictures=[i] * (i % 2), max_tokens=1500)
    fleet.wait(lambda: sum(len(o.token_ids) for o in fleet.outputs) > 100)
    pipe.send(([i.pid for i in fleet.hub.instances()], str(fleet.sockets)))
    time.sleep(300)


def test_instances_outlive_a_killed_server_by_no_more_than_its_silence(tmp_path):
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(tmp_path, theirs))
    server.start()
    pids, sockets = ours.recv()
    assert len(alive(pids)) == 3 and len(memories(pids)[0]) == 4
    os.kill(server.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    server.join()
    while alive(pids):
        assert time.monotonic() - killed_s < SILENCE_S + GOODBYE_S + 3.0, alive(pids)
        time.sleep(0.02)
    print(f"gone {time.monotonic() - killed_s:.1f} s after the server")
    assert {p.name: p.read_text() for p in tmp_path.glob("*.leased")} == dict.fromkeys(
        ("E0.leased", "P0.leased", "D0.leased"), "0"
    )
    shutil.rmtree(sockets)  # as the next server would
