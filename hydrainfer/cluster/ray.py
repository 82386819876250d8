"""Instances as Ray actors: Ray places them, restarts them when they die, and carries their logs. No tokens and no
messages pass through Ray. This is the only file that imports ray, and only when instances are launched.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from hydrainfer.cluster.actor import ActorInstance
from hydrainfer.cluster.fit import cpus_each, needs, shortfall
from hydrainfer.cluster.folder import OBJECT_STORE_BYTES, RunFolder
from hydrainfer.cluster.launch import Build, Gone
from hydrainfer.cluster.node import NodePlan
from hydrainfer.core import ConfigError
from hydrainfer.machine import host_identity, n_cores

_log = logging.getLogger(__name__)
_CALLS = 8  # calls that may wait in one actor at once
_ASK_AGAIN_S = 0.2
_NO_INCARNATION = -1
_GONE_S = 2.0
_CONNECT_S = 5.0
_DAEMONS = {"gcs_server": "Ray's control process", "raylet": "Ray's node process"}
_TROUBLE_S = 60.0  # so long after the end of Ray, it is the reason why an instance is not there
_LOOK_S = 1.0  # how often it is checked that Ray's session is there
_REVIVALS, _REVIVALS_S = 3, 600.0  # how often in how long a Ray of our own is started again
_FREED_S = 3.0  # resources that were just released count as free by then
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_task_events_shutdown_flush_timeout_ms": "300",  # default 5000: the wait for a process that may be dead
    "RAY_prestart_worker_first_driver": "0",  # default 1: a process for every core, of which we need one per instance
    "RAY_worker_niceness": "0",  # default 15: engines would wait for every other process on the machine
}
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # despite its name: "this cluster is one machine"


class RayLauncher:
    """A launcher that runs every instance as a Ray actor. `build`: makes an instance's engine in the actor's process;
    must be picklable, and is unpickled after threads and cores are set. `address`: the Ray cluster to join. None starts
    one in `folder`, which only this user of this machine can reach and which ends with this process; if it dies, it is
    started again with its instances. If this process is already connected to a Ray cluster, that one is used."""

    def __init__(
        self, build: Callable[[NodePlan], Build], address: str | None = None, folder: RunFolder | None = None
    ) -> None:
        self.revives = True
        self.lost: str | None = None
        self.actors: dict[str, Any] = {}
        self._build = pickle.dumps(build)
        self._address, self._folder = address, folder
        self._watched: dict[str, int] = {}
        self._on_gone: Gone = lambda *_: None
        self._closing = False
        self.session: Path | None = None
        self._connected = False
        self._plans: Sequence[NodePlan] = ()
        self._revived_s: list[float] = []  # when Ray was started again, lately
        self._ended = ""  # why it had to be
        # Ray's daemons die with the thread that starts them. Ray sets signal handlers only if that is the main thread.
        self._ray_thread = ThreadPoolExecutor(1, "ray")

    def start(self, plans: Sequence[NodePlan], on_gone: Gone) -> None:
        self._on_gone, self._plans = on_gone, plans
        self._ray_thread.submit(self._connect, plans).result()
        self._launch(plans, len(plans))

    def _launch(self, plans: Sequence[NodePlan], n_instances: int) -> None:
        """Make an actor of each of these instances, of the `n_instances` that share the machines. Raises `ConfigError`
        if there is no room for them."""
        import ray

        shares = self._place(plans, n_instances)
        actor_class = ray.remote(ActorInstance)
        for plan in plans:
            share = shares[plan.name]
            options = actor_class.options(
                name=f"{plan.name}-{uuid.uuid4().hex[:12]}",
                num_cpus=share.cpus,
                num_gpus=share.gpus or 0,
                resources=dict(share.resources) or None,
                max_restarts=-1,
                max_concurrency=_CALLS,
            )
            self.actors[plan.name] = options.remote(plan, self._build)

    @property
    def trouble(self) -> str:
        lately = bool(self._revived_s) and time.monotonic() < self._revived_s[-1] + _TROUBLE_S
        return self._ended if lately else ""

    def watch(self, name: str, incarnation: int) -> None:
        self._watched[name] = incarnation
        self._ask(name, incarnation)

    def kill(self, name: str, incarnation: int) -> None:
        import ray

        actor = self.actors.get(name)
        if actor is not None and self._watched.get(name) == incarnation and not self._closing:
            ray.kill(actor, no_restart=False)

    def restart(self, name: str) -> None:
        import ray

        actor = self.actors.get(name)
        if actor is not None and not self._closing:
            ray.kill(actor, no_restart=False)

    def rouse(self, name: str) -> None:
        """Call the actor. If its object could not be made, perhaps because the disk was full, Ray takes it for alive
        until a call fails, and starts it again only then."""
        actor = self.actors.get(name)
        if actor is not None and not self._closing:
            actor.outlast.remote(_NO_INCARNATION)

    def add(self, plan: NodePlan) -> None:
        if self._address is None and plan.share.cpus is None:  # our own Ray counts CPUs only to start all at once
            plan = replace(plan, share=msgspec.structs.replace(plan.share, cpus=0.0))
        self._launch([plan], len(self._plans) + 1)
        self._plans = [*self._plans, plan]

    def remove(self, name: str) -> None:
        self._plans = [plan for plan in self._plans if plan.name != name]
        self._ray_thread.submit(self._dismiss, self.actors.pop(name))

    def close(self, timeout_s: float) -> None:
        if self._closing:
            return
        self._closing = True
        self._ray_thread.submit(self._end, time.monotonic() + timeout_s).result()
        self._ray_thread.shutdown()

    # ---- on Ray's thread

    def _connect(self, plans: Sequence[NodePlan]) -> None:
        for key, value in (_SETTINGS | (_LOOPBACK if self._address is None else {})).items():
            os.environ.setdefault(key, value)
        import ray

        if ray.is_initialized():
            return
        logging.getLogger("ray").setLevel(logging.ERROR)  # the server prints its own messages at start
        if self._address is None:
            self._start_own(len(plans))
            return
        _check_address(self._address)
        try:
            ray.init(address=self._address, **_common())
        except (ConnectionError, RuntimeError, ValueError) as e:
            raise _cannot_join(self._address, str(e).splitlines()[0]) from None
        self._connected = True

    def _start_own(self, n_instances: int) -> None:
        """Start a Ray that only this process uses, and watch its daemons. Raises `ConfigError`."""
        import ray

        assert self._folder is not None, "a Ray of our own needs a folder"
        try:
            with _environment(_private_to(self._folder)), _signal_kept(signal.SIGTERM):
                _forget_token()  # an earlier run may have left one
                ray.init(
                    address="local",
                    include_dashboard=False,
                    num_cpus=max(n_cores(), n_instances + 1),  # so that instances never wait for a CPU
                    object_store_memory=OBJECT_STORE_BYTES,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(self._folder.ray),
                    **_common(),
                )
        except Exception as e:  # it depends on what the machine lacks
            reason = " ".join(str(e).split())[:200]
            raise ConfigError(f"Ray cannot be started: {type(e).__name__}: {reason}", param="launcher") from None
        self._connected = True
        node = ray._private.worker.global_worker.node
        self.session = Path(node.get_session_dir_path())
        node.kill_monitor(check_alive=False)  # of the autoscaler; Ray has no option not to start these two
        node.kill_dashboard(check_alive=False)
        daemons = {kind: node.all_processes[kind][0].process for kind in _DAEMONS}
        watched = daemons, self.session, self._folder
        threading.Thread(target=self._watch_daemons, args=watched, name="ray-daemons", daemon=True).start()

    def _revive(self, reason: str, folder: RunFolder) -> None:
        """Start Ray again, and all instances, after it has ended for `reason`; too often: set `lost`."""
        import ray

        if self._closing:
            return
        now = time.monotonic()
        self._revived_s = [at for at in self._revived_s if now - at < _REVIVALS_S]
        self._ended = f"{reason}; Ray and the instances are started again"
        self.actors.clear()
        folder.end_processes()
        if len(self._revived_s) == _REVIVALS:
            self.lost = f"{reason}, the {_REVIVALS + 1}th time in {_REVIVALS_S / 60:.0f} minutes"
            return
        _log.error("%s", self._ended)
        self._revived_s.append(now)
        self._watched.clear()
        try:
            with _signal_kept(signal.SIGTERM):
                ray.shutdown()
            self._connected = False
            shutil.rmtree(folder.ray, ignore_errors=True)
            self._start_own(len(self._plans))
            self._launch(self._plans, len(self._plans))
        except Exception as e:
            self.lost = f"{reason}, and Ray could not be started again: {e}"

    def _end(self, deadline_s: float) -> None:
        if not self._connected and not self.actors:
            return
        import ray

        if self.lost is not None:  # Ray can no longer be asked
            self.actors.clear()
        pids: list[int] = []
        calls = [actor.finish.remote() for actor in self.actors.values()]
        if calls:
            done, _ = ray.wait(calls, num_returns=len(calls), timeout=max(deadline_s - time.monotonic(), 0.0))
            for call in done:
                with suppress(ray.exceptions.RayError):
                    host, pid = ray.get(call)
                    pids += [pid] if host == host_identity() else []
        for actor in self.actors.values():
            ray.kill(actor, no_restart=True)
        self.actors.clear()
        if self.session is None:
            _wait_gone(pids)
        if self._connected:
            ray.shutdown()
        if self.session is not None:
            _wait_gone(pids)
            _forget_token()

    def _dismiss(self, actor: Any) -> None:
        """End an actor for good once its instance has closed."""
        import ray

        ray.wait([actor.finish.remote()], timeout=_GONE_S)
        ray.kill(actor, no_restart=True)

    # ---- placement

    def _may_live(self, name: str, answer: Future) -> bool:
        import ray

        unreachable = isinstance(answer.exception(), ray.exceptions.ActorUnavailableError)
        return unreachable and not _is_down(self.actors[name])

    def _place(self, plans: Sequence[NodePlan], n_instances: int) -> dict[str, Any]:
        """The machine share of each plan, with `cpus` filled in. Raises `ConfigError` if the cluster lacks the
        resources."""
        import ray

        alive = [n for n in ray.nodes() if n["Alive"]]
        if plans[0].bind.startswith("ipc:") and len({n["NodeManagerAddress"] for n in alive}) > 1:
            raise ConfigError("this Ray cluster has several machines: give --cluster-host", param="cluster_host")
        nodes = [n["Resources"] for n in alive]
        cpus = cpus_each(n_instances, nodes)
        shares = {
            p.name: p.share if p.share.cpus is not None else msgspec.structs.replace(p.share, cpus=cpus) for p in plans
        }
        wanted = {name: needs(s) for name, s in shares.items()}
        give_up_s = time.monotonic() + _FREED_S
        while missing := shortfall(wanted, nodes, ray.available_resources()):
            if shortfall(wanted, nodes) or time.monotonic() > give_up_s:
                raise ConfigError(missing, param="layout")
            time.sleep(_ASK_AGAIN_S)
        return shares

    # ---- deaths

    def _watch_daemons(self, daemons: Mapping[str, subprocess.Popen[bytes]], session: Path, folder: RunFolder) -> None:
        """Wait until one of the daemons ends or the session's directory is gone, then start Ray again. Without it no
        instance can be restarted, and Ray would end this process after a minute."""
        poll, names = select.poll(), {os.pidfd_open(process.pid): kind for kind, process in daemons.items()}
        for fd in names:
            poll.register(fd, select.POLLIN)
        while not (ended := poll.poll(_LOOK_S * 1000)) and session.exists() and not self._closing:
            pass
        for fd in names:
            os.close(fd)
        reason = "the directory of Ray's session is gone"
        if ended:
            kind = names[ended[0][0]]
            code = daemons[kind].poll()
            how = f"killed by signal {-code}" if code is not None and code < 0 else f"status {code}"
            reason = f"{_DAEMONS[kind]} ({kind}) has ended ({how})"
        if not self._closing:
            with suppress(RuntimeError):  # it was closed meanwhile
                self._ray_thread.submit(self._revive, reason, folder)

    def _ask(self, name: str, incarnation: int) -> None:
        """Call `outlast` on the actor, which returns when this incarnation is over."""
        if self._closing:
            return
        try:
            future: Future = self.actors[name].outlast.remote(incarnation).future()
            future.add_done_callback(partial(self._answered, name, incarnation))
        except Exception:
            _log.exception("Ray cannot be asked about instance %s", name)
            self._ask_later(name, incarnation)

    def _ask_later(self, name: str, incarnation: int) -> None:
        timer = threading.Timer(_ASK_AGAIN_S, self._ask, (name, incarnation))
        timer.daemon = True
        timer.start()

    def _answered(self, name: str, incarnation: int, answer: Future) -> None:
        if self._closing:
            return
        try:
            lives = self._may_live(name, answer)
        except Exception:
            _log.exception("Ray cannot say whether instance %s lives", name)
            lives = True
        if lives:
            self._ask_later(name, incarnation)
            return
        if self._watched.get(name) == incarnation:
            del self._watched[name]
        self._on_gone(name, incarnation)


def _common() -> dict[str, Any]:
    """The options of every connection to Ray."""
    return {"namespace": f"hydrainfer-{uuid.uuid4().hex}", "configure_logging": False, "log_to_driver": True}


def _check_address(address: str) -> None:
    """Raise `ConfigError` if nothing listens at `address`; Ray itself would take minutes to notice."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in address:
        raise ConfigError(f"--ray-address must be HOST:PORT, got {address!r}", param="ray_address")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as e:
        raise _cannot_join(address, str(e)) from None


