"""Instances in processes that Ray starts: they serve, die, come back, land where they belong, and leave nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from hydrainfer.cluster.ray import RayLauncher
from hydrainfer.config import MachineShare
from hydrainfer.core import ConfigError, InternalError
from tests.cluster.light import light
from tests.cluster.rig import Rig
from tests.waiting import PATIENCE_S, SOON_S, wait_until

pytestmark = pytest.mark.multi
ROOT = Path(__file__).parents[2]


TOKEN = {"RAY_AUTH_TOKEN": "one-for-some-other-cluster"}


class Driver:
    """`ray_driver` in a process, a session and a process group of its own, for a user whose home is read-only."""

    def __init__(self, folder, *address):
        self._facts = None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.ray_driver", str(folder), *address],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "HOME": "/proc", **TOKEN},  # where not even root may write
        )

    def started(self):
        if self._facts is None:
            self._facts = json.loads(self.process.stdout.readline())
            assert self._facts["right"] and len(alive(self._facts["pids"].values())) == 3
        return self._facts

    def ended(self):
        """The exit status, or an error and where every thread stands on the standard error."""
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            raise

    def end(self):
        """As Ctrl-C does, so that it can tidy up."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def own_ray(tmp_path_factory):
    """A server with a Ray of its own, which starts while other tests run."""
    driver = Driver(tmp_path_factory.mktemp("own"))
    yield driver
    driver.end()


