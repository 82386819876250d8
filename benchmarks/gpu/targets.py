"""The targets of a session in words: which were missed and by how much, which were not measured.

The targets are those of LLaVA-1.5-7B and Qwen2-VL-7B shapes in bfloat16 on one large GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import HYBRIDS

DECODE, PREFILL, ENCODE = 1.5, 1 / 0.65, 1 / 0.5  # at most so many times their floors
BESIDE = 1.2  # times one after the other
HOST = 0.5  # of a decode step: what the lane's thread spends on it
MOVED = 0.7  # of the rate of a copy
P95_MS = {"picture": 2.0, "kv": 8.0}
FIRST_CALL = 20.0  # times the next: a plan per shape


def read(path: Path) -> Any:
    """The results of a part; None if there are none."""
    try:
        return json.loads(path.read_text())["results"]
    except (OSError, ValueError, KeyError):
        return None


def summary(out: Path) -> list[str]:
    """A line for everything that is off target, then for what was not run, then how many targets were met."""
    found = [*_micro(out), *_moves(out), *_rest(out)]
    missed = [line for met, line in found if met is False]
    absent = [f"not run: {line}" for met, line in found if met is None]
    n_met = sum(met is True for met, _ in found)
    return [*(f"off target: {line}" for line in missed), *absent, f"{n_met} targets met, {len(missed)} missed"]


def _micro(out: Path) -> Iterator[tuple[bool | None, str]]:
    files = sorted(out.glob("micro_*_graphs.json"))
    if not files:
        yield None, "decode, prefill, encode and both lanes side by side (step micro)"
    for file in files:
        results = read(file) or {"cases": {}, "model": file.stem, "mode": "?"}
        model = results["model"]
        if results["cases"] and results["operators"].get("attention") != "flashinfer":
            yield False, f"{model}: attention is by {results['operators']['attention']} ({'; '.join(results['notes'])})"
        for name, case in results["cases"].items():
            stage, size = name.split()[0], int(name.split()[1])
            most = {"decode": DECODE, "prefill": PREFILL, "encode": ENCODE}[stage]
            if (stage == "prefill" and size < 2048) or (stage == "encode" and size < 8):
                continue  # too small to fill a GPU
            met = case["of_floor"] <= most
            yield met, f"{model}, {name}: {case['of_floor']:.2f} × its floor, at most {most:.2f} wanted"
        beside = results.get("beside, priority -1")
        if beside is None and model in HYBRIDS:
            continue  # only some of its cases are measured
        if beside is None:
            yield None, f"{model}: encode beside decode"
        else:
            words = f"{model}: encode beside decode {beside['speed']:.2f} × one after the other, {BESIDE} wanted"
            yield beside["speed"] >= BESIDE, words


def _moves(out: Path) -> Iterator[tuple[bool | None, str]]:
    within = read(out / "moves.json")
    if within is None:
        yield None, "a migration within the process (step moves)"
    for name, rates in (within or {}).items():
        share = rates.get("kernel", rates["copies"]) / rates["one copy"]
        yield share >= MOVED, f"{name}: a migration within the process at {share:.0%} of a copy, {MOVED:.0%} wanted"
    between = read(out / "b07.json")
    if between is None:
        yield None, "blocks between two processes (b07, step moves)"
    for one in between or []:
        for order, cells in one["orders"].items():
            way = next((t for t in ("cuda-ipc", "shared-memory") if t in cells), None)
            if way is None:
                yield False, f"{one['cache']}, {order}: no one-sided transport"
                continue
            share, p95_ms = cells[way]["of_copy"]["median"], cells[way]["p95_ms"]
            yield share >= MOVED, f"{one['cache']} by {way}, {order}: {share:.0%} of a copy, {MOVED:.0%} wanted"
            most = P95_MS[one["cache"]]
            yield p95_ms <= most, f"{one['cache']} by {way}, {order}: p95 {p95_ms:.2f} ms, at most {most} wanted"
    killed = read(out / "killed.json")
    if killed is None:
        yield None, "a killed exporter (step moves); if the part failed, its importer died, too"
    else:
        yield killed["ended"] and killed["computes"], f"after the exporter's death: {killed}"


def _rest(out: Path) -> Iterator[tuple[bool | None, str]]:
    truth = read(out / "rates.json")
    if truth is None or "new_shapes" not in truth:
        yield None, "attention at new shapes (step moves)"
    else:
        ratios = [first / again for first, again in truth["new_shapes"]["without"][1:]]
        words = f"without cuDNN, attention at a new shape takes up to {max(ratios):.0f} × the next call"
        yield max(ratios) < FIRST_CALL, words
    ways = {path.stem.removeprefix("whole_"): read(path) for path in sorted(out.glob("whole_*.json"))}
    if not ways:
        yield None, "what the host spends on a decode step (step whole)"
    for way, results in ways.items():
        decode = results["decode"] if results else {}
        if "device_ms" in decode:
            step_ms = decode["device_ms"] + max(0.0, decode["gap_ms"])
            words = f"{way}: {decode['host_ms']:.2f} ms of the host for a decode step of {step_ms:.2f} ms"
            yield decode["host_ms"] <= HOST * step_ms, f"{words}, at most {HOST:.0%} wanted"