def _cannot_join(address: str, reason: str) -> ConfigError:
    return ConfigError(f"cannot join the Ray cluster at {address}: {reason}", param="ray_address")


def _is_down(actor: Any) -> bool:
    """Whether the actor has no process now, according to the cluster."""
    import ray

    state = ray._private.state.actors(actor._actor_id.hex())
    return bool(state) and state["State"] in ("RESTARTING", "DEAD", "DEPENDENCIES_UNREADY", "PENDING_CREATION")


def _wait_gone(pids: Sequence[int]) -> None:
    deadline_s = time.monotonic() + _GONE_S
    for pid in pids:
        with suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                select.select([fd], [], [], max(deadline_s - time.monotonic(), 0.0))
            finally:
                os.close(fd)


def _private_to(folder: RunFolder) -> dict[str, str | None]:
    """The environment variables of a Ray that only this run can use: its token is in `folder`, and no other is set."""
    return {**folder.guard(), "RAY_AUTH_TOKEN_PATH": str(folder.new_token()), "RAY_AUTH_TOKEN": None}


@contextmanager
def _signal_kept(number: int) -> Iterator[None]:
    """Restore the handler of a signal after the block. Ray replaces that of SIGTERM when it starts and when it ends.
    Works on any thread."""
    action, libc = ctypes.create_string_buffer(512), ctypes.CDLL(None)  # larger than any `struct sigaction`
    libc.sigaction(number, None, action)
    try:
        yield
    finally:
        libc.sigaction(number, action, None)


@contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set these environment variables (None: unset) within the block, and restore them afterwards."""
    before = dict(os.environ)
    os.environ.update({k: v for k, v in values.items() if v is not None})
    for key in [k for k, v in values.items() if v is None]:
        os.environ.pop(key, None)
    try:
        yield
    finally:
        for key in [*values, "RAY_AUTH_MODE"]:  # Ray sets RAY_AUTH_MODE
            os.environ.pop(key, None)
            os.environ.update({key: before[key]} if key in before else {})


def _forget_token() -> None:
    """Make Ray drop the token and mode that it keeps in memory, and read them again when they are needed."""
    with suppress(ImportError):  # an older Ray
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()


__all__ = ["RayLauncher"]