@pytest.fixture(scope="module")
def cluster(own_ray):
    """Two nodes on this machine, this process joined to them."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "resources": {"vision": 1}, **common})
    nodes = {"vision": cluster.head_node, "text": cluster.add_node(num_cpus=2, resources={"text": 2}, **common)}
    ray.init(address=cluster.address, configure_logging=False, log_to_driver=True)
    cluster.named = {name: node.node_id for name, node in nodes.items()}
    yield cluster
    session = cluster.head_node.get_session_dir_path()
    ray.shutdown()
    cluster.shutdown()
    shutil.rmtree(session, ignore_errors=True)


def alive(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and not zombie(pid)]


def zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def wait_gone(pids):
    start = time.monotonic()
    wait_until(lambda: not alive(pids), SOON_S, say=lambda: alive(pids))
    return time.monotonic() - start


def test_instances_serve_where_their_resources_are_and_are_gone_after_close(cluster, tmp_path):
    shares = {
        "E0": MachineShare(resources={"vision": 1}, cores=(0,), threads=3),
        "P0": MachineShare(resources={"text": 1}),
        "D0": MachineShare(resources={"text": 1}, cpus=0.5),
    }
    with Rig("1E1P1D", RayLauncher(partial(light)), tmp_path, shares) as rig:
        requests = [rig.submit(f"r{i}", pictures=[i % 3] * (i % 2)) for i in range(8)]
        answers = [rig.tokens(r) for r in requests]
        facts, infos = rig.hub.facts, rig.hub.instances()
    assert answers == [rig.expected(r) for r in requests]
    assert {n: f["node"] for n, f in facts.items()} == {
        "E0": cluster.named["vision"],
        "P0": cluster.named["text"],
        "D0": cluster.named["text"],
    }
    assert (facts["E0"]["threads"], facts["E0"]["cores"]) == ("3", "[0]")
    assert facts["P0"]["threads"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
    assert alive(i.pid for i in infos) == []
    assert rig.close_s < 5
    time.sleep(0.5)
    assert actors_alive() == []  # closing is no crash: nothing is started again


def actors():
    """All that ever were in this cluster."""
    import ray

    return ray._private.state.actors().keys()


def actors_alive():
    import ray

    return [a for a in ray._private.state.actors().values() if a["State"] != "DEAD"]


def test_a_killed_instance_is_noticed_at_once_and_comes_back_as_another(cluster, tmp_path):
    with Rig("1EP2D", RayLauncher(partial(light, step_s=0.02)), tmp_path) as rig:
        before = rig.info("D0")
        requests = [rig.submit(f"r{i}", max_tokens=60) for i in range(4)]
        rig.wait(lambda: len(rig.outputs) > 20)
        os.kill(before.pid, signal.SIGKILL)
        noticed_s = rig.wait(lambda: rig.info("D0").incarnation != before.incarnation)
        back_s = noticed_s + rig.wait(lambda: rig.info("D0").state == "alive", PATIENCE_S)
        assert [rig.tokens(r) for r in requests] == [rig.expected(r) for r in requests]
        assert rig.info("D0").incarnation > before.incarnation and rig.info("D0").pid != before.pid
        os.kill(rig.info("D1").pid, signal.SIGKILL)  # now D0 has to serve
        rig.wait(lambda: rig.info("D1").state == "dead")
        tokens, expected = rig.answer("again")
        assert tokens == expected
    print(f"noticed after {noticed_s:.3f} s, back after {back_s:.1f} s, closed in {rig.close_s:.1f} s")
    assert noticed_s < 1


def test_a_rolling_restart_fails_no_request(cluster, tmp_path):
    with Rig("1EP2D", RayLauncher(partial(light, step_s=0.02)), tmp_path) as rig:
        before = {i.name: i.incarnation for i in rig.hub.instances()}
        assert rig.hub.restart_all()
        requests, away = [], set()
        while any(i.incarnation in (0, before[i.name]) or i.state == "dead" for i in rig.hub.instances()):
            requests.append(rig.submit(f"r{len(requests)}", max_tokens=20, pictures=[1] * (len(requests) % 2)))
            away |= {frozenset(i.name for i in rig.hub.instances() if i.state == "dead")}
            time.sleep(0.05)
            assert len(requests) < 1200, rig.hub.instances()
        assert [rig.tokens(r) for r in requests] == [rig.expected(r) for r in requests]
    assert max(map(len, away)) == 1, "one at a time"
    print(f"{len(requests)} requests meanwhile")


def test_an_instance_comes_and_another_leaves_while_requests_run(cluster, tmp_path):
    with Rig("1EPD", RayLauncher(partial(light, step_s=0.02)), tmp_path) as rig:
        requests = [rig.submit(f"r{i}", max_tokens=40) for i in range(4)]
        with pytest.raises(ConfigError, match="without EPD0, no instance could decode or encode or prefill"):
            rig.hub.remove("EPD0")
        rig.hub.add(replace(rig.hub._plans[0], name="EPD1"))
        added_s = rig.wait(lambda: rig.info("EPD1").state == "alive", PATIENCE_S)
        requests += [rig.submit(f"s{i}", max_tokens=40) for i in range(4)]
        pid = rig.info("EPD0").pid
        rig.hub.remove("EPD0")
        requests += [rig.submit(f"t{i}", max_tokens=40) for i in range(4)]
        assert [rig.tokens(r) for r in requests] == [rig.expected(r) for r in requests]
        left_s = rig.wait(lambda: [i.name for i in rig.hub.instances()] == ["EPD1"], 15)
        tokens, expected = rig.answer("after")
        assert tokens == expected and rig.hub.lost() is None
        wait_gone([pid])
        time.sleep(0.5)
        assert len(actors_alive()) == 1, "it is not started again"
    print(f"there after {added_s:.1f} s, gone {left_s:.1f} s after its last answer")


def test_a_stage_whose_start_fails_is_tried_again_and_given_up_when_its_checkpoint_is_gone(cluster, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_text("weights")
    with Rig("1P1D", RayLauncher(partial(light, checkpoint=checkpoint)), tmp_path) as rig:
        checkpoint.write_text("")
        os.kill(rig.info("P0").pid, signal.SIGKILL)
        waited_s = rig.wait(lambda: rig.info("P0").state == "dead")
        newcomers = [rig.submit(f"new{i}") for i in range(4)]
        waited_s += rig.wait(lambda: "no weights yet" in rig.info("P0").trouble, 15)
        checkpoint.write_text("weights")
        assert [rig.tokens(r) for r in newcomers] == [rig.expected(r) for r in newcomers]
        assert (rig.info("P0").trouble, rig.hub.lost()) == ("", None)
        checkpoint.unlink()
        os.kill(rig.info("P0").pid, signal.SIGKILL)
        rig.wait(lambda: rig.info("P0").state == "dead")
        late = rig.submit("late")
        rig.wait(lambda: rig.hub.lost() is not None, 15)
        assert rig.hub.lost().endswith(f"P0 could not be started again: {checkpoint} is missing")
        rig.wait(lambda: any(o.error and o.error.code == "stage_lost" for o in rig.said(late)))
    print(f"it failed {waited_s:.1f} s after its death")


def test_an_instance_of_another_host_is_watched_and_killed_through_ray(cluster, tmp_path):
    launcher = RayLauncher(partial(light))
    with Rig("2EPD", launcher, tmp_path, host="elsewhere") as rig:
        died, killed = rig.info("EPD0"), rig.info("EPD1")
        launcher.kill("EPD1", killed.incarnation + 1)  # not that one
        os.kill(died.pid, signal.SIGKILL)
        noticed_s = rig.wait(lambda: rig.info("EPD0").incarnation != died.incarnation)
        assert rig.info("EPD1").incarnation == killed.incarnation
        launcher.kill("EPD1", killed.incarnation)
        killed_s = rig.wait(lambda: rig.info("EPD1").incarnation != killed.incarnation, 15)
        rig.wait(lambda: {i.state for i in rig.hub.instances()} == {"alive"}, PATIENCE_S)
        tokens, expected = rig.answer("after")
        assert tokens == expected
    print(f"death heard of after {noticed_s:.1f} s, {killed_s:.1f} s after kill")


@pytest.mark.slow  # Ray asks it nicely for five seconds
def test_a_hanging_instance_is_killed_through_ray(cluster, tmp_path):
    launcher = RayLauncher(partial(light))
    with Rig("1EPD", launcher, tmp_path, host="elsewhere") as rig:
        hangs = rig.info("EPD0")
        os.kill(hangs.pid, signal.SIGSTOP)
        launcher.kill("EPD0", hangs.incarnation)
        killed_s = rig.wait(lambda: rig.info("EPD0").incarnation != hangs.incarnation, PATIENCE_S)
        rig.wait(lambda: rig.info("EPD0").state == "alive", PATIENCE_S)
    print(f"death of a hanging one heard of {killed_s:.1f} s after kill")


def test_an_actor_that_cannot_start_ends_the_others_with_its_reason(cluster, tmp_path):
    start = time.monotonic()
    launcher = RayLauncher(partial(light, fails_in="D0"))
    with (
        pytest.raises(InternalError, match="D0 cannot start: RuntimeError: no such weights"),
        Rig("1EP1D", launcher, tmp_path),
    ):
        pass
    assert time.monotonic() - start < 40
    assert actors_alive() == []


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (MachineShare(gpus=1), "layout needs 2 GPUs, the cluster has 0"),
        (MachineShare(resources={"audio": 1}), "no node has resource 'audio', which EPD0 needs"),
        (MachineShare(cpus=5), "no single node has 5 CPUs for EPD1"),
    ],
)
def test_missing_resources_of_the_cluster_are_reported_before_anything_starts(cluster, tmp_path, share, message):
    shares = {"EPD0": share, "EPD1": share}
    if share.cpus == 5:
        shares = {"EPD0": MachineShare(), "EPD1": share}
    before = actors()
    with pytest.raises(ConfigError, match=message), Rig("2EPD", RayLauncher(partial(light)), tmp_path, shares):
        pass
    assert actors() == before


def test_no_cluster_at_the_address_is_one_line(tmp_path):
    code = f"from tests.cluster.ray_driver import main; main({str(tmp_path)!r}, '127.0.0.1:9')"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    last = result.stderr.strip().splitlines()[-1]
    assert "cannot join the Ray cluster at 127.0.0.1:9: [Errno 111] Connection refused" in last, result.stderr[-2000:]


def test_a_ray_that_cannot_start_is_one_line_and_leaves_nothing():
    code = """if 1:
        import os
        from hydrainfer.cluster import RunFolder
        from hydrainfer.cluster.ray import RayLauncher
        folder = RunFolder(for_ray=True)
        folder.ray.touch()  # where its session should be
        launcher = RayLauncher(None, folder=folder)
        try:
            launcher.start([], None)
        except Exception as e:
            launcher.close(5)
            folder.remove()
            print(folder.path.exists(), type(e).__name__, e)
        """
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.startswith("False ConfigError Ray cannot be started: "), result.stdout + result.stderr[-2000:]
    assert result.stdout.count("\n") == 1 and "Traceback" not in result.stderr


def test_nothing_imports_ray_before_there_is_something_to_launch():
    code = "import sys, hydrainfer.cluster.ray; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


@pytest.fixture
def driver(tmp_path):
    """Starts one; it does not outlive the test."""
    drivers = []

    def start(*address):
        drivers.append(Driver(tmp_path, *address))
        return drivers[-1]

    yield start
    for d in drivers:
        d.end()


def test_a_killed_server_leaves_no_instance_on_a_cluster_it_joined(cluster, driver):
    d = driver(cluster.address)
    pids = d.started()["pids"].values()
    d.process.kill()
    print(f"gone after {wait_gone(pids):.1f} s")
    time.sleep(0.5)
    assert actors_alive() == []


def test_a_killed_server_leaves_nothing_of_its_own_ray(driver):
    d = driver()
    folder = Path(d.started()["folder"])
    pids = [p for p in in_session(d.process.pid) if p != d.process.pid]
    assert len(pids) >= 7  # three instances, gcs_server, raylet, its two agents
    d.process.kill()
    gone_s = wait_gone(pids)
    wait_until(lambda: not folder.exists(), say=lambda: sorted(folder.rglob("*")))
    print(f"gone after {gone_s:.1f} s")


def test_a_ray_of_our_own_is_for_this_user_alone(own_ray):
    facts = own_ray.started()
    folder = Path(facts["folder"])
    assert folder.stat().st_mode & 0o777 == 0o700 and Path(facts["session"]).is_relative_to(folder)
    assert facts["listens"] == [], "on loopback only"
    assert facts["token"] == TOKEN, "that of somebody else is left as it was"
    token, *others = [f for f in folder.iterdir() if f.name == "token"]
    assert others == [] and token.stat().st_mode & 0o777 == 0o600
    for pid in set(in_session(own_ray.process.pid)) - {own_ray.process.pid}:
        there = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert f"RAY_AUTH_TOKEN_PATH={token}".encode() in there and b"RAY_AUTH_MODE=token" in there
        assert not any(entry.startswith(b"RAY_AUTH_TOKEN=") for entry in there)


def test_ctrl_c_closes_a_ray_of_our_own_without_a_trace(own_ray):
    d = own_ray
    facts = d.started()
    pids = in_session(d.process.pid)
    assert set(pids) > set(facts["pids"].values())
    os.killpg(d.process.pid, signal.SIGINT)  # as a terminal does: to all of the group
    assert d.ended() == 0
    close_s = json.loads(d.process.stdout.read())["close_s"]
    assert close_s < 8
    assert alive(pids) == []
    assert not Path(facts["folder"]).exists()
    print(f"started in {facts['start_s']:.1f} s, closed in {close_s:.1f} s")


def in_session(leader):
    """All processes that descend from the session's leader and stayed in it."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            found.append(int(stat.parent.name))
    return found
