"""Instances that cost nothing: a real node, scheduler and engine around a device that answers by arithmetic."""

import os
import sys
import time

from hydrainfer.cache import CacheSet
from hydrainfer.core import CheckpointError, ExportHandle, Role, Stage, StepResult, TokenWork
from hydrainfer.engine import Engine, Moves
from hydrainfer.scheduler import Budgets, Policy, Scheduler
from tests.engine.rig import TimedRunner
from tests.scheduler.fakes import EMBED, KV, expected_tokens


class Arithmetic:
    """The tokens of `tests.scheduler.fakes`, without looking into caches: they are in other processes."""

    def run(self, batch):
        result = StepResult(batch)
        for item in batch.work:
            if isinstance(item, TokenWork) and item.sample:
                tokens = expected_tokens(item.seq.request)
                result.tokens.append(tokens[len(item.seq.tokens) - item.seq.request.n_prompt])
        return result


class Done:
    cut = False

    def poll(self, now):
        return True

    def ready_at(self):
        return None


class NothingToPull:
    def __init__(self):
        self.exports = {spec: ExportHandle("fake") for spec in ("kv", "embed")}

    def pull(self, sources, pulls):
        return Done()

    def offer(self, name, host):
        return self.exports

    def end_offer(self, name):
        return False

    def forget(self, owner):
        pass

    def close(self):
        pass


def light(plan, step_s=0.005, fails_in="", checkpoint=None):
    """`fails_in`: the instance that cannot start. `checkpoint`: a file without which none can; while there is nothing
    in it they may later."""

    def build(node):
        if plan.name == fails_in:
            raise RuntimeError("no such weights")
        if checkpoint is not None and not checkpoint.exists():
            raise CheckpointError(f"{checkpoint} is missing")
        if checkpoint is not None and not checkpoint.read_text():
            raise RuntimeError("no weights yet")
        role = Role.parse(plan.role)
        sizes = {}
        if role.runs(Stage.ENCODE) or role.runs(Stage.PREFILL):
            sizes[EMBED] = 64
        if role.runs(Stage.PREFILL) or role.runs(Stage.DECODE):
            sizes[KV] = 256
        scheduler = Scheduler(role, CacheSet(sizes), Budgets(tokens=64, images=2), Policy())
        runners = {lane: TimedRunner(Arithmetic(), time.monotonic, step_s) for lane in role.lanes}
        moves = Moves(node.name, node.incarnation, scheduler, node.placer, node, NothingToPull())
        engine = Engine(scheduler, runners, node.sink, node.record, moves=moves, moved=node.moved)
        facts = {
            "threads": os.environ.get("OMP_NUM_THREADS", ""),
            "cores": str(sorted(os.sched_getaffinity(0))),
            "node": _node(),
        }
        return engine, facts

    return build


def _node():
    """Where Ray has put us."""
    ray = sys.modules.get("ray")
    return ray.get_runtime_context().get_node_id() if ray is not None else ""
