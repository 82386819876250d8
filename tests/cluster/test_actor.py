"""The process of an instance that Ray would run."""

import pickle
import time
from functools import partial

import pytest

from hydrainfer.cluster import NodePlan, Pulse
from hydrainfer.cluster.actor import ActorInstance
from hydrainfer.machine import host_identity
from tests.cluster.fleet import emulated
from tests.cluster.processes import context
from tests.waiting import SOON_S, wait_until

pytestmark = [pytest.mark.multi, pytest.mark.timeout(60)]


def live(plan, folder):
    ActorInstance(plan, pickle.dumps(partial(emulated, folder, {})))
    time.sleep(300)


def test_a_process_that_the_hub_has_deserted_ends_at_once(tmp_path):
    """The hub may only have been stopped for a while: it needs the next incarnation, and Ray starts one."""
    at = f"ipc://{tmp_path}/"
    pulse = Pulse(beat_s=0.1, dead_s=0.5)
    plan = NodePlan("EPD0", "EPD", 1, f"{at}hub", f"{at}pixels", at + "{name}", host_identity(), pulse=pulse)
    process = context.Process(target=live, args=(plan, str(tmp_path)))
    process.start()
    try:
        wait_until((tmp_path / "EPD0.leased").exists, 50)
        process.join(SOON_S)
        assert process.exitcode == 1
    finally:
        process.kill()
        process.join()
