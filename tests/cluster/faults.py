"""Deaths at named moments: what an instance is made to do at the next one, told by a file, and done once.

    at: "send Offer"    before that message leaves        "launch encode"    a batch of that stage is running
        "sent Offer"    after it has left
        "hear Admit"    it has come, and is not read yet
        "parked"        a request has come to lie in host memory; "entering", "leaving": it is copied from or to there

The file is renamed by the instance that dies of it; until then its other troubles hold for every instance. Nothing of
this is in the instances' own code: `inject` wraps their sockets, runners and copies.
"""

import os
import signal
import time
from pathlib import Path

import msgspec

from hydrainfer.cache import HOST
from hydrainfer.cluster.messages import decode_to_hub, decode_to_instance
from hydrainfer.cluster.node import HUB
from hydrainfer.core import Lane, Parcel, Stage
from hydrainfer.storage import TransportError

_LEAVES_S = 0.1  # a message that was handed to its socket has left it


class Fault(msgspec.Struct, frozen=True):
    """`who`: dies, by the beginning of its name. `nth`: time that it comes there. Meanwhile copies take `copy_s` longer
    or fail, and what targets say to their sources is lost."""

    who: str
    at: str
    nth: int = 1
    copy_s: float = 0.0
    copies_fail: bool = False
    targets_are_mute: bool = False


class Faults:
    """`folder`: where the file is."""

    def __init__(self, folder, name=""):
        self.name = name
        self._armed, self._fired = Path(folder) / "armed", Path(folder) / "fired"
        self._reached = {}

    def arm(self, fault):
        self._fired.unlink(missing_ok=True)
        unfinished = self._armed.with_suffix(".new")
        unfinished.write_bytes(msgspec.json.encode(fault))
        unfinished.rename(self._armed)

    def fired(self):
        return self._fired.exists()

    def disarm(self):
        self._armed.unlink(missing_ok=True)

    def now(self):
        """The fault that is armed."""
        try:
            return msgspec.json.decode(self._armed.read_bytes(), type=Fault)
        except FileNotFoundError:
            return None

    def reach(self, point, then_s=0.0):
        fault = self.now()
        if fault is None or fault.at != point or not self.name.startswith(fault.who):
            return
        n = self._reached[fault] = self._reached.get(fault, 0) + 1
        if n < fault.nth:
            return
        try:
            self._armed.rename(self._fired)
        except FileNotFoundError:
            return  # another one did
        time.sleep(then_s)
        os.kill(os.getpid(), signal.SIGKILL)


class TappedWire:
    def __init__(self, wire, faults):
        self._wire, self._faults = wire, faults

    def __getattr__(self, name):
        return getattr(self._wire, name)

    def send(self, name, data):
        kinds = kinds_of(decode_to_hub(data) if name == HUB else decode_to_instance(data))
        for kind in kinds:
            self._faults.reach(f"send {kind}")
        fault = self._faults.now()
        if fault is not None and fault.targets_are_mute and kinds & {"Admit", "Renew", "Landed"}:
            return
        self._wire.send(name, data)
        for kind in kinds:
            self._faults.reach(f"sent {kind}", _LEAVES_S)

    def receive(self):
        for data in self._wire.receive():
            for kind in kinds_of(decode_to_instance(data)):
                self._faults.reach(f"hear {kind}")
            yield data


def kinds_of(message):
    if isinstance(message, Parcel):
        return {type(m).__name__ for m in message.messages}
    return {type(message).__name__}


def inject(node, engine, faults):
    """From now on `node` may die of them."""
    node.mesh = TappedWire(node.mesh, faults)
    for runner in engine.lanes.runners.values():
        _tap_launch(runner, faults)
    transport = engine.moves._puller._transport
    transport.copy = _slowly(transport.copy, faults)
    _tap_parking(engine.scheduler.parking, faults)


def _tap_parking(parking, faults):
    landed, shift = parking.landed, parking._shift

    def tapped(seq):
        there = landed(seq)
        if there:
            faults.reach("parked")
        return there

    def shifted(copy):
        shift(copy)
        faults.reach("entering" if copy.source == HOST else "leaving")

    parking.landed, parking._shift = tapped, shifted


def _tap_launch(runner, faults):
    launch = runner.launch

    def tapped(batch):
        stages = {item.seq.stage for item in batch.work} if batch.lane is Lane.LANGUAGE else {Stage.ENCODE}
        ticket = launch(batch)
        for stage in stages:
            faults.reach(f"launch {stage.value}")
        return ticket

    runner.launch = tapped


def _slowly(copy, faults):
    def slowly(*args):
        fault = faults.now() or Fault("", "")
        time.sleep(fault.copy_s / 2)
        if fault.copies_fail:
            raise TransportError("this copy was made to fail")
        copy(*args)
        time.sleep(fault.copy_s / 2)

    return slowly
