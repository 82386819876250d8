"""A server in its own process: starts a layout with Ray, says which processes it has, waits for a signal."""

import faulthandler
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from hydrainfer.cluster import RunFolder
from tests.cluster.light import light
from tests.cluster.rig import Rig


def main(folder, address=None):
    faulthandler.register(signal.SIGUSR1)  # says where it stands
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in a shell's background ignores
    start = time.monotonic()
    from hydrainfer.cluster.ray import RayLauncher

    run = RunFolder(for_ray=True)
    launcher = RayLauncher(partial(light), address, run)
    try:
        with Rig("1E1P1D", launcher, folder) as rig:
            tokens, expected = rig.answer("a", pictures=[1])
            facts = {
                "pids": {i.name: i.pid for i in rig.hub.instances()},
                "right": tokens == expected,
                "session": str(launcher.session),
                "folder": str(run.path),
                "token": {k: v for k, v in os.environ.items() if k.startswith("RAY_AUTH")},
                "listens": reachable_from_outside(i.pid for i in rig.hub.instances()),
                "start_s": time.monotonic() - start,
            }
            print(json.dumps(facts), flush=True)
            time.sleep(300)
    except KeyboardInterrupt:
        print(json.dumps({"close_s": rig.close_s}), flush=True)
    finally:
        run.remove()


def reachable_from_outside(pids):
    """Listening TCP sockets of these processes, of their parent and of this one that are not bound to loopback."""
    inodes = set()
    for p in {"self"}.union(*((pid, parent(pid)) for pid in pids)):
        for fd in Path(f"/proc/{p}/fd").iterdir():
            try:
                inodes.add(str(fd.readlink()).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    lines = [line.split() for f in ("tcp", "tcp6") for line in Path(f"/proc/net/{f}").read_text().splitlines()[1:]]
    return [f[1] for f in lines if f[3] == "0A" and f[9] in inodes and "0100007F" not in f[1]]


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
