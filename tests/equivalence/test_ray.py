"""Instances in processes of their own give the tokens of one instance over every transport, and end without a trace."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hydrainfer import LLM
from hydrainfer.cluster import RunFolder
from hydrainfer.cluster.folder import PREFIX
from hydrainfer.cluster.ray import RayLauncher
from tests.checkpoints_qwen import make_qwen
from tests.equivalence.mixed import CHUNKED, LAYOUTS, ask, check_moves, settled_stats
from tests.parts import parts
from tests.waiting import SOON_S

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

BETWEEN_PROCESSES = ["shared-memory", "tcp", "gloo", "auto"]
ROTATED = [(layout, BETWEEN_PROCESSES[i % 4]) for i, layout in enumerate(LAYOUTS)]
OTHERS = [(layout, t) for layout in LAYOUTS for t in BETWEEN_PROCESSES if (layout, t) not in ROTATED]


@pytest.fixture(scope="module", autouse=True)
def ray_runtime():
    """One for all tests; launchers use it as it is."""
    folder = RunFolder(for_ray=True)
    launcher = RayLauncher(None, folder=folder)
    launcher._ray_thread.submit(launcher._connect, []).result()
    yield folder.path
    launcher.close(10)
    folder.remove()


def run_folders(rays):
    return [f for f in rays.parent.glob(f"{PREFIX}{os.getpid()}-*") if f != rays]


def wait_returned(llm):
    """Until no block is leased and nobody lives: instances tell their stats now and then."""
    end = time.monotonic() + SOON_S
    while True:
        stats = settled_stats(llm)
        leased = [n for _, n, _ in stats.cache_blocks.values()]
        if not (any(leased) or stats.n_running or stats.n_waiting or stats.n_migrating or stats.n_arriving):
            return stats
        assert time.monotonic() < end, stats


@pytest.mark.parametrize(
    ("layout", "transport"), [*ROTATED, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_tokens_are_those_of_one_instance(tiny, wanted, layout, transport, ray_runtime):
    start = time.monotonic()
    over_tcp = {"cluster_host": "127.0.0.1"} if transport == "auto" else {}
    with LLM(tiny, layout=layout, launcher="ray", transport=transport, **over_tcp, **CHUNKED) as llm:
        started_s = time.monotonic() - start
        assert ask(llm) == wanted
        asked_s = time.monotonic() - start - started_s
        check_moves(wait_returned(llm), layout)
        pids = {i.pid for i in parts(llm).engine.instances() if i.state == "alive"}
        assert len(pids) == len(parts(llm).engine.instances()) and os.getpid() not in pids
        assert set(parts(llm).facts["transport"].split(", ")) == {transport}
        start = time.monotonic()
    print(
        f"{layout} {transport}: start {started_s:.1f} s, batch {asked_s:.1f} s, close {time.monotonic() - start:.1f} s"
    )
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not run_folders(ray_runtime)


def test_states_move_with_the_keys_and_values(tmp_path, ray_runtime):
    path = make_qwen("qwen3_5", tmp_path, 3)
    with LLM(path, launcher="inproc", **CHUNKED) as llm:
        wanted = ask(llm)
    with LLM(path, layout="1E1P1D", launcher="ray", **CHUNKED) as llm:
        assert ask(llm) == wanted
        stats = wait_returned(llm)
        assert 0 < stats.blocks_pulled["state"] <= 2 * stats.n_landed
    assert not run_folders(ray_runtime)
