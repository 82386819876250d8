"""Emulated instances in processes of their own, with a hub in front: real sockets, real shared memory, no weights.
Blocks hold tags, so an answer from wrong ones is an error."""

import os
import shutil
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np

from hydrainfer.cache import DEVICE, HOST, CacheSet, EmbedSpec, FullSpec
from hydrainfer.cluster import Hub, Mesh, NodePlan, PixelClient, Pulse, ServerSide
from hydrainfer.config import read_layout
from hydrainfer.core import CostModel, Role, Stage, owner_of
from hydrainfer.engine import Copies, Engine, Moves, Timing, tier_movers
from hydrainfer.machine import host_identity
from hydrainfer.runtime import EmulatedDevice, EmulatedRunner
from hydrainfer.scheduler import Budgets, Policy, Scheduler
from hydrainfer.storage import BlockStore, Exports, Routes, StorePuller, between_tiers
from tests.cluster.faults import Faults, inject
from tests.cluster.processes import Processes, alive, memories
from tests.scheduler.fakes import make_request
from tests.waiting import SOON_S

KV = FullSpec.of(layers=1, kv_heads=1, head_dim=4, dtype="float32", block_tokens=4)
EMBED = EmbedSpec.of(width=4, dtype="float32", block_tokens=4)
COST = CostModel(encode_image_s=0.02, step_base_s=0.004, prefill_token_s=1e-5, decode_token_s=1e-5)
SPOKEN = range(3, 500)
TIMING = Timing(lease_s=1.0, renew_s=0.3, resend_s=0.2)
PULSE = Pulse(beat_s=0.1, gap_s=0.5)


def engine_parts(role, clock, pixels, shared, max_running=64, kv_blocks=512, headroom=32):
    """Those that decode have room in host memory, too: for whoever finds no other."""
    sizes = {}
    if role.runs(Stage.ENCODE) or role.runs(Stage.PREFILL):
        sizes[EMBED] = 64
    if role.runs(Stage.PREFILL) or role.runs(Stage.DECODE):
        sizes[KV] = kv_blocks
    stores = {spec.name: BlockStore(spec, n, shared=shared) for spec, n in sizes.items()}
    host = {KV: 128} if role.runs(Stage.DECODE) else {}
    hosted = {spec.name: BlockStore(spec, n) for spec, n in host.items()}
    device = EmulatedDevice(COST, clock, stores, SPOKEN, pixels)
    budgets, policy = Budgets(tokens=64, images=2, running=max_running), Policy(headroom_tokens=headroom)
    scheduler = Scheduler(role, CacheSet(sizes), budgets, policy, host=CacheSet(host))
    return scheduler, {lane: EmulatedRunner(device, lane) for lane in role.lanes}, stores, hosted


def emulated(folder, few, plan):
    """`folder`: where faults are told. `few`: what there is less of than usual."""

    def build(node):
        pixels = PixelClient(plan.pixels)
        role = Role.parse(plan.role)
        scheduler, runners, stores, hosted = engine_parts(role, node.clock, pixels, shared=True, **few)
        exports = Exports(owner_of(node.name, node.incarnation), stores, "shared-memory")
        puller = StorePuller({DEVICE: stores, HOST: hosted}, exports, Routes("shared-memory"), node.wake)
        timing = TIMING._replace(patience_s=plan.pulse.patience_s)
        moves = Moves(node.name, node.incarnation, scheduler, node.placer, node, puller, timing)
        movers = tier_movers(*between_tiers({DEVICE: stores, HOST: hosted}, node.wake)) if hosted else {}
        copies = Copies(scheduler, movers) if hosted else None
        engine = Engine(scheduler, runners, node.sink, node.record, moves=moves, moved=node.moved, copies=copies)
        inject(node, engine, Faults(folder, plan.name))
        last = Path(folder) / f"{plan.name}.leased"
        node.at_end += [pixels.close, lambda: last.write_text(str(leased(engine.stats(node.clock()))))]
        return engine, {}

    return build


