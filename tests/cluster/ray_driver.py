"""A server in its own process: starts a layout on a Ray of its own, says which processes it has, waits for a signal."""

import json
import sys
import time
from functools import partial
from pathlib import Path

from tests.cluster.light import light
from tests.cluster.rig import Rig


def main(folder):
    start = time.monotonic()
    from hydrainfer.cluster.ray import RayLauncher

    launcher = RayLauncher(partial(light))
    try:
        with Rig("1E1P1D", launcher, folder) as rig:
            tokens, expected = rig.answer("a", pictures=[1])
            facts = {
                "pids": {i.name: i.pid for i in rig.hub.instances()},
                "right": tokens == expected,
                "facts": rig.hub.facts,
                "session": str(launcher.session),
                "start_s": time.monotonic() - start,
            }
            print(json.dumps(facts), flush=True)
            time.sleep(300)
    except KeyboardInterrupt:
        print(json.dumps({"close_s": rig.close_s}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
