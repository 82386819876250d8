"""The bodies of `/health` and `/v1/instances`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydrainfer.core import InstanceInfo, InstanceStats, Role, Stage


def trouble(instances: Sequence[InstanceInfo], stall_s: float) -> dict[str, str] | None:
    """The reason why this server cannot serve, or None: a stage of its layout that no instance runs now, or else the
    instance that has made no progress for the longest time, if that time is over `stall_s`."""
    there = [i for i in instances if i.state != "dead"]
    roles = {Role.parse(i.role) for i in instances} or {Role.parse("EPD")}
    for stage in Stage:
        if any(role.runs(stage) for role in roles) and not any(Role.parse(i.role).runs(stage) for i in there):
            why = [i.trouble for i in instances if i.trouble and Role.parse(i.role).runs(stage)]
            message = f"no instance runs {stage.value} now"
            return {"status": "unavailable", "stage": stage.value, "message": ": ".join([message, *why[:1]])}
    stalled = [(i.stats.stalled_s, i.name, i.stats) for i in there if i.stats is not None]
    seconds, name, stats = max(stalled, key=lambda s: s[0], default=(0.0, "", None))
    if stats is None or seconds <= stall_s:
        return None
    stage_name = _stalled_stage(stats)
    stopped = seconds == float("inf")
    message = f"{name} has stopped" if stopped else f"{name} has made no progress in {stage_name} for {seconds:.0f} s"
    return {"status": "stalled", "instance": name, "stage": stage_name, "message": message}


def instance_card(info: InstanceInfo) -> dict[str, Any]:
    """One entry of `/v1/instances`."""
    there = info.state != "dead"
    return {
        "id": info.name,
        "object": "instance",
        "role": info.role,
        "state": info.state,
        "incarnation": info.incarnation,
        "pid": info.pid,
        "heard_s": round(info.heard_s, 3),
        "load": _load(info.stats) if there and info.stats is not None else None,
        "trouble": info.trouble or None,
    }


def _load(s: InstanceStats) -> dict[str, Any]:
    blocks = {
        spec: {"total": total, "leased": leased, "reusable": reusable}
        for spec, (total, leased, reusable) in s.cache_blocks.items()
    }
    return {
        "waiting": s.n_waiting,
        "running": s.n_running,
        "encoding": s.n_encoding,
        "prefilling": s.n_prefilling,
        "decoding": s.n_decoding,
        "migrating": s.n_migrating,
        "arriving": s.n_arriving,
        "parked": s.n_parked,
        "cache_blocks": blocks,
        "preemptions": s.n_preemptions,
        "landed": s.n_landed,
        "blocks_pulled": s.blocks_pulled,
        "drafts": {
            name: {"guesses": of.n_drafts, "tokens": of.n_tokens, "accepted": of.n_accepted}
            for name, of in s.drafts.items()
        },
    }


def _stalled_stage(s: InstanceStats) -> str:
    """The stage in which an instance makes no progress: the first one that has requests."""
    counts = {
        "encode": s.n_encoding,
        "prefill": s.n_prefilling,
        "decode": s.n_decoding + s.n_parked,
        "migration": s.n_migrating + s.n_arriving,
    }
    return next((stage for stage, n in counts.items() if n), "admission")
