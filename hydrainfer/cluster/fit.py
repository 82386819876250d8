"""Checks that a layout fits a cluster, made before an instance waits for resources that never become free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from hydrainfer.config import MachineShare

Amounts = Mapping[str, float]
"""Amounts by Ray's names: CPU, GPU and custom resources."""


def needs(share: MachineShare) -> dict[str, float]:
    amounts = {"CPU": share.cpus or 0.0, "GPU": share.gpus or 0.0, **share.resources}
    return {name: amount for name, amount in amounts.items() if amount}


def cpus_each(n: int, nodes: Iterable[Amounts]) -> float:
    """The number of CPUs for each of `n` instances: one, or the largest 1/k of a CPU that `nodes` have for each."""
    cpus = [node.get("CPU", 0.0) for node in nodes]
    if not any(cpus):
        return 0.0
    k = 1
    while sum(math.floor(c * k) for c in cpus) < n:
        k += 1
    return math.floor(10_000 / k) / 10_000  # Ray's granularity


def shortfall(wanted: Mapping[str, Amounts], nodes: Sequence[Amounts], free: Amounts | None = None) -> str | None:
    """One line that says what is missing for the instances of `wanted`, or None if they fit. `free`: the amounts that
    are not in use, summed over all nodes; None if everything is free."""
    for name in sorted({r for amounts in wanted.values() for r in amounts}):
        total = sum(amounts.get(name, 0.0) for amounts in wanted.values())
        there = sum(node.get(name, 0.0) for node in nodes)
        if name not in ("CPU", "GPU") and not there:
            who = next(n for n, amounts in wanted.items() if name in amounts)
            return f"no node has resource {name!r}, which {who} needs"
        if total > there + _EPS:
            return f"layout needs {_amount(total, name)}, the cluster has {there:g}"
        if free is not None and total > free.get(name, 0.0) + _EPS:
            return (
                f"layout needs {_amount(total, name)}, the cluster has {there:g}, of which {free.get(name, 0.0):g} free"
            )
    for instance, amounts in wanted.items():
        if not any(all(node.get(r, 0.0) + _EPS >= a for r, a in amounts.items()) for node in nodes):
            return f"no single node has {', '.join(_amount(a, r) for r, a in amounts.items())} for {instance}"
    return None


_EPS = 1e-6


def _amount(amount: float, name: str) -> str:
    if name in ("CPU", "GPU"):
        return f"{amount:g} {name}{'' if amount == 1 else 's'}"
    return f"{amount:g} of resource {name!r}"