def leased(stats):
    return sum(blocks[1] for blocks in stats.cache_blocks.values())


def undisturbed(request):
    """The answer of one instance that has it alone."""
    now, outputs = 0.0, []
    scheduler, runners, *_ = engine_parts(Role.parse("EPD"), lambda: now, None, shared=False)
    engine = Engine(scheduler, runners, outputs.extend)
    engine.submit(request, now)
    while not engine.idle:
        now = max(engine.step(now) or 0.0, now + 1e-4)
    return [t for o in outputs for t in o.token_ids]


def picture(_):
    return np.zeros((2, 2, 3), np.uint8)


class Fleet:
    """A hub with its instances. `folder`: for faults and last words. `few`: see `engine_parts`."""

    def __init__(self, layout, folder, pulse=PULSE, timeout_s=60.0, **few):
        specs = read_layout(layout)
        self.folder, self.sockets = Path(folder), Path(tempfile.mkdtemp(prefix="hydrainfer-test-"))
        self.faults = Faults(folder)
        self.launcher = Processes(partial(emulated, str(folder), few))
        self.outputs, self.heard = [], threading.Condition()
        self.side = ServerSide({s.name: s.role for s in specs}, self._sink, pulse=pulse)
        at = f"ipc://{self.sockets}/"
        self.hub = Hub(self.side, Mesh(f"{at}hub"), self.launcher, picture, f"{at}pixels")
        shared = {
            "n_instances": len(specs),
            "hub": self.hub.address,
            "pixels": self.hub.pixels_at,
            "bind": at + "{name}-{incarnation}",
            "hub_host": host_identity(),
            "pulse": pulse,
        }
        self.hub.start([NodePlan(s.name, str(s.role), **shared) for s in specs], timeout_s)

    def _sink(self, outputs):
        with self.heard:
            self.outputs += outputs
            self.heard.notify_all()

    def ask(self, name, deadline_s=60.0, **kw):
        request = make_request(name, deadline_s=time.monotonic() + deadline_s, **kw)
        self.hub.submit(request)
        return request

    def said(self, request):
        return [o for o in self.outputs if o.request_id == request.id]

    def answer(self, request, timeout_s=50.0):
        """(finish reason, tokens, error), once it has ended; every output is new, and one is the last."""
        with self.heard:
            ended = self.heard.wait_for(lambda: any(o.finish_reason for o in self.said(request)), timeout_s)
            said = self.said(request)
        assert ended, (request.id, said[-1:], self.side.lives.n_live, self.hub.instances())
        assert [o.finish_reason is not None for o in said] == [False] * (len(said) - 1) + [True], said
        return said[-1].finish_reason, [t for o in said for t in o.token_ids], said[-1].error

    def infos(self):
        return {i.name: i for i in self.hub.instances()}

    def wait(self, true, timeout_s=SOON_S):
        start = time.monotonic()
        while not true():
            assert time.monotonic() - start < timeout_s, self.hub.instances()
            time.sleep(0.01)
        return time.monotonic() - start

    def wait_whole(self, timeout_s=SOON_S):
        """Every instance is there, no block is leased, and nobody maps the memory of a dead one."""

        def whole():
            infos = self.infos().values()
            there = all(i.state == "alive" and i.stats is not None for i in infos)
            if not there or any(leased(i.stats) or i.stats.n_waiting or i.stats.n_running for i in infos):
                return False
            owned, borrowed = memories(i.pid for i in infos)
            return borrowed <= owned

        self.wait(whole, timeout_s)

    def close(self):
        """Nothing is left of it."""
        self.faults.disarm()
        self.hub.close()
        shutil.rmtree(self.sockets)
        pids = [pid for found in self.launcher.pids.values() for pid in found]
        assert alive(pids) == [] and memories([os.getpid()]) == (set(), set())
